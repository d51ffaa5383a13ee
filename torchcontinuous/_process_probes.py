"""Probes of what the interpreter and the operating system keep for a process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, cast

from torchcontinuous import _torch_state
from torchcontinuous._probes import (
    MISSING,
    ParentSettings,
    Probe,
    Setting,
    Settings,
    attempt,
    attribute,
    attributes,
    difference,
    leak,
    short,
)
from torchcontinuous._report import Leak
from torchcontinuous._snapshots import Contents, ParentContents

#: Variables that libraries set for themselves when first used: put back, and no leak of the test's.
_LIBRARIES_OWN = frozenset(map(os.fsencode, _torch_state.OWN_VARIABLES))


class Environment(Probe):
    """``os.environ``: the object and the variables."""

    from_parent = True

    def __init__(self) -> None:
        self._environ = os.environ
        # What os.environ holds inside, encoded: comparing it decodes nothing.
        self._raw: dict[Any, Any] = self._environ._data  # type: ignore[attr-defined]
        self._saved = dict(self._raw)

    def begin(self) -> None:
        if self._raw != self._saved:
            self._saved = dict(self._raw)

    def changed(self) -> bool:
        return os.environ is not self._environ or self._raw != self._saved

    def restore(self) -> Iterator[Leak]:
        if os.environ is not self._environ:
            found, os.environ = os.environ, self._environ
            yield leak("os.environ", self._environ, found, True)
        environ, saved = self._environ, self._saved
        decode: Any = getattr(environ, "decodevalue", str)
        for raw in sorted(self._raw.keys() | saved.keys()):
            before, after = saved.get(raw), self._raw.get(raw)
            if before == after:
                continue
            name = decode(raw)
            if before is None:
                del environ[name]
            else:
                environ[name] = decode(before)
            if raw not in _LIBRARIES_OWN:
                shown = [MISSING if value is None else decode(value) for value in (before, after)]
                yield leak(
                    f"os.environ[{name!r}]", shown[0], shown[1], self._raw.get(raw) == before
                )


def cwd() -> Probe:
    """The working directory."""
    return ParentSettings([Setting("os.getcwd()", _WorkingDirectory().get, os.chdir)], plain=True)


class _WorkingDirectory:
    """Its name; once it is removed (by the test in the parent, which may end first), its last."""

    def __init__(self) -> None:
        self._last = "", (0, 0)

    def get(self) -> str:
        status = os.stat(".")
        identity = status.st_dev, status.st_ino
        try:
            self._last = os.getcwd(), identity
        except FileNotFoundError:
            if identity != self._last[1]:
                raise
        return self._last[0]


def umask() -> Probe:
    """The umask."""
    return ParentSettings([Setting("umask", _umask, os.umask)], plain=True)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sys_path() -> Probe:
    """``sys.path``."""
    return ParentContents({"sys.path": (sys, "path")})


def sys_argv() -> Probe:
    """``sys.argv``."""
    return ParentContents({"sys.argv": (sys, "argv")})


def imports() -> Probe:
    """The finders of the import system."""
    return Contents({f"sys.{name}": (sys, name) for name in ("meta_path", "path_hooks")})


def signals() -> Probe:
    """Handlers, blocked signals and timers: an alarm that a test set would kill a later one."""
    fixed = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    numbers = sorted(int(n) for n in signal.valid_signals() if n not in fixed)
    # The functions of the signal module turn every number into an enumeration's member.
    get = _signal.getsignal
    settings = [
        Setting(f"handler of {_signal_name(n)}", partial(get, n), partial(_set_handler, n))
        for n in numbers
    ]
    more = []
    if hasattr(_signal, "pthread_sigmask"):
        more.append(
            Setting(
                "blocked signals",
                lambda: tuple(sorted(_signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
                lambda mask: _signal.pthread_sigmask(signal.SIG_SETMASK, mask),
            )
        )
    if hasattr(_signal, "getitimer"):
        for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
            which = getattr(signal, name)
            more.append(
                Setting(
                    f"{name} is running",
                    partial(_timer_runs, which),
                    partial(signal.setitimer, which),
                )
            )
    getters = [setting.get for setting in more]
    return Settings(
        settings + more, lambda: [*map(get, numbers), *(getter() for getter in getters)]
    )


def _timer_runs(which: int) -> bool:
    return bool(_signal.getitimer(which)[0] > 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _set_handler(number: int, handler: Any) -> None:
    signal.signal(number, handler)


def hooks() -> Probe:
    """Functions that the interpreter calls: on exceptions, for tracing."""
    return Settings(
        [
            replace(attribute("sys", sys, "excepthook"), usual=_is_of_process_group),
            *attributes("sys", sys, "displayhook", "unraisablehook", "breakpointhook"),
            *attributes("threading", threading, "excepthook"),
            Setting("sys.gettrace()", sys.gettrace, sys.settrace),
            Setting("sys.getprofile()", sys.getprofile, sys.setprofile),
            Setting("threading.gettrace()", threading.gettrace, threading.settrace),  # type: ignore[arg-type]
            Setting("threading.getprofile()", threading.getprofile, threading.setprofile),  # type: ignore[arg-type]
        ]
    )


def _is_of_process_group(hook: object) -> bool:
    # Making a group puts one more around the hook there is, to print the rank.
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def streams() -> Probe:
    """Standard streams: which objects they are, and whether they are open."""
    names = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is not None]
    opened = [
        Setting(f"sys.{name}.closed", partial(getattr, getattr(sys, name), "closed", False))
        for name in names
    ]
    return Settings([*attributes("sys", sys, "stdin", "stdout", "stderr"), *opened])


class Interpreter(Settings):
    """Limits of the interpreter."""

    def __init__(self) -> None:
        settings = [
            Setting("sys.getrecursionlimit()", sys.getrecursionlimit, sys.setrecursionlimit),
            Setting("sys.getswitchinterval()", sys.getswitchinterval, sys.setswitchinterval),
            Setting("threading.stack_size()", threading.stack_size, threading.stack_size),
        ]
        super().__init__(settings, plain=True)
        self._modules = len(sys.modules)

    def restore(self) -> Iterator[Leak]:
        # Libraries of deep recursion raise the limit when they are imported (inductor's do), once
        # for the whole process: it is not to be taken away from them.
        if len(sys.modules) > self._modules:
            self._modules = len(sys.modules)
            self._baseline[0] = max(cast("int", self._baseline[0]), sys.getrecursionlimit())
        yield from super().restore()


def garbage_collector() -> Probe:
    """Whether and how garbage is collected."""
    return Settings(
        [
            Setting("gc.isenabled()", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
            Setting("gc.get_threshold()", gc.get_threshold, lambda t: gc.set_threshold(*t)),
            Setting("gc.get_debug()", gc.get_debug, gc.set_debug),
        ],
        plain=True,
    )


def start_method() -> Probe:
    """How ``multiprocessing`` starts processes."""
    return Settings(
        [
            Setting(
                "multiprocessing.get_start_method()",
                partial(multiprocessing.get_start_method, allow_none=True),
                partial(multiprocessing.set_start_method, force=True),
            )
        ]
    )


class WarningFilters(Probe):
    """Filters of warnings, and how they are shown."""

    def __init__(self) -> None:
        self._filters = self._contents()
        self._modules = len(sys.modules)
        # catch_warnings(record=True) replaces the second.
        self._shown = Settings(
            attributes("warnings", warnings, "showwarning", "_showwarnmsg_impl", "formatwarning")
        )

    def changed(self) -> bool:
        return self._filters.changed() or self._shown.changed()

    def _contents(self) -> Contents:
        return Contents({"warnings.filters": (warnings, "filters")})

    def restore(self) -> Iterator[Leak]:
        # A module that the test imported first brings filters for warnings of its own, once.
        filters: Any = warnings.filters
        new = set(islice(reversed(sys.modules), max(0, len(sys.modules) - self._modules)))
        brought = [entry for entry in filters if entry[2].__module__ in new]
        if brought:
            filters[:] = [entry for entry in filters if entry not in brought]
        yield from self._filters.restore()
        if brought:
            filters = warnings.filters
            filters[:0] = brought
            self._filters = self._contents()
            self._modules = len(sys.modules)
        yield from self._shown.restore()
        # Entering and leaving makes warnings already given be looked at anew under the filters.
        with warnings.catch_warnings():
            pass


#: Lies in the root logger's cache, which setting the level of any logger empties.
_UNCHANGED: Any = object()


def _all_handlers() -> list[Any]:
    """Every handler that there is, in any logger or none."""
    return logging._handlerList  # type: ignore[attr-defined,no-any-return]


class Logging(Probe):
    """Levels, handlers and filters of the loggers there are.

    There are hundreds, and torch makes most of them: reading each would cost more than all else
    that the guard does. So a level is seen to be set by logging's own caches, which that empties,
    and a handler by how many there are in all. Only those that have handlers, the root and torch's
    are compared each time; what is assigned to another past logging's functions goes unseen.
    """

    _state = attrgetter("level", "handlers", "propagate", "disabled", "filters")

    def __init__(self) -> None:
        self._root = logging.root
        self._manager = self._root.manager
        self._module = Settings(
            [
                Setting("logging.root.manager.disable", self._disabled, logging.disable),
                *attributes("logging", logging, "raiseExceptions", "lastResort"),
            ]
        )
        self._loggers: list[logging.Logger] = []
        self._saved: list[tuple[Any, ...]] = []
        self._take_in_new()

    def _disabled(self) -> int:
        return self._manager.disable

    def _take_in_new(self) -> None:
        """Loggers made since: how they were found is how they are to be."""
        self._known = len(self._manager.loggerDict)
        seen = set(map(id, self._loggers))
        for logger in (self._root, *self._manager.loggerDict.values()):
            if not isinstance(logger, logging.Logger) or logger.name in _torch_state.OWN_LOGGERS:
                continue
            if id(logger) not in seen:
                self._loggers.append(logger)
                self._saved.append(self._copy(logger))
        self._watch()

    def _copy(self, logger: logging.Logger) -> tuple[Any, ...]:
        return tuple(v[:] if isinstance(v, list) else v for v in self._state(logger))

    def _watch(self) -> None:
        """Prepare what ``changed`` compares."""
        self._cache: dict[Any, bool] = self._root._cache  # type: ignore[attr-defined]
        self._cache[_UNCHANGED] = True
        self._handlers = len(_all_handlers())
        self._busy = [
            logger
            for logger in self._loggers
            if logger.handlers or logger is self._root or logger.name == "torch"
        ]
        self._busy_states = [self._copy(logger) for logger in self._busy]

    def changed(self) -> bool:
        return (
            _UNCHANGED not in self._cache
            or self._known != len(self._manager.loggerDict)
            or self._handlers != len(_all_handlers())
            or self._module.changed()
            or list(map(self._state, self._busy)) != self._busy_states
        )

    def restore(self) -> Iterator[Leak]:
        yield from self._module.restore()
        names = ("level", "handlers", "propagate", "disabled", "filters")
        for logger, saved in zip(self._loggers, self._saved, strict=True):
            now = self._state(logger)
            if now == saved:
                continue
            found = self._copy(logger)
            attempt(partial(self._put, logger, saved), lambda: True)
            for name, before, after in zip(names, saved, found, strict=True):
                if before != after:
                    what = f"logging.getLogger({logger.name!r}).{name}"
                    texts = (
                        difference(before, after)
                        if isinstance(before, list) and isinstance(after, list)
                        else (short(before), short(after))
                    )
                    yield Leak("", what, *texts, getattr(logger, name) == before)
        self._take_in_new()

    def _put(self, logger: logging.Logger, saved: tuple[Any, ...]) -> None:
        level, handlers, propagate, disabled, filters = saved
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.filters[:] = filters
        logger.propagate, logger.disabled = propagate, disabled
