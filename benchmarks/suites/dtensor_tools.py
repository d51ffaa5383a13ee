"""What stands around DTensor: counting of collectives, local functions, caches, sub-tests."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)
from torch.utils.checkpoint import checkpoint

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)

c10d = torch.ops.c10d_functional


class CommDebugTest(Base):
    @with_comms
    def test_counts(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        with CommDebugMode() as mode:
            sharded.redistribute(mesh, [Replicate()])
            sharded.sum(0).redistribute(mesh, [Replicate()])
            sharded.sum(0).redistribute(mesh, [Shard(0)])
            sharded + sharded
        counts = mode.get_comm_counts()
        self.assertEqual(mode.get_total_counts(), 3)
        self.assertEqual(counts[c10d.all_gather_into_tensor], 1)
        self.assertEqual(counts[c10d.all_reduce], 1)
        self.assertEqual(counts[c10d.reduce_scatter_tensor], 1)

    @with_comms
    def test_by_module(self) -> None:
        mesh = self.build_device_mesh()
        model = distribute_module(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), mesh)
        batch = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        with CommDebugMode() as mode:
            model(batch)
        self.assertEqual(mode.get_total_counts(), 0)
        with mode:
            model(batch).sum().backward()
            grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        self.assertEqual(len(grads), 2)
        self.assertEqual(mode.get_comm_counts()[c10d.all_reduce], 2)


class LocalFunctionTest(Base):
    @with_comms
    def test_local_map(self) -> None:
        mesh = self.build_device_mesh()
        left, right = torch.randn(8, 4), torch.randn(4, 6)
        multiply = local_map(
            torch.mm,
            out_placements=[Shard(0)],
            in_placements=([Shard(0)], [Replicate()]),
            device_mesh=mesh,
        )
        result = multiply(
            distribute_tensor(left, mesh, [Shard(0)]), distribute_tensor(right, mesh, [Replicate()])
        )
        self.assertEqual(result.placements, (Shard(0),))
        self.assertEqual(result.full_tensor(), left @ right)

    @with_comms
    def test_local_map_moves_its_inputs(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 4)

        def count(local: torch.Tensor) -> torch.Tensor:
            return (local > 0).sum()

        options = {"out_placements": [Partial()], "in_placements": ([Shard(0)],)}
        other = distribute_tensor(whole, mesh, [Shard(1)])
        with self.assertRaises(ValueError):
            local_map(count, device_mesh=mesh, **options)(other)
        moved = local_map(count, device_mesh=mesh, redistribute_inputs=True, **options)(other)
        self.assertEqual(moved.full_tensor(), (whole > 0).sum())

    @with_comms
    def test_functional_collectives(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.full((4,), float(self.rank))
        self.assertEqual(funcol.all_reduce(mine, "sum", mesh), torch.full((4,), 6.0))
        gathered = funcol.all_gather_tensor(mine, 0, mesh)
        self.assertEqual(gathered, torch.arange(4.0).repeat_interleave(4))
        scattered = funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, mesh)
        self.assertEqual(scattered, torch.tensor([self.rank * 4.0]))

    @with_comms
    def test_implicit_replication(self) -> None:
        mesh = self.build_device_mesh()
        whole, plain = torch.randn(8, 4), torch.randn(4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        with self.assertRaises(RuntimeError):
            sharded + plain
        with implicit_replication():
            self.assertEqual((sharded + plain).full_tensor(), whole + plain)
        with self.assertRaises(RuntimeError):
            sharded + plain

    @with_comms
    def test_checkpointed_function(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 4, requires_grad=True)
        sharded = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        checkpoint(lambda t: t.tanh().square(), sharded, use_reentrant=False).sum().backward()
        whole.tanh().square().sum().backward()
        self.assertEqual(sharded.grad.full_tensor(), whole.grad)


class CacheTest(Base):
    """Strategies are cached for the process: what one test cached must serve the next."""

    def calls(self) -> Any:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 6)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual((sharded + sharded).full_tensor(), whole * 2)
        self.assertEqual(sharded.t().placements, (Shard(1),))
        self.assertEqual(sharded.view(4, 2, 6).full_tensor(), whole.view(4, 2, 6))
        return sharded

    @with_comms
    def test_once(self) -> None:
        self.calls()

    @with_comms
    def test_twice_on_equal_meshes(self) -> None:
        first, second = self.calls(), self.calls()
        self.assertEqual(first._spec.mesh, second._spec.mesh)
        self.assertEqual(hash(first._spec), hash(second._spec))

    @with_comms
    def test_shapes_are_told_apart(self) -> None:
        mesh = self.build_device_mesh()
        for rows in (8, 4, 7, 8):
            whole = torch.randn(rows, 3)
            sharded = distribute_tensor(whole, mesh, [Shard(0)])
            self.assertEqual(sharded.sum(0).full_tensor(), whole.sum(0))
            self.assertEqual(sharded.t().full_tensor(), whole.t())


class SubtestsTest(Base):
    @with_comms
    def test_subtests(self) -> None:
        self.run_subtests(
            {"placement": [Replicate(), Shard(0), Shard(1)], "rows": [8, 5]}, self.check_scaling
        )

    def check_scaling(self, placement: Any, rows: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(rows, 4)
        sharded = distribute_tensor(whole, mesh, [placement])
        self.assertEqual((sharded * 3).full_tensor(), whole * 3)

    @with_comms
    def test_converted_arguments(self) -> None:
        mesh = self.build_device_mesh()
        self._test_op(mesh, lambda a, b: a + b, torch.randn(8, 4), torch.randn(8, 4))
        self._test_op(mesh, torch.mm, torch.randn(8, 4), torch.randn(4, 12))

    @with_comms
    def test_saved_shards(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        written = io.BytesIO()
        torch.save(sharded, written)
        written.seek(0)
        loaded = torch.load(written, weights_only=True)
        self.assertIsInstance(loaded, DTensor)
        self.assertEqual(loaded.placements, (Shard(0),))
        self.assertEqual(loaded.to_local(), sharded.to_local())
        self.assertEqual(loaded.full_tensor(), torch.arange(8.0))
