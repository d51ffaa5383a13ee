"""What FullyShardedDataParallel wraps, summons, and writes to state dictionaries."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.base import GroupTest
from benchmarks.models import batch, network, train

CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual block, for policies that look for a class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, rows: Any) -> Any:
        return rows + self.inner(rows)


def blocks() -> Any:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 3))


def units(model: Any) -> set[str]:
    """Where FSDP's units are, by the names that the plain module had."""
    names = {name for name, module in model.named_modules() if isinstance(module, FSDP)}
    return {
        name.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".") for name in names
    }


def larger_than_60(module: Any) -> bool:
    return bool(sum(p.numel() for p in module.parameters(recurse=False)) > 60)


POLICIES = {
    "nothing": (None, {""}),
    "classes": (ModuleWrapPolicy({Block}), {"", "0", "1"}),
    "transformer": (
        partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        {"", "0", "1"},
    ),
    "size": (
        partial(size_based_auto_wrap_policy, min_num_params=60),
        {"", "0.inner.0", "1.inner.0"},
    ),
    "function": (
        partial(lambda_auto_wrap_policy, lambda_fn=larger_than_60),
        {"", "0.inner.0", "1.inner.0"},
    ),
    "custom": (
        CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        {"", "0.inner.0", "1.inner.0", "2"},
    ),
    "always": (
        always_wrap_policy,
        {
            "",
            "0",
            "0.inner",
            "0.inner.0",
            "0.inner.1",
            "1",
            "1.inner",
            "1.inner.0",
            "1.inner.1",
            "2",
        },
    ),
}


class WrappingTest(GroupTest):
    @parametrize("policy, expected", [subtest(case, name) for name, case in POLICIES.items()])
    def test_policy(self, policy: Any, expected: set[str]) -> None:
        with self.group():
            model = FSDP(blocks(), auto_wrap_policy=policy, device_id=CPU)
            self.assertEqual(units(model), expected)
            self.assertEqual(len(FSDP.fsdp_modules(model)), len(expected))
            self.assertEqual(FSDP.fsdp_modules(model, root_only=True), [model])

    def test_policy_with_settings(self) -> None:
        def choose(module: Any) -> Any:
            return {"limit_all_gathers": False} if isinstance(module, Block) else False

        with self.group():
            model = FSDP(blocks(), auto_wrap_policy=CustomPolicy(choose), device_id=CPU)
            self.assertEqual(units(model), {"", "0", "1"})
            limits = [unit.limit_all_gathers for unit in FSDP.fsdp_modules(model)]
            self.assertEqual(limits, [True, False, False])

    def test_wrap_by_hand(self) -> None:
        with self.group():
            with enable_wrap(wrapper_cls=FSDP, device_id=CPU, use_orig_params=True):
                model = wrap(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 3)))
            self.assertEqual(units(model), {"", "0"})
            self.assertTrue(all(unit._use_orig_params for unit in FSDP.fsdp_modules(model)))
            self.assertIs(type(wrap(nn.Linear(8, 8))), nn.Linear)

    def test_ignored_modules_are_not_wrapped(self) -> None:
        with self.group():
            plain = blocks()
            policy = ModuleWrapPolicy({Block})
            model = FSDP(plain, auto_wrap_policy=policy, ignored_modules=[plain[1]], device_id=CPU)
            self.assertEqual(units(model), {"", "0"})

    def test_flat_parameter(self) -> None:
        with self.group():
            plain = nn.Linear(3, 2)
            whole = torch.cat([plain.weight.detach().flatten(), plain.bias.detach()])
            flat = FSDP(plain, device_id=CPU)._flat_param
            self.assertEqual(flat, whole.chunk(4)[self.rank])


