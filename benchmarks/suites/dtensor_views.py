"""Views, slices, joins and lookups of DTensors."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class ViewTest(Base):
    @with_comms
    def test_placements_follow(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 4, 6)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        views: list[tuple[Any, Any]] = [
            (lambda t: t.transpose(0, 1), Shard(1)),
            (lambda t: t.permute(2, 1, 0), Shard(2)),
            (lambda t: t.unsqueeze(0), Shard(1)),
            (lambda t: t.flatten(1), Shard(0)),
            (lambda t: t.flatten(0, 1), Shard(0)),
            (lambda t: t.reshape(8, 2, 12), Shard(0)),
        ]
        for view, placement in views:
            result = view(sharded)
            self.assertEqual(result.placements, (placement,))
            self.assertEqual(result.full_tensor(), view(whole))

    @with_comms
    def test_heads(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(3, 5, 32, requires_grad=True)
        sharded = distribute_tensor(whole.detach(), mesh, [Shard(2)]).requires_grad_()
        heads = sharded.reshape(3, 5, 8, 4).transpose(1, 2)
        self.assertEqual(heads.placements, (Shard(1),))
        expected = whole.view(3, 5, 8, 4).transpose(1, 2)
        self.assertEqual(heads.full_tensor(), expected)
        heads.transpose(1, 2).flatten(2).square().sum().backward()
        expected.square().sum().backward()
        self.assertEqual(sharded.grad.full_tensor(), whole.grad)

    @with_comms
    def test_squeeze_and_expand(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(1, 8, 1)
        sharded = distribute_tensor(whole, mesh, [Shard(1)])
        self.assertEqual(sharded.squeeze(0).placements, (Shard(0),))
        self.assertEqual(sharded.squeeze().full_tensor(), whole.squeeze())
        wide = sharded.expand(3, 8, 5)
        self.assertEqual(wide.placements, (Shard(1),))
        self.assertEqual(wide.full_tensor(), whole.expand(3, 8, 5))

    @parametrize("dim", [0, 1])
    @with_comms
    def test_slices(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        self.assertEqual(sharded[2:5].full_tensor(), whole[2:5])
        self.assertEqual(sharded[:, 1:7:2].full_tensor(), whole[:, 1:7:2])
        self.assertEqual(sharded[3].full_tensor(), whole[3])
        self.assertEqual(sharded.narrow(1, 2, 3).full_tensor(), whole.narrow(1, 2, 3))

    @parametrize("dim", [0, 1])
    @with_comms
    def test_split_and_join(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        for part, expected in zip(sharded.split(3, 1), whole.split(3, 1), strict=True):
            self.assertEqual(part.full_tensor(), expected)
        halves = sharded.chunk(2, 0)
        self.assertEqual(torch.cat(halves, 1).full_tensor(), torch.cat(whole.chunk(2, 0), 1))
        self.assertEqual(torch.stack(halves).full_tensor(), torch.stack(whole.chunk(2, 0)))

    @with_comms
    def test_unbind(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(3, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(1)])
        for row, expected in zip(sharded.unbind(0), whole, strict=True):
            self.assertEqual(row.placements, (Shard(0),))
            self.assertEqual(row.full_tensor(), expected)

    @with_comms
    def test_gather_and_index_select(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 6)
        places = torch.randint(0, 6, (8, 3))
        index = distribute_tensor(places, mesh, [Replicate()])
        for placement in (Replicate(), Shard(0), Shard(1)):
            tensor = distribute_tensor(whole, mesh, [placement])
            self.assertEqual(tensor.gather(1, index).full_tensor(), whole.gather(1, places))
            rows = torch.tensor([5, 0, 0, 7])
            chosen = tensor.index_select(0, distribute_tensor(rows, mesh, [Replicate()]))
            self.assertEqual(chosen.full_tensor(), whole.index_select(0, rows))

    @with_comms
    def test_triangles(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 8)
        for placement in (Replicate(), Shard(0), Shard(1)):
            tensor = distribute_tensor(whole, mesh, [placement])
            self.assertEqual(torch.triu(tensor, 1).full_tensor(), whole.triu(1))
            self.assertEqual(torch.tril(tensor).full_tensor(), whole.tril())

    @with_comms
    def test_filled_like(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
        for made, value in (
            (torch.zeros_like(sharded), 0.0),
            (torch.ones_like(sharded), 1.0),
            (torch.full_like(sharded, 4.0), 4.0),
            (sharded.new_full((7, 3), 2.0), 2.0),
        ):
            self.assertEqual(made.full_tensor(), torch.full((7, 3), value))
        self.assertEqual(torch.zeros_like(sharded).placements, (Shard(0),))


instantiate_parametrized_tests(ViewTest)
