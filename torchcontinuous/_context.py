"""What a fresh interpreter takes over from its parent, taken over by a worker that lives on.

Stock's workers see the parent's environment, working directory, ``sys.path``, ``sys.argv`` and
umask as they are when the test spawns. The parent captures them then; a worker applies the
differences before the test. (Differences only: C++ threads may call ``getenv`` meanwhile.)
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import process, spawn
from typing import Any

from torchcontinuous import _devices
from torchcontinuous._messages import ProcessContext

#: What stock's ``run_test`` sets in each worker; C++ reads it once, at its first error, so that it
#: has to be there from the start.
WORKER_ENVIRONMENT = {"TORCH_SHOW_CPP_STACKTRACES": "1"}

#: Set where processes are forked from, and only there.
FORK_SERVER_ENVIRONMENT = _devices.LOOK_WITHOUT_TOUCHING


def capture_context() -> ProcessContext:
    """This process's context, as a child started now would see it."""
    umask = os.umask(0o077)
    os.umask(umask)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = None
    return ProcessContext(
        _environment.captured(), directory, tuple(sys.path), tuple(sys.argv), umask
    )


def imports_alike(one: ProcessContext, other: ProcessContext) -> bool:
    """Whether a module could find no difference, besides the environment, when it is imported."""
    return (one.directory, one.path, one.argv) == (other.directory, other.path, other.argv)


class _Environment:
    """This process's environment variables, decoded again only where they have changed."""

    def __init__(self) -> None:
        self._raw: object = None
        self._decoded: dict[str, str] = {}

    def current(self) -> Mapping[str, str]:
        """``dict(os.environ)``; not to be changed."""
        # What os.environ holds inside; without it everything is decoded each time.
        raw = getattr(os.environ, "_data", None)
        if raw is None or raw != self._raw:
            self._decoded = dict(os.environ)
            self._raw = dict(raw) if raw is not None else None
            self._captured = {**self._decoded, **WORKER_ENVIRONMENT}
        return self._decoded

    def captured(self) -> Mapping[str, str]:
        """The same, with what a worker has besides."""
        self.current()
        return self._captured


_environment = _Environment()


def environment() -> Mapping[str, str]:
    """``dict(os.environ)``, cheaply where nothing has changed; not to be changed."""
    return _environment.current()


def apply_context(context: ProcessContext) -> None:
    """Make this process's context equal to ``context``."""
    apply_environment(context.environ)
    if context.directory is not None:
        os.chdir(context.directory)
    # The lists themselves are kept: code holds on to them.
    if sys.path != list(context.path):
        sys.path[:] = context.path
    if sys.argv != list(context.argv):
        sys.argv[:] = context.argv
    os.umask(context.umask)


def apply_environment(environ: Mapping[str, str]) -> None:
    """Set, change and delete environment variables where they differ from ``environ``."""
    current = _environment.current()
    if current == environ:
        return
    for name in current.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if current.get(name) != value:
            os.environ[name] = value


def capture_preparation() -> dict[str, Any]:
    """What ``multiprocessing.spawn`` would prepare a fresh interpreter with, fit to be sent."""
    data = spawn.get_preparation_data("process 0")
    data["authkey"] = bytes(data["authkey"])
    return data


def apply_preparation(data: Mapping[str, Any], name: str) -> None:
    """Prepare this process as a fresh interpreter; this imports the parent's ``__main__``."""
    # A class of the parent's __main__ is looked up in the copy that this makes.
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare({**data, "name": name})
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]


def reseed() -> None:
    """Seed Python's and numpy's generators afresh, as in a process that has just started."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


#: Stands, among the names that were looked up, for the set of all names.
ALL_NAMES = "*"

#: Changes with every test; code that goes through all variables is not meant to see it.
_VOLATILE = {"PYTEST_CURRENT_TEST"}


class _NotingEnviron(type(os.environ)):  # type: ignore[misc]
    """``os.environ`` that notes which names are looked up.

    A copy of all (``dict(os.environ)``, to hand it to a child process) is no look-up: it takes
    every name, and then every value in that order. Whoever goes through the names otherwise may
    choose among them, and depends on all.
    """

    noted: set[str]
    _current: object = None
    _values_due: Sequence[object] = ()

    def __getitem__(self, name: str) -> str:
        if self._values_due and self._values_due[-1] == name:
            self._values_due = self._values_due[:-1]
            if not self._values_due:
                self.noted.discard(ALL_NAMES)
        elif name != self._current and isinstance(name, str):  # (get_exec_path asks in bytes.)
            self.noted.add(name)
        return str(super().__getitem__(name))

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self.noted.add(name)
        return bool(super().__contains__(name))

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        already = ALL_NAMES in self.noted
        self.noted.add(ALL_NAMES)
        for self._current in names:
            yield str(self._current)
        self._current = None
        # Taken back if all values follow.
        self._values_due = () if already else names[::-1]


Reads = dict[str, tuple[str | None, str | None]]


@contextmanager
def noted_reads(going_through_counts: bool = True) -> Iterator[Reads]:
    """Collect the environment variables that Python code looks up (or changes) meanwhile.

    At the end the mapping holds each one's value before and after (None: not set).

    Args:
        going_through_counts: whether code that goes through all variables depends on all.
    """
    original = os.environ.__class__
    before = dict(os.environ)
    reads: Reads = {}
    noted: set[str] = set()
    os.environ.__class__ = _NotingEnviron
    os.environ.noted = noted  # type: ignore[attr-defined]
    try:
        yield reads
    finally:
        os.environ.__class__ = original
        for name in ("noted", "_current", "_values_due"):
            os.environ.__dict__.pop(name, None)
        after = dict(os.environ)
        if not going_through_counts:
            noted.discard(ALL_NAMES)
        if ALL_NAMES in noted:
            noted |= (before.keys() | after.keys()) - _VOLATILE
        noted -= FORK_SERVER_ENVIRONMENT.keys()
        noted |= {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
        reads.update({name: (before.get(name), after.get(name)) for name in sorted(noted)})


def fits(reads: Mapping[str, tuple[str | None, str | None]], environ: Mapping[str, str]) -> bool:
    """Whether what was imported under ``reads`` would be the same under ``environ``.

    A value that the import itself set counts as well: the parent has imported the same.
    """
    if ALL_NAMES in reads and not environ.keys() <= reads.keys() | _VOLATILE:
        return False
    return all(environ.get(n) in values for n, values in reads.items() if n != ALL_NAMES)