class StateTest(GroupTest):
    # With Adagrad, which has one tensor a parameter: torch gathers all of a parameter's into one
    # buffer, which on the CPU is not copied from, so that only the last is right.

    def trained(self, seed: int = 0, **options: Any) -> tuple[Any, Any]:
        """A sharded network and its optimizer, after two steps that were alike on every rank."""
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(network(seed), auto_wrap_policy=policy, device_id=CPU, **options)
        return model, train(model, [batch(0), batch(1)], torch.optim.Adagrad)

    def plain(self, seed: int = 0) -> tuple[Any, Any]:
        """The same, on one process."""
        model = network(seed)
        return model, train(model, [batch(0), batch(1)], torch.optim.Adagrad)

    @parametrize("rank0_only", [False, True])
    def test_full_state(self, rank0_only: bool) -> None:
        with self.group():
            model, _ = self.trained()
            config = FullStateDictConfig(rank0_only=rank0_only)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                state = model.state_dict()
            if rank0_only and self.rank != 0:
                self.assertEqual(state, {})
            else:
                self.assertEqual(dict(state), dict(self.plain()[0].state_dict()))

    def test_full_state_is_loaded(self) -> None:
        with self.group():
            other, _ = self.trained(seed=1)
            with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
                other.load_state_dict(self.plain()[0].state_dict())
                self.assertEqual(dict(other.state_dict()), dict(self.plain()[0].state_dict()))

    def test_sharded_state(self) -> None:
        with self.group():
            model, _ = self.trained()
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = model.state_dict()
            expected = self.plain()[0].state_dict()
            self.assertEqual(list(state), list(expected))
            for name, value in state.items():
                self.assertIsInstance(value, ShardedTensor)
                whole = torch.zeros(value.size()) if self.rank == 0 else None
                value.gather(0, whole)
                if self.rank == 0:
                    self.assertEqual(whole, expected[name])
            other, _ = self.trained(seed=1)
            with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
                other.load_state_dict(state)
            with FSDP.summon_full_params(other):
                for got, wanted in zip(other.parameters(), expected.values(), strict=True):
                    self.assertEqual(got, wanted)

    def test_sharded_state_on_a_mesh(self) -> None:
        with self.group():
            model, _ = self.trained(device_mesh=init_device_mesh("cpu", (4,)))
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = model.state_dict()
            for name, expected in self.plain()[0].state_dict().items():
                self.assertIsInstance(state[name], DTensor)
                self.assertEqual(state[name].placements, (Shard(0),))
                self.assertEqual(state[name].full_tensor(), expected)

    def test_local_state(self) -> None:
        with self.group():
            model, _ = self.trained()
            other, _ = self.trained(seed=1)
            for whole in (model, other):
                FSDP.set_state_dict_type(whole, StateDictType.LOCAL_STATE_DICT)
            other.load_state_dict(model.state_dict())
            for got, wanted in zip(other.parameters(), model.parameters(), strict=True):
                self.assertEqual(got, wanted)

    @parametrize("use_orig_params", [False, True])
    def test_optimizer_state(self, use_orig_params: bool) -> None:
        with self.group():
            model, optimizer = self.trained(use_orig_params=use_orig_params)
            state = FSDP.optim_state_dict(model, optimizer)["state"]
            names = [name for name, _ in network().named_parameters()]
            self.assertEqual(sorted(state), sorted(names))
            expected = self.plain()[1].state_dict()["state"]
            for at, name in enumerate(names):
                self.assertEqual(state[name], expected[at])

    def test_optimizer_state_of_rank_0(self) -> None:
        with self.group():
            model, optimizer = self.trained()
            FSDP.set_state_dict_type(
                model,
                StateDictType.FULL_STATE_DICT,
                FullStateDictConfig(rank0_only=True),
                FullOptimStateDictConfig(rank0_only=True),
            )
            state = FSDP.optim_state_dict(model, optimizer)
            self.assertEqual(bool(state), self.rank == 0)

    def test_optimizer_state_is_loaded(self) -> None:
        with self.group():
            model, optimizer = self.trained()
            state = FSDP.optim_state_dict(model, optimizer)
            other, fresh = self.trained(seed=1)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
            self.assertEqual(fresh.state_dict()["state"], optimizer.state_dict()["state"])

    @parametrize("writeback", [False, True])
    def test_summoned_parameters_are_written_back(self, writeback: bool) -> None:
        with self.group():
            model, _ = self.trained()
            with FSDP.summon_full_params(model, writeback=writeback):
                before = model.module[2].weight.detach().clone()
                with torch.no_grad():
                    model.module[2].weight.add_(1)
            with FSDP.summon_full_params(model):
                self.assertEqual(model.module[2].weight, before + int(writeback))

    def test_summoned_on_rank_0(self) -> None:
        with self.group():
            model, _ = self.trained()
            with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
                shape = (12, 8) if self.rank == 0 else (-(-108 // self.world_size),)
                parameters = dict(model.module[0].named_parameters())
                self.assertIn(torch.Size(shape), [p.shape for p in parameters.values()])

    def test_type_is_put_back(self) -> None:
        with self.group():
            model, _ = self.trained()
            FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                inside = FSDP.get_state_dict_type(model).state_dict_type
                self.assertEqual(inside, StateDictType.SHARDED_STATE_DICT)
            after = FSDP.get_state_dict_type(model).state_dict_type
            self.assertEqual(after, StateDictType.LOCAL_STATE_DICT)


instantiate_parametrized_tests(WrappingTest)
instantiate_parametrized_tests(StateTest)
