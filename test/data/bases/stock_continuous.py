"""Tests on torch's own continuous class."""

import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
    requires_world_size,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


@instantiate_parametrized_tests
class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_all_reduce(self):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 2.0))

    @parametrize("source", [0, 1])
    def test_broadcast(self, source):
        tensor = torch.full((2,), float(self.rank))
        dist.broadcast(tensor, source)
        self.assertEqual(tensor, torch.full((2,), float(source)))

    def test_rank(self):
        self.assertEqual(dist.get_rank(), self.rank)
        self.assertEqual(self.world_size, dist.get_world_size())

    def test_class_has_the_group(self):
        self.assertEqual(dist.get_world_size(self.pg), 2)

    def test_subgroup(self):
        group = dist.new_group([0, 1])
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        self.assertEqual(tensor.item(), 2)

    def test_subgroup_again(self):
        group = dist.new_group([1])
        self.assertEqual(dist.get_rank(group), 0 if self.rank == 1 else -1)

    def test_objects(self):
        found = [None, None]
        dist.all_gather_object(found, self.rank)
        self.assertEqual(found, [0, 1])

    @requires_gloo()
    def test_backend(self):
        self.assertEqual(dist.get_backend(), "gloo")

    @skip_if_lt_x_gpu(2)
    def test_needs_two_devices(self):
        self.fail("there are none")

    @requires_world_size(2)
    def test_world_size(self):
        self.assertEqual(dist.get_world_size(), 2)

    @unittest.skip("never")
    def test_skipped(self):
        self.fail("it does not run")

    def test_skips(self):
        raise unittest.SkipTest("not here")


if __name__ == "__main__":
    run_tests()
