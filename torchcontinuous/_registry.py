"""The pools of a test process, by test class; and what a class has to be to have one."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import unittest
from types import FrameType
from typing import Any

from torchcontinuous import _devices, _launcher, _leaks, _output, _settings, _torch_api
from torchcontinuous._counts import counts
from torchcontinuous._messages import ClassReference
from torchcontinuous._pool import Pool
from torchcontinuous.errors import ConfigurationError, UnreachableClassError

#: Has the parent write where the ranks of the running test are. c10 uses SIGUSR2 itself.
REPORT_SIGNAL = getattr(signal, "SIGUSR1", None)


class Pools:
    """The pools of this process, by test class and world size: never inherited by a subclass."""

    def __init__(self) -> None:
        self._pools: dict[type, dict[int, Pool]] = {}
        self._levels: dict[type, str] = {}
        self._registered = False

    def get(self, cls: Any, world_size: int) -> Pool:
        """The class's pool of this size, made if need be; it ends with the class."""
        starter = _launcher.launcher()
        if not self._registered:
            self._registered = True
            atexit.register(self._finish)  # Before the launcher's: registered after it.
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.forget)
            self._answer_signal()
        of_class = self._pools.get(cls)
        if of_class is None:
            of_class = self._pools[cls] = {}
            # tearDownClass may be overridden without a call of super's: cleanups always run.
            cls.addClassCleanup(self.close, cls)
        if world_size not in of_class:
            of_class[world_size] = Pool(starter)
        return of_class[world_size]

    def _answer_signal(self) -> None:
        """Have SIGUSR1 tell where the ranks are, unless it means something here already."""
        if REPORT_SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(REPORT_SIGNAL) is signal.SIG_DFL:
            signal.signal(REPORT_SIGNAL, self._tell_where_the_ranks_are)

    def _tell_where_the_ranks_are(self, number: int, frame: FrameType | None) -> None:
        skips = _torch_api.test_skips()
        pools = [pool for of_class in self._pools.values() for pool in of_class.values()]
        pages = filter(None, (pool.describe(skips) for pool in pools))
        text = "\n".join(pages) or "torchcontinuous: no test runs now.\n"
        with contextlib.suppress(OSError):
            os.write(_output.terminal, text.encode(errors="backslashreplace"))

    def close(self, cls: type) -> None:
        """End a class's workers, and pass on what they wrote since their last test."""
        for pool in self._pools.pop(cls, {}).values():
            replay(pool.close())
            tell_late_leaks(pool)

    def _finish(self) -> None:
        self.close_all()
        if _settings.verbose() and counts.tests:
            print(f"torchcontinuous: {counts.describe()}", file=sys.stderr)

    def close_all(self) -> None:
        """End every worker of this process."""
        for cls in list(self._pools):
            self.close(cls)

    def forget(self) -> None:
        """In a fork of this process: the pools are the parent's."""
        for of_class in self._pools.values():
            for pool in of_class.values():
                pool.forget()
        self._pools.clear()
        counts.__init__()  # type: ignore[misc]

    def raised_level(self, cls: type) -> str:
        """The level at which a class goes on after a leak was found in it."""
        return self._levels.get(cls, "none")

    def raise_level(self, cls: type) -> None:
        """Have the class go on in fresh workers."""
        self._levels[cls] = "process"

    def reset_level(self, cls: type) -> None:
        """Forget the leak, so that the class may be run anew."""
        self._levels.pop(cls, None)


pools = Pools()

#: What workers call before they import a test module: see ``ClassReference``.
before_import: tuple[str, str, tuple[str, ...]] | None = None


def replay(output: list[tuple[bytes, bytes]]) -> None:
    for rank, (stdout, stderr) in enumerate(output):
        _output.replay(rank, stdout, sys.stdout)
        _output.replay(rank, stderr, sys.stderr)


def tell_late_leaks(pool: Pool) -> None:
    """Warn of what a pool's tests were found to have left, after their reports."""
    found = pool.take_late_leaks()
    if found:
        _leaks.tell_late((job.test_id, rank, leak) for job, rank, leak in found)


def refer_to(cls: type) -> ClassReference:
    """How workers find a class.

    Raises:
        UnreachableClassError: they cannot.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    module = sys.modules.get(cls.__module__)
    if module is None:
        raise UnreachableClassError(name, f"there is no module {cls.__module__}")
    found: Any = module
    for part in cls.__qualname__.split("."):
        if part == "<locals>":
            raise UnreachableClassError(name, "it is defined in a function")
        found = getattr(found, part, None)
    if found is not cls:
        raise UnreachableClassError(name, f"that name belongs to {found!r}")
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__" and file is None:
        raise UnreachableClassError(name, "its module has no file (an interactive session?)")
    path = file and os.path.abspath(file)
    return ClassReference(cls.__module__, path, cls.__qualname__, before_import)


def check_world_size(cls: type, value: Any, device_type: str | None = None) -> int:
    """A usable number of ranks; -2 means all devices, of the kind that is given or there is.

    Raises:
        ConfigurationError: it is negative, or not a whole number.
        unittest.SkipTest: it is -2, and there are no devices.
    """
    setting = f"{cls.__module__}.{cls.__qualname__}.world_size"
    try:
        number = int(value)
        whole = isinstance(value, str) or number == value
    except (TypeError, ValueError, OverflowError):
        number, whole = -1, False
    if number == -2 and whole:
        kind = device_type or _devices.accelerator() or "cpu"
        number = _devices.count(kind)
        if number == 0:
            raise unittest.SkipTest(f"No {kind} devices available")
    if number < 0 or not whole:
        raise ConfigurationError(setting, value, "Give a number of ranks, 0 or more")
    return number
