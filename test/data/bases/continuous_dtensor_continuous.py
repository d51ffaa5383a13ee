"""Tests on torch's DTensorContinuousTestBase."""

import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

from torchcontinuous import DTensorContinuousTestBase


@instantiate_parametrized_tests
class TestDTensorContinuous(DTensorContinuousTestBase):
    world_size = 2

    def test_build_device_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)

    @parametrize("size", [4, 5])
    def test_shard(self, size):
        whole = torch.arange(float(size))
        tensor = distribute_tensor(whole, self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.full_tensor(), whole)

    def test_replicate(self):
        tensor = distribute_tensor(torch.ones(3), self.build_device_mesh(), [Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(3))

    def test_reduce(self):
        tensor = distribute_tensor(torch.ones(4), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.sum().full_tensor().item(), 4)

    def test_backward(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        (tensor * 3).sum().backward()
        self.assertEqual(tensor.grad.full_tensor(), torch.full((4,), 3.0))

    def test_two_dimensions(self):
        mesh = init_device_mesh(self.device_type, (2, 1), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(1, 2))

    def test_two_dimensions_again(self):
        mesh = init_device_mesh(self.device_type, (1, 2), mesh_dim_names=("dp", "tp"))
        self.assertEqual(mesh["tp"].size(), 2)

    def test_run_subtests(self):
        self.ran = []
        self.run_subtests({"dim": [0, 1]}, self._check)
        self.assertEqual(self.ran, [0, 1])

    def _check(self, dim):
        tensor = distribute_tensor(torch.ones(2, 2), self.build_device_mesh(), [Shard(dim)])
        self.assertEqual(tensor.full_tensor(), torch.ones(2, 2))
        self.ran.append(dim)

    def test_ones(self):
        mesh = self.build_device_mesh()
        tensor = torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Shard(0)])
        self.assertEqual(tensor.full_tensor(), torch.ones(4))

    def test_group(self):
        self.assertEqual(dist.get_backend(), "gloo")

    def test_skips(self):
        raise unittest.SkipTest("not here")


if __name__ == "__main__":
    run_tests()
