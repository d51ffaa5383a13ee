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

#: What a suite can run on, and does unless told.
ALL_ARMS = (STOCK, TORCH, NONE, GROUP, PROCESS)

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

#: Ranks of a suite unless told. Stock's classes have as many on a CPU, torch's own a rank for each
#: device.
WORLD_SIZE = 4

#: Says how many ranks a suite's process is to have.
_WORLD_SIZE_VARIABLE = "BENCH_WORLD_SIZE"


def current() -> str:
    """The arm that this process runs on."""
    return os.environ.get(VARIABLE, NONE)


def world_size() -> int:
    """How many ranks this process's suite has."""
    return int(os.environ.get(_WORLD_SIZE_VARIABLE, WORLD_SIZE))


def environment(arm: str, world_size: int = WORLD_SIZE) -> Mapping[str, str]:
    """This process's environment, for a process that is to run on ``arm`` with so many ranks."""
    environ = {name: value for name, value in os.environ.items() if name != _ISOLATION}
    environ[VARIABLE] = arm
    environ[_WORLD_SIZE_VARIABLE] = str(world_size)
    if arm in (GROUP, PROCESS):
        environ[_ISOLATION] = arm
    return environ


def on_arm(stock: Any) -> Any:
    """What a class derives from in place of ``stock``: on the stock arm, ``stock`` itself."""
    members: dict[str, Any] = {"__module__": __name__}
    if world_size() != WORLD_SIZE:
        members["world_size"] = world_size()
    if current() == STOCK:
        return type(stock.__name__, (stock,), members) if "world_size" in members else stock
    if current() == TORCH:
        return _on_torch(stock)
    from torchcontinuous import ContinuousMixin

    return type(stock.__name__, (ContinuousMixin, stock), members)


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
    members = {"__module__": __name__, "world_size": world_size()}
    return type(stock.__name__, (theirs,), members)
