"""The environment variables of this package: one reader for each, checked when read."""

from __future__ import annotations

import math
import os
import sys

from torchcontinuous.errors import ConfigurationError

ISOLATION = "TORCHCONTINUOUS_ISOLATION"
START_METHOD = "TORCHCONTINUOUS_START_METHOD"
START_TIMEOUT = "TORCHCONTINUOUS_START_TIMEOUT"
STRICT = "TORCHCONTINUOUS_STRICT"
PRELOAD = "TORCHCONTINUOUS_PRELOAD"
VERBOSE = "TORCHCONTINUOUS_VERBOSE"

#: Seconds for the nursery's own start (it imports torch) and for workers to be ready: a loaded
#: two-core machine needs up to 30.
DEFAULT_START_TIMEOUT = 120.0

LEVELS = ("none", "group", "process")


def check_isolation(value: object, setting: str) -> str:
    """Return ``value`` if it names an isolation level, else raise ConfigurationError."""
    if isinstance(value, str) and value in LEVELS:
        return value
    raise ConfigurationError(setting, value, f"Choose one of {', '.join(map(repr, LEVELS))}")


def isolation() -> str | None:
    """The level asked for the whole run, or None."""
    value = os.environ.get(ISOLATION)
    return check_isolation(value, ISOLATION) if value else None


def _switch(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(name, value, "Set it to 1 or 0")
    return value == "1"


def strict() -> bool:
    """Whether what stock passes over (leaks, ranks that disagree) is to fail."""
    return _switch(STRICT)


def verbose() -> bool:
    """Whether what was put back after a test is to be listed."""
    return _switch(VERBOSE)


def can_fork() -> bool:
    """Whether this system has what the nursery needs (Linux 5.3 or newer)."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def start_method() -> str:
    """How workers start: ``"fork"`` (from the nursery) or ``"spawn"``."""
    value = os.environ.get(START_METHOD) or ("fork" if can_fork() else "spawn")
    if value not in ("fork", "spawn"):
        raise ConfigurationError(START_METHOD, value, "Choose 'fork' or 'spawn'")
    if value == "fork" and not can_fork():
        raise ConfigurationError(START_METHOD, value, "This system can only 'spawn'")
    return value


def start_timeout() -> float:
    """Seconds that the nursery, a template or a generation of workers may take to start."""
    value = os.environ.get(START_TIMEOUT)
    if not value:
        return DEFAULT_START_TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(START_TIMEOUT, value, "Give a number of seconds above 0")
    return seconds


def check() -> None:
    """Read every setting: a bad one is an error at the first test, not when it first matters."""
    for reader in (isolation, strict, verbose, start_method, start_timeout):
        reader()


def preload() -> tuple[str, ...]:
    """Modules, besides torch's, that the nursery imports before it forks."""
    names = (name.strip() for name in os.environ.get(PRELOAD, "").split(","))
    return tuple(name for name in names if name)
