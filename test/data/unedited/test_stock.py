"""A suite on torch's own bases: nothing in it knows of torchcontinuous."""

import os
import unittest

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    LocalDTensorContinuousTestBase,
    with_comms,
)


class Helper:
    def doubled(self):
        return 2 * self.rank


class TestStock(Helper, MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fails(self):
        self.assertEqual(1, 2)

    def test_skips(self):
        raise unittest.SkipTest("not here")

    def test_sum(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", rank=self.rank, world_size=2, store=store)
        tensor = torch.ones(1) * self.doubled()
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)

    def test_worker(self):
        # A worker of a pool ran others before this one.
        print(f"pid {os.getpid()}")


class TestDerived(TestStock):
    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(1, 2)


@instantiate_parametrized_tests
class TestDTensor(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    @parametrize("size", [2, 4])
    def test_replicate(self, size):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.ones(size), mesh, [Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(size))


class TestOwn(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_sum(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


class TestSimulated(LocalDTensorContinuousTestBase):
    """Runs in the parent, as if on many ranks."""

    world_size = 2

    def test_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)


class TestPlain(unittest.TestCase):
    def test_in_this_process(self):
        pass
