"""Tests on torch's DistributedTestBase, for each type of device."""

import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import DistributedTestBase, requires_gloo
from torch.testing._internal.common_utils import parametrize, run_tests


class TestCollectives(DistributedTestBase):
    world_size = 2

    def test_all_reduce(self, device):
        self.create_pg(device)
        tensor = torch.ones(2, device=device)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((2,), 2.0))

    @parametrize("source", [0, 1])
    def test_broadcast(self, device, source):
        self.create_pg(device)
        tensor = torch.full((2,), float(self.rank), device=device)
        dist.broadcast(tensor, source)
        self.assertEqual(tensor, torch.full((2,), float(source)))

    def test_all_gather(self, device):
        self.create_pg(device)
        found = [torch.empty(1, device=device) for _ in range(2)]
        dist.all_gather(found, torch.ones(1, device=device) * self.rank)
        self.assertEqual(found, [torch.zeros(1), torch.ones(1)])

    def test_objects(self, device):
        self.create_pg(device)
        found = [None, None]
        dist.all_gather_object(found, {"rank": self.rank})
        self.assertEqual(found, [{"rank": 0}, {"rank": 1}])

    def test_subgroup(self, device):
        self.create_pg(device)
        group = dist.new_group([0, 1])
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor, group=group)
        self.assertEqual(tensor.item(), 2)

    def test_destroyed(self, device):
        self.create_pg(device)
        dist.destroy_process_group()
        self.assertFalse(dist.is_initialized())

    def test_send(self, device):
        self.create_pg(device)
        tensor = torch.full((1,), float(self.rank), device=device)
        if self.rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        self.assertEqual(tensor.item(), 0)

    @requires_gloo()
    def test_backend(self, device):
        self.create_pg(device)
        self.assertEqual(dist.get_backend(), self.backend(device))

    def test_rank_to_device(self, device):
        self.assertEqual(sorted(self.rank_to_device(device)), [0, 1])

    def test_skips(self, device):
        raise unittest.SkipTest("not here")

    def test_fails(self, device):
        self.assertEqual(self.rank, 5)


instantiate_device_type_tests(TestCollectives, globals(), only_for=("cpu",))

if __name__ == "__main__":
    run_tests()
