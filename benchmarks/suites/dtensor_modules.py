"""Modules, losses and optimizers whose parameters are DTensors."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


def shard_rows(name: str, module: Any, mesh: Any) -> None:
    """A partition function: every parameter of ``module`` is sharded on its first dimension."""
    for key, parameter in module.named_parameters(recurse=False):
        sharded = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
        module.register_parameter(key, sharded)


def network() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


class DistributeModuleTest(Base):
    @with_comms
    def test_replicated_by_default(self) -> None:
        mesh = self.build_device_mesh()
        plain = network()
        model = distribute_module(deepcopy(plain), mesh)
        for (name, parameter), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            self.assertIsInstance(parameter, DTensor, name)
            self.assertEqual(parameter.placements, (Replicate(),))
            self.assertEqual(parameter.to_local(), expected)

    @with_comms
    def test_partition(self) -> None:
        mesh = self.build_device_mesh()
        plain = network()
        model = distribute_module(deepcopy(plain), mesh, shard_rows)
        self.assertEqual(model[0].weight.placements, (Shard(0),))
        self.assertEqual(model[0].weight.to_local(), plain[0].weight.chunk(4)[self.rank])
        self.assertEqual(model[2].bias.full_tensor(), plain[2].bias)

    @with_comms
    def test_input_and_output(self) -> None:
        mesh = self.build_device_mesh()
        plain = network()
        model = distribute_module(
            deepcopy(plain),
            mesh,
            shard_rows,
            input_fn=lambda m, x, mesh: (DTensor.from_local(x[0], mesh, [Shard(0)]),),
            output_fn=lambda m, x, mesh: x.redistribute(mesh, [Shard(0)]).to_local(),
        )
        batch = torch.randn(8, 6)
        mine = batch.chunk(4)[self.rank]
        self.assertEqual(model(mine), plain(mine))

    @with_comms
    def test_buffers_and_state_dict(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        model = distribute_module(deepcopy(plain), mesh, shard_rows)
        state = model.state_dict()
        self.assertEqual(list(state), list(plain.state_dict()))
        self.assertEqual(state["1.running_var"].full_tensor(), torch.ones(8))
        self.assertEqual(state["0.weight"].full_tensor(), plain[0].weight)

        other = distribute_module(
            nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), mesh, shard_rows
        )
        other.load_state_dict(state)
        self.assertEqual(other[0].weight.full_tensor(), plain[0].weight)

    @with_comms
    def test_made_on_meta(self) -> None:
        mesh = self.build_device_mesh()
        with torch.device("meta"):
            model = nn.Linear(4, 8, bias=False)
        model = distribute_module(model, mesh, shard_rows)
        self.assertEqual(model.weight.to_local().shape, (2, 4))
        self.assertTrue(model.weight.is_meta)
        model.to_empty(device=self.device_type)
        nn.init.constant_(model.weight, 0.5)
        self.assertEqual(model.weight.full_tensor(), torch.full((8, 4), 0.5))


class LayerTest(Base):
    @parametrize("dim", [0, 1])
    @with_comms
    def test_linear(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        weight, bias, batch = torch.randn(8, 12), torch.randn(8), torch.randn(5, 12)
        sharded_bias = distribute_tensor(bias, mesh, [Replicate() if dim else Shard(0)])
        result = F.linear(
            distribute_tensor(batch, mesh, [Replicate()]),
            distribute_tensor(weight, mesh, [Shard(dim)]),
            sharded_bias,
        )
        self.assertEqual(result.full_tensor(), F.linear(batch, weight, bias))

    @parametrize("dim", [0, 1])
    @with_comms
    def test_embedding(self, dim: int) -> None:
        mesh = self.build_device_mesh()
        table = torch.randn(10, 8, requires_grad=True)
        tokens = torch.randint(0, 10, (3, 5))
        weight = distribute_tensor(table.detach(), mesh, [Shard(dim)]).requires_grad_()
        looked_up = F.embedding(distribute_tensor(tokens, mesh, [Replicate()]), weight)
        looked_up = looked_up.redistribute(mesh, [Replicate()])
        expected = F.embedding(tokens, table)
        self.assertEqual(looked_up.to_local(), expected)
        looked_up.square().sum().backward()
        expected.square().sum().backward()
        self.assertEqual(weight.grad.full_tensor(), table.grad)

    @parametrize("affine", [False, True])
    @with_comms
    def test_layer_norm(self, affine: bool) -> None:
        mesh = self.build_device_mesh()
        plain = nn.LayerNorm(6, elementwise_affine=affine)
        model = distribute_module(deepcopy(plain), mesh)
        batch = torch.randn(8, 5, 6, requires_grad=True)
        plain(batch).square().sum().backward()
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            tensor = distribute_tensor(batch.detach(), mesh, [placement]).requires_grad_()
            result = model(tensor)
            self.assertEqual(result.full_tensor(), plain(batch))
            result.square().sum().backward()
            self.assertEqual(tensor.grad.full_tensor(), batch.grad, atol=1e-5, rtol=1e-4)

    @with_comms
    def test_gradients_of_layer_norm(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.LayerNorm(6)
        model = distribute_module(deepcopy(plain), mesh)
        batch, scale = torch.randn(8, 6), torch.randn(8, 6)
        (plain(batch) * scale).sum().backward()
        result = model(distribute_tensor(batch, mesh, [Shard(0)]))
        (result * distribute_tensor(scale, mesh, [Shard(0)])).sum().backward()
        self.assertEqual(model.weight.grad.full_tensor(), plain.weight.grad)
        self.assertEqual(model.bias.grad.full_tensor(), plain.bias.grad)


class LossTest(Base):
    @parametrize("reduction", ["none", "mean", "sum"])
    @with_comms
    def test_nll_loss(self, reduction: str) -> None:
        mesh = self.build_device_mesh()
        logits = torch.randn(8, 6).log_softmax(1)
        target = torch.randint(0, 6, (8,))
        expected = F.nll_loss(logits, target, reduction=reduction)
        for placement in (Replicate(), Shard(0)):
            loss = F.nll_loss(
                distribute_tensor(logits, mesh, [placement]),
                distribute_tensor(target, mesh, [placement]),
                reduction=reduction,
            )
            self.assertEqual(loss.full_tensor(), expected)

    @with_comms
    def test_mse_over_the_batch(self) -> None:
        mesh = self.build_device_mesh()
        guess, target = torch.randn(8, 6, requires_grad=True), torch.randn(8, 6)
        sharded = distribute_tensor(guess.detach(), mesh, [Shard(0)]).requires_grad_()
        sharded_target = distribute_tensor(target, mesh, [Shard(0)])
        for reduction in ("mean", "sum"):
            loss = F.mse_loss(sharded, sharded_target, reduction=reduction)
            self.assertTrue(loss.placements[0].is_partial())
            expected = F.mse_loss(guess, target, reduction=reduction)
            self.assertEqual(loss.full_tensor(), expected)
        loss.backward()
        expected.backward()
        self.assertEqual(sharded.grad.full_tensor(), guess.grad)

    @with_comms
    def test_gradients_over_the_batch(self) -> None:
        mesh = self.build_device_mesh()
        plain = network()
        model = distribute_module(deepcopy(plain), mesh)
        batch = torch.randn(8, 6)
        plain(batch).square().sum().backward()
        model(distribute_tensor(batch, mesh, [Shard(0)])).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            self.assertEqual(ours.grad.full_tensor(), theirs.grad, atol=1e-5, rtol=1e-4)


class OptimizerTest(Base):
    @parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
    @parametrize("foreach", [False, True])
    @with_comms
    def test_steps(self, name: str, foreach: bool) -> None:
        mesh = self.build_device_mesh()
        plain = network()
        model = distribute_module(deepcopy(plain), mesh, shard_rows)
        optimizers = [
            getattr(torch.optim, name)(m.parameters(), lr=0.05, foreach=foreach)
            for m in (plain, model)
        ]
        for _ in range(2):
            batch = torch.randn(8, 6)
            plain(batch).square().sum().backward()
            model(distribute_tensor(batch, mesh, [Replicate()])).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            self.assertEqual(ours.full_tensor(), theirs, atol=1e-4, rtol=1e-4)

    @with_comms
    def test_state_is_sharded(self) -> None:
        mesh = self.build_device_mesh()
        model = distribute_module(network(), mesh, shard_rows)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(distribute_tensor(torch.randn(8, 6), mesh, [Replicate()])).sum().backward()
        optimizer.step()
        weight = model[0].weight
        moment = optimizer.state[weight]["exp_avg"]
        self.assertEqual(moment.placements, (Shard(0),))
        self.assertEqual(moment.to_local(), 0.1 * weight.grad.to_local())

    @parametrize("order", [1.0, 2.0, float("inf")])
    @with_comms
    def test_clipping(self, order: float) -> None:
        mesh = self.build_device_mesh()
        whole, slope = torch.randn(7, 3), torch.randn(7, 3)
        plain = nn.Parameter(whole.clone())
        plain.grad = slope.clone()
        sharded = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        sharded.grad = distribute_tensor(slope, mesh, [Shard(0)])
        expected = nn.utils.clip_grad_norm_([plain], 0.5, order)
        norm = nn.utils.clip_grad_norm_([sharded], 0.5, order)
        self.assertEqual(norm.full_tensor(), expected)
        self.assertEqual(sharded.grad.full_tensor(), plain.grad)

    @with_comms
    def test_accumulated_gradients(self) -> None:
        mesh = self.build_device_mesh()
        weight = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]).requires_grad_()
        for factor in (1.0, 2.0, 3.0):
            (weight * factor).sum().backward()
        self.assertEqual(weight.grad.full_tensor(), torch.full((8, 2), 6.0))
        weight.grad = None
        mine = DTensor.from_local(weight.to_local(), mesh, [Partial()])
        mine.sum().backward()
        self.assertEqual(weight.grad.full_tensor(), torch.ones(8, 2))


instantiate_parametrized_tests(LayerTest)
instantiate_parametrized_tests(LossTest)
instantiate_parametrized_tests(OptimizerTest)
