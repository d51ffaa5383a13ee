"""Many cheap parametrised cases, shaped like torch's ``test_wrap.py``: spawning is most of it."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import always_wrap_policy, enable_wrap, wrap
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.base import GroupTest

CPU = torch.device("cpu")


def layers(number: int) -> list[Any]:
    return [nn.Linear(2, 2) for _ in range(number)]


class WrapTest(GroupTest):
    """Wrapping by hand and by policy, under every setting."""

    @parametrize("prefetch", [subtest(p, p.name) for p in BackwardPrefetch])
    @parametrize("forward_prefetch", [False, True])
    @parametrize(
        "strategy",
        [subtest(s, s.name) for s in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)],
    )
    @parametrize("offload", [False, True])
    def test_settings_reach_every_unit(
        self, prefetch: Any, forward_prefetch: bool, strategy: Any, offload: bool
    ) -> None:
        settings = {
            "backward_prefetch": prefetch,
            "forward_prefetch": forward_prefetch,
            "sharding_strategy": strategy,
            "cpu_offload": CPUOffload(offload),
        }
        with self.group(), enable_wrap(wrapper_cls=FSDP, device_id=CPU, **settings):
            model: Any = wrap(nn.Sequential(wrap(nn.Linear(2, 2)), *layers(1)))
        for unit in (model, model[0]):
            self.assertIsInstance(unit, FSDP)
            self.assertEqual(unit.backward_prefetch, prefetch)
            self.assertEqual(unit.forward_prefetch, forward_prefetch)
            self.assertEqual(unit.sharding_strategy, strategy)
            self.assertEqual(unit.cpu_offload.offload_params, offload)

    @parametrize("depth", [1, 2, 3, 4])
    @parametrize("original", [False, True])
    def test_units_of_a_nest(self, depth: int, original: bool) -> None:
        with self.group():
            model: Any = nn.Linear(2, 2)
            for _ in range(depth):
                model = FSDP(nn.Sequential(model), device_id=CPU, use_orig_params=original)
            self.assertEqual(len(FSDP.fsdp_modules(model)), depth)
            self.assertEqual(FSDP.fsdp_modules(model, root_only=True), [model])

    @parametrize("number", [1, 2, 3, 4])
    @parametrize("ignored", [0, 1])
    def test_always_wrap(self, number: int, ignored: int) -> None:
        with self.group():
            plain = nn.Sequential(*layers(number))
            left_out = list(plain)[:ignored]
            model = FSDP(
                plain, auto_wrap_policy=always_wrap_policy, ignored_modules=left_out, device_id=CPU
            )
            self.assertEqual(len(FSDP.fsdp_modules(model)), 1 + number - ignored)

    @parametrize("nested", [False, True])
    @parametrize("by_policy", [False, True])
    def test_wrapped_twice(self, nested: bool, by_policy: bool) -> None:
        with self.group():
            wrapped = FSDP(nn.Linear(2, 2), device_id=CPU)
            model = nn.Sequential(wrapped) if nested else wrapped
            if by_policy:
                with self.assertRaisesRegex(ValueError, "FSDP auto wrapping requires"):
                    FSDP(model, auto_wrap_policy=always_wrap_policy, device_id=CPU)
            else:
                self.assertEqual(len(FSDP.fsdp_modules(FSDP(model, device_id=CPU))), 2)

    @parametrize("number", [1, 2, 3, 4])
    def test_nothing_is_wrapped_outside(self, number: int) -> None:
        with self.group():
            found = [wrap(layer) for layer in layers(number)]
            self.assertEqual([type(layer) for layer in found], [nn.Linear] * number)


instantiate_parametrized_tests(WrapTest)
