"""Distributing, redistributing and computing with DTensor."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class PlacementTest(Base):
    @with_comms
    def test_distribute_tensor(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(32.0).reshape(8, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local(), whole.chunk(4)[self.rank])
        self.assertEqual(sharded.full_tensor(), whole)

        uneven = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        self.assertEqual(uneven.to_local().numel(), [2, 2, 2, 0][self.rank])
        self.assertEqual(uneven.full_tensor(), torch.arange(6.0))

    @with_comms
    def test_redistribute(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 12)
        placements = [Shard(0), Replicate(), Shard(1)]
        for source in placements:
            for target in placements:
                moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
                self.assertEqual(moved.placements, (target,))
                expected = distribute_tensor(whole, mesh, [target])
                self.assertEqual(moved.to_local(), expected.to_local())

    @with_comms
    def test_matmul(self) -> None:
        mesh = self.build_device_mesh()
        left = torch.randn(8, 16, requires_grad=True)
        right = torch.randn(16, 4, requires_grad=True)
        sharded = [
            distribute_tensor(left.detach(), mesh, [Shard(1)]).requires_grad_(),
            distribute_tensor(right.detach(), mesh, [Shard(0)]).requires_grad_(),
        ]
        product = torch.mm(*sharded)
        self.assertEqual(product.placements, (Partial(),))
        torch.mm(left, right).sum().backward()
        product.sum().backward()
        self.assertEqual(product.full_tensor(), torch.mm(left, right))
        self.assertEqual(sharded[0].grad.full_tensor(), left.grad)
