"""A worker: the loop that runs one test after another. It knows nothing of supervision."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from torchcontinuous import _context, _devices, _output, _single, _torch_api
from torchcontinuous._channel import Channel
from torchcontinuous._class_group import ClassGroup
from torchcontinuous._meshes import Meshes, empty_caches
from torchcontinuous._messages import (
    BodyEnded,
    Exit,
    GroupAgreed,
    GroupWanted,
    LeftBehind,
    ProcessContext,
    Run,
    Start,
    Started,
    TearDown,
    finished,
)
from torchcontinuous._process_group import GroupKeeper
from torchcontinuous._report import Ending, Leak, RankReport
from torchcontinuous._single import load_class
from torchcontinuous._state_guard import Guard, check_settings
from torchcontinuous.errors import ChannelError

#: Makes a worker write every thread's Python stack to its dump descriptor, from C, so that one
#: blocked in a collective answers too. c10 uses SIGUSR2 itself; real-time signals are nobody's.
DUMP_SIGNAL = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else None


_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; 0 takes that back.

    The parent is, to Linux, the thread that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def prepare_descriptors(stdout: int, stderr: int, dump: int) -> None:
    """Send output and stack dumps where the parent reads them. Before any user code."""
    _output.redirect(stdout, stderr)
    os.set_inheritable(dump, False)
    faulthandler.enable(file=2)
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, file=dump, all_threads=True, chain=False)


def spawned_main(
    by_main_thread: bool,
    commands: Connection[Any, Any],
    stdout: Any = None,
    stderr: Any = None,
    dump: Any = None,
) -> None:
    """What a worker under start method ``spawn`` runs. Connections come instead of descriptors."""
    if by_main_thread and sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
    if stdout is not None:
        prepare_descriptors(*(os.dup(end.fileno()) for end in (stdout, stderr, dump)))
        for end in (stdout, stderr, dump):
            end.close()
    serve(Channel(commands), WorkerEnd())


class WorkerEnd:
    """How a worker was told to end: quickly, or as slowly as an interpreter does."""

    full = False


class _Worker:
    """One rank of one generation."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._start = start
        self._context: ProcessContext = start.context
        self._class_group = ClassGroup()
        self._groups = GroupKeeper(start.rank, start.world_size, self._agree)
        self._meshes = Meshes()
        self._guard: Guard | None = None
        self._strict_probes: frozenset[str] = frozenset()
        self._import_error: BaseException | None = None
        self._sequence = 0
        self._met = True
        self._guard_is_due = False
        self._used_up: str | None = None
        with _context.noted_reads() as self.reads:
            try:
                _torch_api.silence_event_listener()
                _devices.skip_absent()
                self._groups.install()
                _single.load_module(start.module)
            except BaseException as error:
                # The test's failure, not the start's, with the traceback that stock would print.
                self._import_error = error

    def run(self, command: Run) -> RankReport:
        """Run one test and leave the worker fit for the next, where it can be."""
        if self._used_up is not None:
            return _single.refuse(self._start.rank, self._used_up)
        if command.context is not None:
            self._context = command.context
        rank = self._start.rank

        def load() -> Any:
            _context.apply_context(self._context)
            _torch_api.reread_debug_level()
            if self._import_error is not None:
                raise self._import_error
            cls = load_class(command.test_class)
            if getattr(cls, "compile_cache_per_rank", False):
                _torch_api.separate_compile_cache(rank)
            if command.style == "class" or not _torch_api.seeds_before_the_test(cls):
                _context.reseed()
            self._prepare(cls, command)
            return cls

        name, file_name = command.test_name, command.file_name
        self._sequence, self._met = command.sequence, True
        if command.style == "class":
            report = _single.run_class_style(load, rank, name, file_name, self._meet)
        else:
            report = _single.run_stock_style(load, rank, name, file_name, command.keywords)
        if report.used_up:
            return dataclasses.replace(report, group=self._groups.state())
        return self._release(report, command)

    def _meet(self) -> bool:
        """Wait for every rank's body to end; False if one failed, and will not."""
        self._channel.send(BodyEnded(self._start.generation, self._sequence))
        answer = self.receive(math.inf)
        if not isinstance(answer, TearDown) or answer.sequence != self._sequence:
            raise ChannelError(f"instead of an answer to BodyEnded came {answer}")
        self._met = answer.run
        return self._met

    def _agree(self, number: int, key: str, seconds: float) -> bool:
        """Wait for every rank's test to ask for a default process group; whether for the same.
        ``number`` tells this worker's questions apart.

        Raises:
            TimeoutError: not every rank came within ``seconds``.
        """
        # In any other thread, the main one may read the channel meanwhile.
        waits = threading.current_thread() is threading.main_thread()
        wanted = key if waits else None
        self._channel.send(GroupWanted(self._start.generation, self._sequence, number, wanted))
        if not waits:
            return False
        answer = self.receive(time.monotonic() + seconds, number)
        if not isinstance(answer, GroupAgreed):
            raise ChannelError(f"instead of an answer to GroupWanted came {answer}")
        return answer.alike

    def receive(self, deadline: float, agreement: int | None = None) -> Any:
        """The parent's next message, less the answers that came too late to be waited for."""
        while True:
            message = self._channel.receive(deadline)
            if not isinstance(message, GroupAgreed) or message.number == agreement:
                return message

    def _prepare(self, cls: Any, command: Run) -> None:
        """Have process groups and guard ready, just before a test."""
        self._groups.begin(command.kept_group, command.store_file)
        self._meshes.install()
        if command.style == "class":
            assert command.rendezvous_file is not None
            rank, world_size = self._start.rank, self._start.world_size
            self._class_group.ensure(cls, rank, world_size, command.rendezvous_file)
            self._groups.stand(command.sequence, sys.modules[cls.__module__])
            self._meshes.keep_those_there()
        settings = check_settings(getattr(cls, "guard", {}), cls.__qualname__)
        self._strict_probes = frozenset(name for name in settings if settings[name] == "error")
        if self._guard is None and not (command.last and not self._strict_probes):
            self._guard = Guard(cls, settings, self._start.world_size)
        if self._guard is not None:
            self._guard.begin()

    def _release(self, report: RankReport, command: Run) -> RankReport:
        """After a test that others may follow: take down what the end of a process would have."""
        reasons: list[str] = [] if self._met else ["its tearDown was left out"]
        group = None
        try:
            group = self._groups.release()
            if self._groups.made or self._groups.reused or self._meshes.made_any:
                reasons += filter(None, [empty_caches()])
            if self._groups.broken is not None:
                reasons.append(self._groups.broken)
            if _torch_api.pending_work():
                reasons.append("a collective is pending")
        except BaseException as error:
            reasons.append(f"its process group: {type(error).__name__}: {error}")
        self._guard_is_due = not self._guard_comes_first(command)
        leaks: list[Leak] = []
        if self._guard is not None and not self._guard_is_due:
            leaks = self._guard.end()
        kept_mesh = self._meshes.settle() if self._meshes.made_any and not command.last else None
        if kept_mesh is not None:
            leaks.append(Leak("meshes", kept_mesh, "none", "one", restored=False))
        reasons += _reasons(leaks)
        report = dataclasses.replace(
            report, group=group, leaks=tuple(leaks), used_up="; ".join(reasons) or None
        )
        errors = [leak for leak in leaks if leak.probe in self._strict_probes]
        return _single.fail_for_leaks(report, errors) if errors else report

    def _guard_comes_first(self, command: Run) -> bool:
        """Whether the report has to wait for the state guard: what it finds may cost the workers,
        fail the test, or hold a mesh."""
        return (
            self._guard is None
            or command.guard_first
            or command.last
            or bool(self._strict_probes)
            or self._meshes.made_any
            or self._guard.holds_resources()
        )

    def settle(self) -> LeftBehind | None:
        """Once the test is reported on: put back what it changed, if that is still to be done,
        while the parent goes on to the next test."""
        if not self._guard_is_due or self._guard is None:
            return None
        self._guard_is_due = False
        leaks = self._guard.end(resources=False)
        if not leaks:
            return None
        self._used_up = "; ".join(_reasons(leaks)) or None
        return LeftBehind(self._start.generation, self._sequence, tuple(leaks), self._used_up)


