"""Tests on torch's DTensorTestBase."""

import unittest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import requires_world_size, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir


@instantiate_parametrized_tests
class TestDTensor(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    def test_build_device_mesh(self):
        mesh = self.build_device_mesh()
        self.assertEqual(mesh.size(), 2)
        self.assertEqual(mesh.get_rank(), self.rank)

    @with_comms
    @parametrize("size", [4, 5])
    def test_shard(self, size):
        whole = torch.arange(float(size))
        tensor = distribute_tensor(whole, self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.full_tensor(), whole)

    @with_comms
    def test_replicate(self):
        tensor = distribute_tensor(torch.ones(3), self.build_device_mesh(), [Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(3))

    @with_comms
    def test_reduce(self):
        tensor = distribute_tensor(torch.ones(4), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(tensor.sum().full_tensor().item(), 4)
        self.assertIsInstance(tensor.sum().placements[0], Partial)

    @with_comms
    def test_backward(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        (tensor * 3).sum().backward()
        self.assertEqual(tensor.grad.full_tensor(), torch.full((4,), 3.0))

    @with_comms
    def test_two_dimensions(self):
        mesh = init_device_mesh(self.device_type, (2, 1), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0), Replicate()])
        self.assertEqual(tensor.to_local(), torch.ones(1, 2))

    @with_comms
    def test_run_subtests(self):
        self.ran = []
        self.run_subtests({"dim": [0, 1]}, self._check)
        self.assertEqual(self.ran, [0, 1])

    def _check(self, dim):
        tensor = distribute_tensor(torch.ones(2, 2), self.build_device_mesh(), [Shard(dim)])
        self.assertEqual(tensor.full_tensor(), torch.ones(2, 2))
        self.ran.append(dim)

    @with_comms
    @with_temp_dir
    def test_temp_dir(self):
        folders = [None] * 2
        dist.all_gather_object(folders, self.temp_dir)
        self.assertEqual(folders[0], folders[1])

    @skip_if_lt_x_gpu(2)
    @with_comms
    def test_needs_two_devices(self):
        self.fail("there are none")

    @requires_world_size(2)
    @with_comms
    def test_world_size(self):
        self.assertEqual(dist.get_world_size(), 2)

    @with_comms
    def test_skips(self):
        raise unittest.SkipTest("not here")

    @with_comms
    def test_fails(self):
        self.assertEqual(self.rank, 5)


if __name__ == "__main__":
    run_tests()
