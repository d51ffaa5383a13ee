"""The unittest adapter: what a suite derives from.

``ContinuousMixin`` replaces how stock starts and joins a test's processes, and runs a test again
where it failed in a used worker; all else of the class it is mixed into stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import get_context
from typing import Any, TypeVar

from torchcontinuous import (
    _class_group,
    _devices,
    _report,
    _settings,
    _single,
    _torch_api,
)
from torchcontinuous import _leaks as leaks
from torchcontinuous._counts import counts
from torchcontinuous._generation import Job
from torchcontinuous._handles import RankPipe, RankProcess
from torchcontinuous._messages import Style
from torchcontinuous._pool import Codes, Ticket
from torchcontinuous._registry import (
    check_world_size,
    pools,
    refer_to,
    replay,
    tell_late_leaks,
)
from torchcontinuous._report import Ending, Outcome, RankReport, Verdict
from torchcontinuous._rerun import Attempt
from torchcontinuous._state_guard import check_settings as check_guard
from torchcontinuous.errors import (
    RankWarning,
    StartError,
    StateLeakError,
    StateLeakWarning,
    WorkerAssertionError,
    WorkerError,
)

MultiProcessTestCase = _torch_api.stock_test_case()

logger = logging.getLogger("torchcontinuous")

#: unittest's runner leaves the frames of modules with this name out of a failure's traceback.
__unittest = True

_ISOLATION_MARK = "_torchcontinuous_isolation"
_F = TypeVar("_F", bound=Callable[..., Any])

#: Names of earlier tests that a leak warning lists, at most.
_TESTS_NAMED = 8


def isolated(level: str) -> Callable[[_F], _F]:
    """Give one test method an isolation level of its own: ``@isolated("process")``.

    Raises:
        ConfigurationError: there is no such level.
    """
    _settings.check_isolation(level, "@isolated")

    def mark(function: _F) -> _F:
        setattr(function, _ISOLATION_MARK, level)
        return function

    return mark


class ContinuousMixin:
    """Runs a stock suite's tests on reused workers: ``class Foo(ContinuousMixin, StockSubclass)``.

    Attributes:
        isolation: ``"none"`` (workers and process group are reused for the class), ``"group"``
            (workers are reused, each test makes its own group) or ``"process"`` (each test has
            workers of its own). The strictest of this, ``@isolated`` on the method, and
            ``TORCHCONTINUOUS_ISOLATION`` counts.
        guard: for probes of the state guard, by name: ``"off"``, ``"error"`` (a test that leaves
            such a change fails) or ``"restore"`` (the default).
        compile_cache_per_rank: whether each rank keeps what ``torch.compile`` makes in a folder of
            its own. On stock, and by default, all ranks share one.
    """

    isolation: str = "none"
    guard: Mapping[str, str | bool] = {}
    compile_cache_per_rank: bool = False

    _continuous_ticket: Ticket | None = None
    _continuous_started = False
    _continuous_failed = False
    _continuous_doubtful = False
    _continuous_made_file: str | None = None
    _continuous_level: str | None = None

    @property
    def file_name(self: Any) -> str:
        """Stock's file for the ranks to meet by; a class may put another in its place."""
        try:
            return str(self.__dict__["file_name"])
        except KeyError:
            raise AttributeError("file_name: it is made by setUp") from None

    @file_name.setter
    def file_name(self: Any, value: str) -> None:
        self.__dict__["file_name"] = value
        if sys._getframe(1).f_code is MultiProcessTestCase.setUp.__code__:
            # Made by stock, which leaves it; any other is the user's own.
            self._continuous_made_file = value

    # Starting

    def _start_processes(self: Any, proc: Any) -> None:
        self._continuous_started = True
        if not _is_plain(proc):
            # The class gives its processes arguments of its own: stock's way is the only one.
            logger.debug("%s starts processes of its own kind: left to stock", self.id())
            super()._start_processes(proc)  # type: ignore[misc]
            return
        self._continuous_dispatch("stock", check_world_size(type(self), self.world_size))

    def _continuous_dispatch(self: Any, style: Style, world_size: int) -> None:
        self.processes = []
        _settings.check()
        if world_size == 0:
            return
        cls = type(self)
        check_guard(cls.guard, f"{cls.__module__}.{cls.__qualname__}")
        job = Job(
            refer_to(cls),
            self._current_test_name(),
            self.file_name,
            world_size,
            style,
            level=self._continuous_isolation(),
            keywords={"fake_pg": getattr(self, "fake_pg", False)},
        )
        ticket = pools.get(cls, world_size).dispatch(job)
        self._continuous_ticket = ticket
        # setUp may raise from here on, and tearDown may leave super out.
        self.addCleanup(self._continuous_cancel)
        self.processes = [
            RankProcess(ticket, rank, self._continuous_collect) for rank in range(world_size)
        ]
        self.pid_to_pipe.update(
            (pid, RankPipe(ticket, rank)) for rank, pid in enumerate(ticket.pids)
        )

    def _continuous_isolation(self: Any) -> str:
        cls = type(self)
        method = getattr(cls, self._testMethodName, None)
        setting = f"{cls.__module__}.{cls.__qualname__}.isolation"
        levels = {
            _settings.check_isolation(cls.isolation, setting),
            _settings.isolation() or "none",
            getattr(method, _ISOLATION_MARK, "none"),
            pools.raised_level(cls),
            self._continuous_level or "none",
        }
        return max(levels, key=_settings.LEVELS.index)

    def _continuous_cancel(self: Any) -> None:
        """After the test: give up what was dispatched and never joined."""
        ticket = self._continuous_ticket
        if ticket is not None and ticket.reports is None:
            replay(ticket.pool.cancel())

    # Joining

    def _join_processes(self: Any, fn: Any) -> None:
        if self._continuous_ticket is None:
            super()._join_processes(fn)  # type: ignore[misc]
            return
        try:
            if super()._join_processes.__func__ is not MultiProcessTestCase._join_processes:  # type: ignore[misc]
                self._continuous_ticket.foreign_join = True
                super()._join_processes(fn)  # type: ignore[misc]
                return
            self._continuous_collect()
            if type(self)._check_return_codes is MultiProcessTestCase._check_return_codes:
                self._continuous_judge(fn)
            else:
                self._check_return_codes(fn, self._continuous_ticket.elapsed)
        except unittest.SkipTest:
            raise
        except Exception:
            self._continuous_failed = True
            raise

    def _continuous_declared(self: Any) -> Codes:
        """What the test declared about exit codes, keyed as stock keys it."""
        fn = getattr(getattr(self, self._testMethodName), "__wrapped__", None)
        special = getattr(self, "special_return_code_checks", {})
        return Codes(
            expected=special.get(fn, 0),
            unchecked=fn in getattr(self, "skip_return_code_checks", ()),
            every_rank_counts=self._continuous_ticket.job.style == "class",
            skips=frozenset(_torch_api.test_skips()),
        )

    def _continuous_collect(self: Any) -> None:
        """Wait for the test's reports, and pass its output on."""
        ticket: Ticket = self._continuous_ticket
        self._continuous_codes = self._continuous_declared()
        try:
            ticket.pool.collect(ticket, _torch_api.test_timeout(self.id()), self._continuous_codes)
        finally:
            replay(ticket.output)
        leaks.tell(self.id(), ticket.reports or ())
        tell_late_leaks(ticket.pool)
        # It may have been an earlier test's doing, and rank 0's exit code 0 would hide it.
        self._continuous_doubtful = any(r.ending is Ending.DIED for r in ticket.reports or ())

    def _continuous_judge(self: Any, fn: Any) -> None:
        """Raise what the test's verdict calls for."""
        ticket: Ticket = self._continuous_ticket
        reports: list[RankReport] = ticket.reports or []
        codes: Codes = self._continuous_codes
        verdict = _report.merge(
            reports,
            skips=_torch_api.test_skips(),
            expected=codes.expected,
            unchecked=codes.unchecked,
            every_rank_counts=codes.every_rank_counts,
            elapsed=ticket.elapsed,
        )
        if ticket.lost:
            raise StartError(f"{self.id()}: the nursery died, and its workers with it")
        self._continuous_pass_on(verdict)
        if verdict.outcome is Outcome.SKIPPED and not _torch_api.is_sandcastle():
            raise unittest.SkipTest(verdict.text)
        if verdict.outcome is Outcome.FAILED:
            raise WorkerAssertionError(f"{self.id()} {verdict.text}", verdict.ranks)
        if verdict.outcome is Outcome.ERROR:
            raise WorkerError(f"{self.id()} {verdict.text}", verdict.ranks)

    def _continuous_pass_on(self: Any, verdict: Verdict) -> None:
        """Warn of what stock passes over, or fail for it where that was asked for."""
        if not verdict.notes:
            return
        text = f"{self.id()}: {'; '.join(verdict.notes)}"
        if _settings.strict():
            raise WorkerAssertionError(text)
        warnings.warn(text, RankWarning, stacklevel=4)

    # In a worker

    @contextlib.contextmanager
    def subTest(self: Any, msg: Any = None, **params: Any) -> Iterator[None]:
        """As in stock: in a worker the first sub-test that fails ends the test; its parameters
        are in the text."""
        if self.rank == self.MAIN_PROCESS_RANK:
            with super().subTest(*([] if msg is None else [msg]), **params):  # type: ignore[misc]
                yield
            return
        try:
            yield
        except Exception as error:
            _single.note_subtest(error, msg, params)
            raise

    # Running, and running again

    def run(self: Any, result: Any = None) -> Any:
        """Run the test; again, whole and in fresh workers, if it failed in used ones."""
        if result is None:
            result = self.defaultTestResult()
            result.startTestRun()
            try:
                return self.run(result)
            finally:
                result.stopTestRun()
        given = dict(self.__dict__)
        last = Attempt(result, self)
        leak = None
        try:
            self._continuous_attempt(last)
            ticket = self._continuous_ticket
            if ticket is not None and self._continuous_to_be_repeated(ticket):
                counts.repeated += 1
                again = self._continuous_successor(given)
                second = Attempt(result, self, first=False)
                again._continuous_attempt(second)
                # One that got no verdict (setUp skipped, say) says nothing about the first.
                if again._continuous_ticket is not None and again._continuous_ticket.reports:
                    last = second
                    settled = ticket.lost or ticket.refused
                    if self._continuous_failed and not again._continuous_failed and not settled:
                        leak = self._continuous_leak(ticket)
        finally:
            last.deliver(instead_of_success=leak)
        return result

    def _continuous_to_be_repeated(self: Any, ticket: Ticket) -> bool:
        if ticket.lost:
            return bool(self._continuous_failed)
        handed = any(r.group is not None and r.group.used for r in ticket.reports or ())
        used = (bool(ticket.ran_before) or handed) and not ticket.job.fresh
        return used and (self._continuous_failed or self._continuous_doubtful)

    def _continuous_attempt(self: Any, attempt: Attempt) -> None:
        try:
            with _devices.absent_skipped():
                super().run(attempt)  # type: ignore[misc]
        finally:
            if self._continuous_made_file is not None:
                with contextlib.suppress(OSError):
                    os.remove(self._continuous_made_file)

    def _continuous_successor(self: Any, given: dict[str, Any]) -> Any:
        """A new instance for the second attempt, with what the runner had put on the first."""
        again = type(self)(self._testMethodName)
        for name, value in given.items():
            again.__dict__.setdefault(name, value)
        again._continuous_level = "process"
        return again

    def _continuous_leak(self: Any, ticket: Ticket) -> Any:
        """Report that state leaked into the test; exception information where that is a failure."""
        counts.leaked_into += 1
        pools.raise_level(type(self))
        before = ticket.ran_before
        named = ", ".join(before[-_TESTS_NAMED:])
        if len(before) > _TESTS_NAMED:
            named = f"{len(before) - _TESTS_NAMED} others, then {named}"
        text = (
            f"{self.id()} failed in used workers and passed in fresh ones: state leaked into it. "
            f"These ran there before: {named}. {leaks.describe(ticket.left_before)}"
            "The rest of the class runs at level 'process'. "
            f"What leaked: python -m torchcontinuous bisect {self.id()}"
        )
        first = (
            "\n\nThe failure in used workers:\n"
            + _report.merge(
                ticket.reports or [], skips=_torch_api.test_skips(), elapsed=ticket.elapsed
            ).text
        )
        try:
            if _settings.strict():
                raise StateLeakError(text + first)
            warnings.warn(text, StateLeakWarning, stacklevel=3)
        except (StateLeakError, StateLeakWarning):
            return sys.exc_info()
        return None