def _reasons(leaks: list[Leak]) -> list[str]:
    """Why what was left makes the worker unfit for another test."""
    return [
        f"{leak.what}: {leak.before} became {leak.after}" for leak in leaks if not leak.restored
    ]


def serve(channel: Channel, end: WorkerEnd) -> None:
    """Run tests until told to exit; raises SystemExit with the last test's exit code."""
    try:
        start = channel.receive(math.inf)
    except EOFError:
        return
    if start.preparation:
        _context.apply_preparation(start.preparation, f"process {start.rank}")
    _context.apply_context(start.context)
    worker = _Worker(channel, start)
    channel.send(Started(start.generation, start.rank, worker.reads))
    exit_code = 0
    while True:
        try:
            command = worker.receive(math.inf)
        except EOFError:
            return  # The parent is gone or has given this generation up.
        if isinstance(command, Exit):
            end.full = command.full
            sys.exit(exit_code)
        report = worker.run(command)
        _output.flush()
        if report.ending is Ending.REPORTED and report.exit_code is not None:
            exit_code = report.exit_code
        try:
            channel.send(finished(start.generation, command.sequence, report))
            left = worker.settle()
            if left is not None:
                channel.send(left)
        except ChannelError:
            # The test closed every descriptor, say: what is left to tell is the exit code.
            sys.exit(exit_code)
