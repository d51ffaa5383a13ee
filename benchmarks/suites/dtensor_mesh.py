"""Meshes of two and three dimensions: their slices, their groups, and DTensors on them."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class GridTest(Base):
    """A class of tests on a mesh of 2 x 2 ranks."""

    def grid(self, *names: str) -> Any:
        return init_device_mesh(self.device_type, (2, 2), mesh_dim_names=names or ("dp", "tp"))


class MeshTest(GridTest):
    @with_comms
    def test_coordinates(self) -> None:
        mesh = self.grid()
        self.assertEqual(mesh.mesh.tolist(), [[0, 1], [2, 3]])
        self.assertEqual(list(mesh.get_coordinate()), [self.rank // 2, self.rank % 2])
        self.assertEqual(mesh.get_local_rank("dp"), self.rank // 2)
        self.assertEqual(mesh.get_local_rank(1), self.rank % 2)
        self.assertEqual((mesh.ndim, mesh.size(), mesh.size(0)), (2, 4, 2))

    @with_comms
    def test_groups(self) -> None:
        mesh = self.grid()
        row, column = mesh.get_group("tp"), mesh.get_group("dp")
        self.assertEqual(mesh.get_all_groups(), [column, row])
        first = self.rank // 2 * 2
        self.assertEqual(dist.get_process_group_ranks(row), [first, first + 1])
        self.assertEqual(dist.get_process_group_ranks(column), [self.rank % 2, self.rank % 2 + 2])
        for group, expected in ((row, [1, 1, 5, 5]), (column, [2, 4, 2, 4])):
            value = torch.tensor(self.rank)
            dist.all_reduce(value, group=group)
            self.assertEqual(value.item(), expected[self.rank])

    @with_comms
    def test_slices_are_cached(self) -> None:
        mesh = self.grid()
        self.assertEqual(mesh["tp"], mesh["tp"])
        self.assertEqual(mesh["tp"].get_group(), mesh.get_group("tp"))
        self.assertEqual(mesh["dp", "tp"].mesh, mesh.mesh)
        self.assertNotEqual(mesh["dp"], mesh["tp"])
        with self.assertRaises(KeyError):
            mesh["pp"]

    @with_comms
    def test_flatten(self) -> None:
        mesh = self.grid()
        flat = mesh["dp", "tp"]._flatten("all")
        self.assertEqual(flat.mesh.tolist(), [0, 1, 2, 3])
        self.assertEqual(mesh["all"], flat)
        whole = torch.arange(8.0)
        sharded = distribute_tensor(whole, flat, [Shard(0)])
        self.assertEqual(sharded.to_local(), whole.chunk(4)[self.rank])
        self.assertEqual(sharded.full_tensor(), whole)

    @with_comms
    def test_three_dimensions(self) -> None:
        mesh = init_device_mesh(self.device_type, (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        plane = mesh["pp", "tp"]
        first = self.rank // 2 * 2
        self.assertEqual(plane.mesh.tolist(), [[0, 1], [2, 3]])
        self.assertEqual(mesh["dp"].size(), 1)
        flat = mesh["dp", "tp"]._flatten("dp_tp")
        self.assertEqual(flat.mesh.tolist(), [first, first + 1])
        whole = torch.randn(4, 4)
        sharded = distribute_tensor(whole, plane, [Shard(1), Shard(0)])
        self.assertEqual(sharded.full_tensor(), whole)

    @with_comms
    def test_some_of_the_ranks(self) -> None:
        mesh = DeviceMesh(self.device_type, [1, 3])
        whole = torch.arange(6.0)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        if self.rank in (1, 3):
            self.assertEqual(sharded.to_local(), whole.chunk(2)[self.rank // 2])
            self.assertEqual(sharded.full_tensor(), whole)
        else:
            self.assertIsNone(mesh.get_coordinate())
            self.assertEqual(sharded.to_local().numel(), 0)

    @with_comms
    def test_from_group(self) -> None:
        group = dist.new_group([0, 1, 2, 3])
        mesh = DeviceMesh.from_group(group, self.device_type)
        self.assertEqual(mesh.get_group(), group)
        mine = torch.ones(2) * self.rank
        summed = DTensor.from_local(mine, mesh, [Partial()]).full_tensor()
        self.assertEqual(summed, torch.full((2,), 6.0))

    @with_comms
    def test_equality(self) -> None:
        first, second = self.grid(), self.grid()
        self.assertEqual(first, second)
        self.assertEqual(hash(first), hash(second))
        self.assertNotEqual(first, self.grid("x", "y"))
        self.assertNotEqual(first, self.build_device_mesh())
        whole = torch.randn(4, 4)
        shards = [distribute_tensor(whole, mesh, [Shard(0), Shard(1)]) for mesh in (first, second)]
        self.assertEqual((shards[0] + shards[1]).full_tensor(), whole * 2)


class GridPlacementTest(GridTest):
    @parametrize("rows", [8, 7, 3])
    @with_comms
    def test_every_pair(self, rows: int) -> None:
        mesh = self.grid()
        whole = torch.randn(rows, 6)
        pairs = list(product((Replicate(), Shard(0), Shard(1)), repeat=2))
        for source in pairs:
            start = distribute_tensor(whole, mesh, source)
            self.assertEqual(start.full_tensor(), whole)
            for target in pairs:
                moved = start.redistribute(mesh, target)
                expected = distribute_tensor(whole, mesh, target)
                self.assertEqual(moved.to_local(), expected.to_local())

    @with_comms
    def test_same_dimension_twice(self) -> None:
        mesh = self.grid()
        whole = torch.arange(8.0)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        self.assertEqual(sharded.to_local(), whole.chunk(4)[self.rank])
        half = sharded.redistribute(mesh, [Shard(0), Replicate()])
        self.assertEqual(half.to_local(), whole.chunk(2)[self.rank // 2])
        other = sharded.redistribute(mesh, [Replicate(), Shard(0)])
        self.assertEqual(other.to_local(), whole.chunk(2)[self.rank % 2])

    @with_comms
    def test_partial_on_one(self) -> None:
        mesh = self.grid()
        mine = torch.full((2, 4), float(self.rank))
        mixed = DTensor.from_local(mine, mesh, [Shard(0), Partial()])
        self.assertEqual(mixed.shape, (4, 4))
        self.assertEqual(mixed.full_tensor()[:, 0], torch.tensor([1.0, 1.0, 5.0, 5.0]))
        scattered = mixed.redistribute(mesh, [Shard(0), Shard(1)])
        self.assertEqual(scattered.to_local(), torch.full((2, 2), [1.0, 5.0][self.rank // 2]))
        both = DTensor.from_local(mine, mesh, [Partial(), Partial()])
        self.assertEqual(both.full_tensor(), torch.full((2, 4), 6.0))

    @with_comms
    def test_matmul(self) -> None:
        mesh = self.grid()
        left = torch.randn(4, 6, requires_grad=True)
        right = torch.randn(6, 8, requires_grad=True)
        sharded = distribute_tensor(left.detach(), mesh, [Shard(0), Replicate()]).requires_grad_()
        weight = distribute_tensor(right.detach(), mesh, [Replicate(), Shard(1)]).requires_grad_()
        result = sharded @ weight
        self.assertEqual(result.placements, (Shard(0), Shard(1)))
        self.assertEqual(result.full_tensor(), left @ right)
        result.square().sum().backward()
        (left @ right).square().sum().backward()
        self.assertEqual(sharded.grad.full_tensor(), left.grad, atol=1e-4, rtol=1e-4)
        self.assertEqual(weight.grad.full_tensor(), right.grad, atol=1e-4, rtol=1e-4)

    @with_comms
    def test_reductions(self) -> None:
        mesh = self.grid()
        whole = torch.randn(6, 4)
        for placements in product((Replicate(), Shard(0), Shard(1)), repeat=2):
            tensor = distribute_tensor(whole, mesh, placements)
            self.assertEqual(tensor.sum().full_tensor(), whole.sum())
            self.assertEqual(tensor.mean(0).full_tensor(), whole.mean(0))
            self.assertEqual(tensor.amax(1).full_tensor(), whole.amax(1))

    @with_comms
    def test_on_slices(self) -> None:
        mesh = self.grid()
        whole = torch.arange(4.0)
        row = distribute_tensor(whole, mesh["tp"], [Shard(0)])
        column = distribute_tensor(whole, mesh["dp"], [Shard(0)])
        self.assertEqual(row.to_local(), whole.chunk(2)[self.rank % 2])
        self.assertEqual(column.to_local(), whole.chunk(2)[self.rank // 2])
        with self.assertRaises(RuntimeError):
            row + column

    @with_comms
    def test_other_mesh_is_refused(self) -> None:
        first = distribute_tensor(torch.ones(4, 4), self.grid(), [Shard(0), Shard(1)])
        second = distribute_tensor(torch.ones(4, 4), self.build_device_mesh(), [Shard(0)])
        with self.assertRaises(RuntimeError):
            first + second

    @with_comms
    def test_gradient_through_slices(self) -> None:
        mesh = self.grid()
        mine = torch.ones(2, 4, requires_grad=True)
        mixed = DTensor.from_local(mine, mesh["dp"], [Shard(0)])
        local = mixed.redistribute(mesh["dp"], [Replicate()]).to_local()
        (local * (self.rank % 2 + 1)).sum().backward()
        self.assertEqual(mine.grad, torch.full((2, 4), float(self.rank % 2 + 1)))


instantiate_parametrized_tests(GridPlacementTest)