def _is_plain(proc: Any) -> bool:
    """Whether ``_start_processes`` was given what stock gives it."""
    return proc is get_context("spawn").Process


class MultiProcContinuousTest(ContinuousMixin, MultiProcessTestCase):  # type: ignore[misc,valid-type]
    """``MultiProcessTestCase`` on reused workers.

    A class whose tests are spawned (``self._spawn_processes()`` in setUp) runs as it does on
    stock. One that never spawns is of torch's continuous style: a process group stands before the
    test's body, made once for the class by ``_init_pg`` and shared by its tests.

    Attributes:
        timeout: of the class's process group.
        pg: in workers, the class's process group.
        rdvz_file: in workers, the file by which the class's ranks met.
        setup_in_workers: whether ``setUp``, ``tearDown`` and cleanups of a test of class style run
            on every rank, too (``self.rank`` tells where), and not in the parent alone.
            ``tearDown`` runs when the bodies of all ranks have ended, and nowhere if one failed.
    """

    rank: int = MultiProcessTestCase.MAIN_PROCESS_RANK
    timeout: timedelta = timedelta(seconds=120)
    pg: Any = None
    rdvz_file: str | None = None
    setup_in_workers: bool = False

    def setUp(self) -> None:
        if self._continuous_in_worker():
            # Not stock's, which is the parent's.
            super(MultiProcessTestCase, self).setUp()
        else:
            super().setUp()

    def tearDown(self) -> None:
        if self._continuous_in_worker():
            super(MultiProcessTestCase, self).tearDown()
        else:
            super().tearDown()

    def _continuous_in_worker(self) -> bool:
        return bool(self.rank != self.MAIN_PROCESS_RANK)

    @classmethod
    def backend_str(cls) -> str | None:
        """The process group's backend; None takes the device's own (gloo on a CPU)."""
        return None

    @classmethod
    def device_type(cls) -> str:
        """The kind of device that tests use: the accelerator's that torch was built for."""
        return _devices.accelerator() or "cpu"

    @classmethod
    def opts(cls) -> Any:
        """The process group's backend options."""
        return None

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        import torch.distributed as dist

        kind = str(_class_group.value_of(cls, "device_type"))
        os.environ["LOCAL_RANK"] = str(_devices.local_index(rank, kind))
        _devices.bind(rank, kind)
        dist.init_process_group(
            backend=_class_group.backend_of(cls),
            world_size=world_size,
            rank=rank,
            store=dist.FileStore(rdvz_file, world_size),
            pg_options=cls.opts(),
            timeout=cls.timeout,
        )
        cls.pg = dist.group.WORLD

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """As in stock, but a class's own group outlives the test."""
        return type(self).pg is None

    def _join_processes(self, fn: Any) -> None:
        if not self._continuous_started and not self.processes:
            cls = type(self)
            size = inspect.getattr_static(cls, "world_size", None)
            default = size is inspect.getattr_static(MultiProcessTestCase, "world_size")
            _class_group.check_backend(cls)
            wanted = -2 if default else self.world_size
            size = check_world_size(cls, wanted, str(_class_group.value_of(cls, "device_type")))
            self._continuous_dispatch("class", size)
        super()._join_processes(fn)
