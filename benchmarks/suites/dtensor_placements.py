"""Making DTensors, taking them apart, and moving them between placements."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)

PLACEMENTS = [
    subtest(Replicate(), name="replicate"),
    subtest(Shard(0), name="shard_0"),
    subtest(Shard(1), name="shard_1"),
]


class DistributeTest(Base):
    @parametrize("dim", [0, 1, -1])
    @with_comms
    def test_shard(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(4, 8, 12)
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        self.assertEqual(sharded.placements, (Shard(dim % 3),))
        self.assertEqual(sharded.shape, whole.shape)
        self.assertEqual(sharded.stride(), whole.stride())
        self.assertEqual(sharded.to_local(), whole.chunk(4, dim)[self.rank])
        self.assertEqual(sharded.full_tensor(), whole)

    @parametrize("size", [1, 5, 7, 9])
    @with_comms
    def test_uneven_shard(self, size: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(size * 2.0).reshape(size, 2)
        chunks = list(whole.chunk(4))
        mine = chunks[self.rank] if self.rank < len(chunks) else whole[:0]
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local(), mine)
        self.assertEqual(sharded.full_tensor(), whole)
        self.assertEqual((sharded * 2).to_local(), mine * 2)

    @with_comms
    def test_rank_0_decides(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.arange(8.0) + 100 * self.rank
        self.assertEqual(distribute_tensor(mine, mesh, [Replicate()]).to_local(), torch.arange(8.0))
        scattered = distribute_tensor(mine, mesh, [Shard(0)])
        self.assertEqual(scattered.to_local(), torch.arange(8.0).chunk(4)[self.rank])
        own = distribute_tensor(mine, mesh, [Shard(0)], src_data_rank=None)
        self.assertEqual(own.to_local(), mine.chunk(4)[self.rank])

    @with_comms
    def test_from_local(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.full((2, 3), float(self.rank))
        sharded = DTensor.from_local(mine, mesh, [Shard(0)])
        self.assertEqual(sharded.shape, (8, 3))
        self.assertEqual(sharded.full_tensor()[:, 0], torch.arange(4.0).repeat_interleave(2))
        self.assertEqual(DTensor.from_local(mine, mesh, [Shard(1)]).shape, (2, 12))
        partial = DTensor.from_local(mine, mesh, [Partial()])
        self.assertEqual(partial.full_tensor(), torch.full((2, 3), 6.0))

    @with_comms
    def test_from_uneven_local(self) -> None:
        mesh = self.build_device_mesh()
        rows = [3, 3, 3, 1][self.rank]
        mine = torch.full((rows, 2), float(self.rank))
        sharded = DTensor.from_local(mine, mesh, [Shard(0)], shape=(10, 2), stride=(2, 1))
        self.assertEqual(sharded.shape, (10, 2))
        expected = torch.tensor([0.0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
        self.assertEqual(sharded.full_tensor()[:, 1], expected)

    @with_comms
    def test_from_local_with_check(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.full((4,), float(self.rank))
        checked = DTensor.from_local(mine, mesh, [Replicate()], run_check=True)
        self.assertEqual(checked.to_local(), torch.zeros(4))

    @with_comms
    def test_gradient_of_from_local(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.ones(2, 4, requires_grad=True)
        scale = torch.arange(8.0).reshape(8, 1).expand(8, 4)
        sharded = DTensor.from_local(mine, mesh, [Shard(0)])
        (sharded * distribute_tensor(scale, mesh, [Shard(0)])).sum().backward()
        self.assertEqual(mine.grad, scale.chunk(4)[self.rank])

    @with_comms
    def test_gradient_of_to_local(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]).requires_grad_()
        (sharded.to_local() * (self.rank + 1)).sum().backward()
        self.assertEqual(sharded.grad.placements, (Shard(0),))
        expected = torch.arange(1.0, 5).repeat_interleave(2)
        self.assertEqual(sharded.grad.full_tensor()[:, 0], expected)

        copied = distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        local = copied.to_local(grad_placements=[Partial()])
        (local * self.rank).sum().backward()
        self.assertEqual(copied.grad.full_tensor(), torch.full((3,), 6.0))

    @parametrize("name", ["zeros", "ones", "full"])
    @with_comms
    def test_factory(self, name: str) -> None:
        mesh = self.build_device_mesh()
        arguments = ((6, 4), 2.5) if name == "full" else ((6, 4),)
        expected = getattr(torch, name)(*arguments)
        for placement in (Replicate(), Shard(0), Shard(1)):
            made = getattr(dtensor, name)(*arguments, device_mesh=mesh, placements=[placement])
            self.assertEqual(made.placements, (placement,))
            local = distribute_tensor(expected, mesh, [placement]).to_local()
            self.assertEqual(made.to_local(), local)
            self.assertEqual(made.full_tensor(), expected)

    @with_comms
    def test_copies_are_apart(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 2)
        first = distribute_tensor(whole, mesh, [Shard(0)])
        second = deepcopy(first)
        second.add_(1)
        self.assertEqual(first.full_tensor(), whole)
        self.assertEqual(second.full_tensor(), whole + 1)
        self.assertEqual(second.placements, first.placements)
        self.assertEqual(second.device_mesh, first.device_mesh)


class RedistributeTest(Base):
    @parametrize("target", PLACEMENTS)
    @with_comms
    def test_from_partial(self, target: Any) -> None:
        mesh = self.build_device_mesh()
        for shape in ((8, 4), (7, 5)):
            same = torch.randn(shape)
            partial = DTensor.from_local(same + self.rank, mesh, [Partial()])
            moved = partial.redistribute(mesh, [target])
            expected = distribute_tensor(same * 4 + 6, mesh, [target])
            self.assertEqual(moved.placements, (target,))
            self.assertEqual(moved.to_local(), expected.to_local())

    @parametrize("reduction", ["sum", "avg", "max", "min", "product"])
    @with_comms
    def test_reductions_of_partial(self, reduction: str) -> None:
        mesh = self.build_device_mesh()
        mine = torch.full((4, 3), float(self.rank + 1))
        expected = {"sum": 10.0, "avg": 2.5, "max": 4.0, "min": 1.0, "product": 24.0}[reduction]
        partial = DTensor.from_local(mine, mesh, [Partial(reduction)])
        self.assertEqual(partial.full_tensor(), torch.full((4, 3), expected))

    @parametrize("source", PLACEMENTS)
    @with_comms
    def test_uneven(self, source: Any) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(7, 5)
        for target in (Replicate(), Shard(0), Shard(1)):
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            expected = distribute_tensor(whole, mesh, [target])
            self.assertEqual(moved.to_local(), expected.to_local())
            self.assertEqual(moved.full_tensor(), whole)

    @with_comms
    def test_gradients(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 8)
        scale = torch.randn(8, 8)
        for source in (Replicate(), Shard(0), Shard(1)):
            for target in (Replicate(), Shard(0), Shard(1)):
                start = distribute_tensor(whole, mesh, [source]).requires_grad_()
                moved = start.redistribute(mesh, [target])
                (moved * distribute_tensor(scale, mesh, [target])).sum().backward()
                self.assertEqual(start.grad.placements, (source,))
                self.assertEqual(start.grad.full_tensor(), scale)

    @with_comms
    def test_async(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        first = sharded.redistribute(mesh, [Replicate()], async_op=True)
        second = (sharded + 1).redistribute(mesh, [Replicate()], async_op=True)
        self.assertEqual(first.to_local() + 1, second.to_local())
        self.assertEqual(first.full_tensor(), whole)

    @with_comms
    def test_in_half_precision(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        moved = sharded.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16)
        self.assertEqual(moved.dtype, torch.bfloat16)
        self.assertEqual(moved.to_local(), whole.to(torch.bfloat16))

    @with_comms
    def test_what_is_refused(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.randn(8), mesh, [Shard(0)])
        with self.assertRaisesRegex(RuntimeError, "Partial is for internal use"):
            sharded.redistribute(mesh, [Partial()])
        with self.assertRaises(IndexError):
            distribute_tensor(torch.randn(8), mesh, [Shard(1)])


instantiate_parametrized_tests(DistributeTest)
instantiate_parametrized_tests(RedistributeTest)
