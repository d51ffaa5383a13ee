"""Operators on DTensors, against the same operators on whole tensors."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)

EVERY = (Replicate(), Shard(0), Shard(1))


class PointwiseTest(Base):
    @parametrize("name", ["relu", "exp", "tanh", "sigmoid", "neg"])
    @with_comms
    def test_unary(self, name: str) -> None:
        mesh = self.build_device_mesh()
        operator = getattr(torch, name)
        whole = torch.randn(8, 6, requires_grad=True)
        operator(whole).sum().backward()
        for placement in EVERY:
            tensor = distribute_tensor(whole.detach(), mesh, [placement]).requires_grad_()
            result = operator(tensor)
            self.assertEqual(result.placements, (placement,))
            self.assertEqual(result.full_tensor(), operator(whole))
            result.sum().backward()
            self.assertEqual(tensor.grad.full_tensor(), whole.grad)

    @with_comms
    def test_mixed_placements(self) -> None:
        mesh = self.build_device_mesh()
        left, right = torch.randn(8, 4), torch.randn(8, 4)
        for first in EVERY:
            for second in EVERY:
                result = distribute_tensor(left, mesh, [first]) * distribute_tensor(
                    right, mesh, [second]
                )
                self.assertEqual(result.full_tensor(), left * right)

    @with_comms
    def test_broadcasting(self) -> None:
        mesh = self.build_device_mesh()
        matrix, row, column = torch.randn(8, 4), torch.randn(4), torch.randn(8, 1)
        sharded = distribute_tensor(matrix, mesh, [Shard(0)])
        added = sharded + distribute_tensor(row, mesh, [Replicate()])
        self.assertEqual(added.placements, (Shard(0),))
        self.assertEqual(added.full_tensor(), matrix + row)
        scaled = sharded / distribute_tensor(column, mesh, [Shard(0)])
        self.assertEqual(scaled.placements, (Shard(0),))
        self.assertEqual(scaled.full_tensor(), matrix / column)

    @with_comms
    def test_partial_sums(self) -> None:
        mesh = self.build_device_mesh()
        mine = torch.full((4, 2), float(self.rank))
        partial = DTensor.from_local(mine, mesh, [Partial()])
        linear = partial + partial
        self.assertEqual(linear.placements, (Partial(),))
        self.assertEqual(linear.full_tensor(), torch.full((4, 2), 12.0))
        self.assertEqual((partial * 3).full_tensor(), torch.full((4, 2), 18.0))
        self.assertEqual((partial + 1).full_tensor(), torch.full((4, 2), 7.0))
        self.assertEqual(partial.square().full_tensor(), torch.full((4, 2), 36.0))

    @with_comms
    def test_in_place(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(7, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        local = sharded.to_local()
        sharded.add_(1).mul_(2)
        self.assertEqual(sharded.full_tensor(), (whole + 1) * 2)
        self.assertEqual(sharded.to_local(), local)
        sharded.zero_()
        self.assertEqual(sharded.full_tensor(), torch.zeros(7, 3))

    @with_comms
    def test_comparisons(self) -> None:
        mesh = self.build_device_mesh()
        left, right = torch.randn(8, 4), torch.randn(8, 4)
        first = distribute_tensor(left, mesh, [Shard(0)])
        second = distribute_tensor(right, mesh, [Shard(0)])
        chosen = torch.where(first > second, first, second)
        self.assertEqual(chosen.full_tensor(), torch.maximum(left, right))
        self.assertEqual(first.clamp(-0.5, 0.5).full_tensor(), left.clamp(-0.5, 0.5))
        self.assertTrue(torch.equal(first, first.clone()))
        self.assertFalse(torch.equal(first, second))

    @with_comms
    def test_types(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(8)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual((sharded / 3).dtype, torch.float32)
        self.assertEqual((sharded / 3).full_tensor(), whole / 3)
        half = sharded.to(torch.bfloat16)
        self.assertEqual(half.dtype, torch.bfloat16)
        self.assertEqual(half.to_local(), whole.chunk(4)[self.rank].to(torch.bfloat16))


class MatmulTest(Base):
    @parametrize("left", EVERY, name_fn=lambda p: "s" + str(p.dim) if p.is_shard() else "r")
    @with_comms
    def test_mm(self, left: Any) -> None:
        mesh = self.build_device_mesh()
        first, second = torch.randn(8, 12), torch.randn(12, 4)
        for right in EVERY:
            product = distribute_tensor(first, mesh, [left]) @ distribute_tensor(
                second, mesh, [right]
            )
            self.assertEqual(product.full_tensor(), first @ second)

    @with_comms
    def test_placements_of_products(self) -> None:
        mesh = self.build_device_mesh()
        first, second = torch.randn(8, 12), torch.randn(12, 4)
        for left, right, expected in (
            (Shard(0), Replicate(), Shard(0)),
            (Replicate(), Shard(1), Shard(1)),
            (Shard(1), Shard(0), Partial()),
        ):
            product = torch.mm(
                distribute_tensor(first, mesh, [left]), distribute_tensor(second, mesh, [right])
            )
            self.assertEqual(product.placements, (expected,))

    @with_comms
    def test_bmm(self) -> None:
        mesh = self.build_device_mesh()
        first, second = torch.randn(4, 5, 6), torch.randn(4, 6, 7)
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            left = distribute_tensor(first, mesh, [placement])
            right = distribute_tensor(second, mesh, [placement])
            self.assertEqual(torch.bmm(left, right).full_tensor(), torch.bmm(first, second))

    @with_comms
    def test_addmm(self) -> None:
        mesh = self.build_device_mesh()
        bias, first, second = torch.randn(4), torch.randn(8, 12), torch.randn(12, 4)
        for shards in (
            (Replicate(), Shard(0), Replicate()),
            (Shard(0), Replicate(), Shard(1)),
            (Replicate(), Shard(1), Shard(0)),
        ):
            tensors = zip((bias, first, second), shards, strict=True)
            result = torch.addmm(*(distribute_tensor(t, mesh, [s]) for t, s in tensors))
            self.assertEqual(result.full_tensor(), torch.addmm(bias, first, second))

    @with_comms
    def test_gradients(self) -> None:
        mesh = self.build_device_mesh()
        first = torch.randn(8, 12, requires_grad=True)
        second = torch.randn(12, 4, requires_grad=True)
        (first @ second).square().sum().backward()
        for left, right in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
            sharded = distribute_tensor(first.detach(), mesh, [left]).requires_grad_()
            weight = distribute_tensor(second.detach(), mesh, [right]).requires_grad_()
            (sharded @ weight).square().sum().backward()
            self.assertEqual(sharded.grad.full_tensor(), first.grad, atol=1e-4, rtol=1e-4)
            self.assertEqual(weight.grad.full_tensor(), second.grad, atol=1e-4, rtol=1e-4)

    @with_comms
    def test_attention(self) -> None:
        mesh = self.build_device_mesh()
        whole = [torch.randn(2, 4, 6, 8) for _ in range(3)]
        by_head = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in whole]
        scores = (by_head[0] @ by_head[1].transpose(-2, -1)).softmax(-1) @ by_head[2]
        expected = (whole[0] @ whole[1].transpose(-2, -1)).softmax(-1) @ whole[2]
        self.assertEqual(scores.placements, (Shard(1),))
        self.assertEqual(scores.full_tensor(), expected)


class ReductionTest(Base):
    @parametrize("name", ["sum", "mean", "amax", "amin"])
    @with_comms
    def test_reduction(self, name: str) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 12)
        operator = getattr(torch, name)
        for placement in EVERY:
            tensor = distribute_tensor(whole, mesh, [placement])
            for dim in (0, 1, -1):
                for keepdim in (False, True):
                    result = operator(tensor, dim, keepdim)
                    self.assertEqual(result.full_tensor(), operator(whole, dim, keepdim))
            self.assertEqual(operator(tensor, (0, 1)).full_tensor(), operator(whole, (0, 1)))

    @with_comms
    def test_placements_of_sums(self) -> None:
        mesh = self.build_device_mesh()
        sharded = distribute_tensor(torch.randn(8, 12), mesh, [Shard(0)])
        self.assertEqual(sharded.sum(0).placements, (Partial(),))
        self.assertEqual(sharded.sum(1).placements, (Shard(0),))
        self.assertEqual(sharded.sum(1, keepdim=True).placements, (Shard(0),))

    @with_comms
    def test_uneven_reduction(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(7, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.sum().full_tensor(), whole.sum())
        self.assertEqual(sharded.amax(0).full_tensor(), whole.amax(0))
        self.assertEqual(sharded.mean(1).full_tensor(), whole.mean(1))

    @with_comms
    def test_norms(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 12)
        for placement in EVERY:
            tensor = distribute_tensor(whole, mesh, [placement])
            for order in (1.0, 2.0, float("inf")):
                norm = torch.linalg.vector_norm(tensor, order)
                self.assertEqual(norm.full_tensor(), torch.linalg.vector_norm(whole, order))

    @with_comms
    def test_variance(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 12)
        for placement in EVERY:
            tensor = distribute_tensor(whole, mesh, [placement])
            self.assertEqual(tensor.var(1).full_tensor(), whole.var(1))
            self.assertEqual(tensor.var(0).full_tensor(), whole.var(0))

    @parametrize("dim", [0, 1])
    @with_comms
    def test_softmax(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randn(8, 12, requires_grad=True)
        scale = torch.randn(8, 12)
        (F.softmax(whole, dim) * scale).sum().backward()
        for placement in EVERY:
            tensor = distribute_tensor(whole.detach(), mesh, [placement]).requires_grad_()
            result = F.softmax(tensor, dim)
            self.assertEqual(result.full_tensor(), F.softmax(whole, dim))
            (result * distribute_tensor(scale, mesh, [Replicate()])).sum().backward()
            self.assertEqual(tensor.grad.full_tensor(), whole.grad)
            self.assertEqual(F.log_softmax(tensor, dim).full_tensor(), F.log_softmax(whole, dim))

    @with_comms
    def test_topk_and_cumsum(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randperm(48).reshape(8, 6).float()
        for placement in EVERY:
            tensor = distribute_tensor(whole, mesh, [placement])
            values, indices = torch.topk(tensor, 2, dim=1)
            expected = torch.topk(whole, 2, dim=1)
            self.assertEqual(values.full_tensor(), expected.values)
            self.assertEqual(indices.full_tensor(), expected.indices)
            self.assertEqual(tensor.cumsum(0).full_tensor(), whole.cumsum(0))

    @with_comms
    def test_argmax(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.randperm(64).reshape(8, 8).float()
        for placement in EVERY:
            tensor = distribute_tensor(whole, mesh, [placement])
            self.assertEqual(tensor.argmax(1).full_tensor(), whole.argmax(1))


instantiate_parametrized_tests(PointwiseTest)
instantiate_parametrized_tests(MatmulTest)
instantiate_parametrized_tests(ReductionTest)
