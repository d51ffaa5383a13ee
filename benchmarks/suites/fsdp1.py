"""FullyShardedDataParallel on the CPU: training, and what it does to a module."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.models import TrainingTest, backward, batch, network

CPU = torch.device("cpu")


def wrapped(model: Any, **options: Any) -> Any:
    """Each linear layer in a unit of its own, inside the root's."""
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(model, auto_wrap_policy=policy, device_id=CPU, **options)


def one_of(kind: Any, *names: str) -> Any:
    """Parametrizes a test with members of an enumeration."""
    return [subtest(kind[name], name) for name in names]


class FlatTrainingTest(TrainingTest):
    def assert_same(self, model: Any, *args: Any, gradients: bool = False, **kwargs: Any) -> None:
        with FSDP.summon_full_params(model, with_grads=gradients):
            super().assert_same(model, *args, gradients=gradients, **kwargs)

    @parametrize("strategy", one_of(ShardingStrategy, "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    def test_strategies(self, strategy: ShardingStrategy) -> None:
        with self.group():
            self.train_both(wrapped(network(), sharding_strategy=strategy), network())

    @parametrize("strategy", one_of(ShardingStrategy, "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))
    def test_hybrid_strategies(self, strategy: ShardingStrategy) -> None:
        with self.group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = wrapped(network(), sharding_strategy=strategy, device_mesh=mesh)
            self.assertEqual(model.module[0]._flat_param.numel(), (8 * 12 + 12) // 2)
            self.train_both(model, network())

    @parametrize("use_orig_params", [False, True])
    def test_adam(self, use_orig_params: bool) -> None:
        with self.group():
            model = wrapped(network(), use_orig_params=use_orig_params)
            self.train_both(model, network(), torch.optim.Adam)

    @parametrize("when", one_of(BackwardPrefetch, "BACKWARD_PRE", "BACKWARD_POST"))
    def test_prefetching(self, when: BackwardPrefetch) -> None:
        with self.group():
            model = wrapped(network(), backward_prefetch=when, forward_prefetch=True)
            self.train_both(model, network())

    @parametrize("use_orig_params", [False, True])
    def test_no_sync(self, use_orig_params: bool) -> None:
        with self.group():
            model, reference = wrapped(network(), use_orig_params=use_orig_params), network()
            with model.no_sync():
                backward(model, self.mine(batch(0)))
            backward(model, self.mine(batch(1)))
            for seed in range(2):
                backward(reference, batch(seed))
            self.assert_same(model, reference, gradients=use_orig_params)
            for whole in (model, reference):
                torch.optim.SGD(whole.parameters(), lr=0.1).step()
            self.assert_same(model, reference)

    @parametrize("norm", [1.0, 2.0, float("inf")])
    def test_clip_grad_norm(self, norm: float) -> None:
        with self.group():
            model, reference = wrapped(network(), use_orig_params=True), network()
            backward(model, self.mine(batch()))
            backward(reference, batch())
            expected = clip_grad_norm_(reference.parameters(), 0.05, norm)
            self.assertGreater(expected.item(), 0.05)
            self.assertEqual(model.clip_grad_norm_(0.05, norm), expected)
            self.assert_same(model, reference, gradients=True)

    def test_mixed_precision(self) -> None:
        with self.group():
            policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = wrapped(network(), mixed_precision=policy, use_orig_params=True)
            self.assertEqual(backward(model, self.mine(batch())).dtype, torch.bfloat16)

            low, mean = network().to(torch.bfloat16), network()
            for part in batch().chunk(self.world_size):
                low.zero_grad()
                backward(low, part.to(torch.bfloat16))
                for got, summed in zip(low.parameters(), mean.parameters(), strict=True):
                    gradient = got.grad.float() / self.world_size
                    summed.grad = gradient if summed.grad is None else summed.grad + gradient
            self.assert_same(model, mean, gradients=True)

    def test_frozen_layer(self) -> None:
        with self.group():
            model, reference = network(), network()
            for whole in (model, reference):
                whole[0].requires_grad_(False)
            model = wrapped(model)
            self.train_both(model, reference)
            self.assertIsNone(model.module[0]._flat_param.grad)

    def test_frozen_and_trained_in_one_unit(self) -> None:
        with self.group():
            model, reference = network(), network()
            for whole in (model, reference):
                whole[0].bias.requires_grad_(False)
            with self.assertRaisesRegex(ValueError, "requires_grad"):
                FSDP(model, device_id=CPU)
            self.train_both(FSDP(model, device_id=CPU, use_orig_params=True), reference)

    def test_shared_weight(self) -> None:
        with self.group():
            torch.manual_seed(0)
            reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            reference[1].weight = reference[0].weight
            model = FSDP(copy.deepcopy(reference), device_id=CPU)
            self.train_both(model, reference)
            with FSDP.summon_full_params(model):
                self.assertIs(model.module[0].weight, model.module[1].weight)

    def test_ignored_modules(self) -> None:
        with self.group():
            plain = network()
            model = FSDP(plain, device_id=CPU, ignored_modules=[plain[2]])
            self.assertEqual(plain[2].weight.shape, (6, 12))
            numel = sum(p.numel() for at in (0, 4) for p in network()[at].parameters())
            self.assertEqual(model._flat_param.numel(), -(-numel // self.world_size))

            reference = network()
            self.assertEqual(model(batch()), reference(batch()))
            backward(model, self.mine(batch()))
            backward(reference, self.mine(batch()))
            self.assertEqual(plain[2].weight.grad, reference[2].weight.grad)

    def test_states_are_synchronized_on_accelerators_only(self) -> None:
        with self.group(), self.assertRaisesRegex(ValueError, "sync_module_states"):
            wrapped(network(), sync_module_states=True)

    def test_from_meta_device(self) -> None:
        def materialize(module: Any) -> None:
            module.to_empty(device="cpu", recurse=False)
            fill(module)

        @torch.no_grad()
        def fill(module: Any) -> None:
            for parameter in module.parameters(recurse=False):
                parameter.fill_(0.125)

        with self.group():
            with torch.device("meta"):
                model = network()
            model = wrapped(model, param_init_fn=materialize)
            self.train_both(model, network().apply(fill))

    def test_communication_hook(self) -> None:
        def rank_0_counts(state: int, gradient: Any, output: Any) -> None:
            dist.scatter(output, list(gradient.chunk(state)) if self.rank == 0 else None, src=0)

        with self.group():
            model, reference = FSDP(network(), device_id=CPU, use_orig_params=True), network()
            model.register_comm_hook(self.world_size, rank_0_counts)
            backward(model, self.mine(batch()))
            backward(reference, batch()[:2])
            self.assert_same(model, reference, gradients=True)


instantiate_parametrized_tests(FlatTrainingTest)
