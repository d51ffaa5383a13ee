"""Which base a suite's classes get: chosen from outside, so that one file runs on each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: Names the arm in a suite's process.
VARIABLE = "BENCH_ARM"

STOCK = "stock"
NONE = "none"
PROCESS = "process"

#: torch's own continuous class: for the probes only, since it takes no suite unchanged.
TORCH = "torch"

#: What a suite can run on: stock, and reused workers at each isolation level.
SUITE_ARMS = (STOCK, NONE, PROCESS)

_ISOLATION = "TORCHCONTINUOUS_ISOLATION"


def current() -> str:
    """The arm that this process runs on."""
    return os.environ.get(VARIABLE, NONE)


def environment(arm: str) -> Mapping[str, str]:
    """This process's environment, for a process that is to run on ``arm``."""
    environ = {name: value for name, value in os.environ.items() if name != _ISOLATION}
    environ[VARIABLE] = arm
    if arm == PROCESS:
        environ[_ISOLATION] = PROCESS
    return environ


def on_arm(stock: Any) -> Any:
    """What a class derives from in place of ``stock``: on the stock arm, ``stock`` itself."""
    if current() == STOCK:
        return stock
    from torchcontinuous import ContinuousMixin

    return type(stock.__name__, (ContinuousMixin, stock), {"__module__": __name__})
