"""A worker: the loop that runs one test after another. It knows nothing of supervision."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from torchcontinuous import _context, _output, _single, _torch_api
from torchcontinuous._channel import Channel
from torchcontinuous._messages import Exit, Finished, ProcessContext, Run, Start, Started
from torchcontinuous._process_group import ClassGroup
from torchcontinuous._report import Ending, RankReport
from torchcontinuous._single import load_class
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
        self._group = ClassGroup()
        self._import_error: BaseException | None = None
        with _context.noted_reads() as self.reads:
            try:
                _torch_api.silence_event_listener()
                _single.load_module(start.module)
            except BaseException as error:
                # The test's failure, not the start's, with the traceback that stock would print.
                self._import_error = error

    def run(self, command: Run) -> RankReport:
        """Run one test and leave the worker fit for the next, where it can be."""
        if command.context is not None:
            self._context = command.context
        rank = self._start.rank

        def load() -> Any:
            _context.apply_context(self._context)
            _torch_api.reread_debug_level()
            if self._import_error is not None:
                raise self._import_error
            cls = load_class(command.test_class)
            if command.style == "class" or not _torch_api.seeds_before_the_test(cls):
                _context.reseed()
            if command.style == "class":
                assert command.rendezvous_file is not None
                world_size = self._start.world_size
                self._group.ensure(cls, rank, world_size, command.rendezvous_file)
            return cls

        name, file_name = command.test_name, command.file_name
        if command.style == "class":
            return _single.run_class_style(load, rank, name, file_name)
        report = _single.run_stock_style(load, rank, name, file_name, command.keywords)
        return report if report.used_up else _single.release(report)


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
            command = channel.receive(math.inf)
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
            channel.send(Finished(start.generation, command.sequence, report))
        except ChannelError:
            # The test closed every descriptor, say: what is left to tell is the exit code.
            sys.exit(exit_code)
