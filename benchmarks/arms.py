"""Which base a suite's classes get: chosen from outside, so that one file runs on each."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: Names the arm in a suite's process.
VARIABLE = "BENCH_ARM"

STOCK = "stock"
NONE = "none"
PROCESS = "process"

GROUP = "group"

#: torch's own continuous class, which takes the place of some of the stock ones.
TORCH = "torch"

#: What a suite runs on unless told: stock, and reused workers at each isolation level.
SUITE_ARMS = (STOCK, NONE, GROUP, PROCESS)

#: What a suite can run on.
ALL_ARMS = (STOCK, NONE, GROUP, PROCESS, TORCH)

#: What a skip on the torch arm says where a test was never meant to run there.
LEFT_OUT = "left out on torch: "

_ISOLATION = "TORCHCONTINUOUS_ISOLATION"

#: By a stock class's name: torch's own continuous class for the same tests, and its module.
_TORCH_CLASSES = {
    "DTensorTestBase": (
        "torch.testing._internal.distributed._tensor.common_dtensor",
        "DTensorContinuousTestBase",
    ),
}

#: torch's own classes have a rank for each device unless told; stock's have four on a CPU.
_WORLD_SIZE = 4


def current() -> str:
    """The arm that this process runs on."""
    return os.environ.get(VARIABLE, NONE)


def environment(arm: str) -> Mapping[str, str]:
    """This process's environment, for a process that is to run on ``arm``."""
    environ = {name: value for name, value in os.environ.items() if name != _ISOLATION}
    environ[VARIABLE] = arm
    if arm in (GROUP, PROCESS):
        environ[_ISOLATION] = arm
    return environ


def on_arm(stock: Any) -> Any:
    """What a class derives from in place of ``stock``: on the stock arm, ``stock`` itself."""
    if current() == STOCK:
        return stock
    if current() == TORCH:
        return _on_torch(stock)
    from torchcontinuous import ContinuousMixin

    return type(stock.__name__, (ContinuousMixin, stock), {"__module__": __name__})


def not_on_torch(reason: str) -> Callable[[Any], Any]:
    """Leave out a test or a class on the torch arm, and only there."""
    if current() == TORCH:
        return unittest.skip(f"{LEFT_OUT}{reason}")
    return lambda test: test


def _on_torch(stock: Any) -> Any:
    try:
        module, name = _TORCH_CLASSES[stock.__name__]
    except KeyError:
        replaced = type(stock.__name__, (stock,), {"__module__": __name__})
        return not_on_torch(f"it has no class in place of {stock.__name__}")(replaced)
    theirs = getattr(import_module(module), name)
    members = {"__module__": __name__, "world_size": _WORLD_SIZE}
    return type(stock.__name__, (theirs,), members)
