"""Random numbers in DTensors on a CPU: each rank draws its own shard from its own generator."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as dtensor
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class RandomTest(Base):
    @parametrize("name", ["uniform_", "normal_", "bernoulli_"])
    @with_comms
    def test_in_place(self, name: str) -> None:
        mesh = self.build_device_mesh()
        sharded = dtensor.zeros((8, 3), device_mesh=mesh, placements=[Shard(0)])
        self.init_manual_seed_for_rank()
        getattr(sharded, name)()
        self.init_manual_seed_for_rank()
        self.assertEqual(sharded.to_local(), getattr(torch.zeros(2, 3), name)())

    @with_comms
    def test_seed_of_a_test(self) -> None:
        """Every rank starts with one seed: replicas made without a word agree."""
        mesh = self.build_device_mesh()
        made = dtensor.zeros((4, 4), device_mesh=mesh, placements=[Replicate()]).normal_()
        agreed = distribute_tensor(made.to_local(), mesh, [Replicate()])
        self.assertEqual(made.to_local(), agreed.to_local())

    @parametrize("name", ["rand_like", "randn_like"])
    @with_comms
    def test_like(self, name: str) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
        self.init_manual_seed_for_rank()
        made = getattr(torch, name)(sharded)
        self.init_manual_seed_for_rank()
        self.assertEqual(made.to_local(), getattr(torch, name)(sharded.to_local()))
        self.assertEqual(made.shape, (7, 3))

    @with_comms
    def test_dropout(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)]).requires_grad_()
        self.init_manual_seed_for_rank()
        dropped = F.dropout(sharded, 0.5)
        self.init_manual_seed_for_rank()
        self.assertEqual(dropped.to_local(), F.dropout(torch.ones(2, 16), 0.5))
        dropped.sum().backward()
        self.assertEqual(sharded.grad.to_local(), dropped.to_local())
        self.assertEqual(F.dropout(sharded, 0.5, training=False).to_local(), sharded.to_local())

    @with_comms
    def test_initialisers(self) -> None:
        mesh = self.build_device_mesh()
        weight = dtensor.zeros((8, 4), device_mesh=mesh, placements=[Shard(0)])
        self.init_manual_seed_for_rank()
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        self.init_manual_seed_for_rank()
        bound = 4**-0.5
        self.assertEqual(weight.to_local(), torch.empty(2, 4).uniform_(-bound, bound))
        nn.init.trunc_normal_(weight, std=2.0, a=-1.0, b=1.0)
        self.assertTrue(weight.full_tensor().abs().max().item() <= 1.0)


instantiate_parametrized_tests(RandomTest)
