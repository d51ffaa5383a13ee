"""Meshes of two dimensions, whose groups and caches must not outlive a test."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class TwoDimensionsTest(Base):
    @with_comms
    def test_shard_on_both(self) -> None:
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.randn(4, 6)
        both = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        self.assertEqual(both.to_local().shape, (2, 3))
        self.assertEqual((both + both).full_tensor(), whole * 2)
        self.assertEqual(both.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)

    @with_comms
    def test_slices(self) -> None:
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        row = mesh["tp"]
        self.assertEqual(row.get_local_rank(), self.rank % 2)
        value = torch.tensor(float(self.rank))
        dist.all_reduce(value, group=row.get_group())
        self.assertEqual(value.item(), [1.0, 1.0, 5.0, 5.0][self.rank])
        sharded = distribute_tensor(torch.arange(4.0), row, [Shard(0)])
        self.assertEqual(sharded.full_tensor(), torch.arange(4.0))
