"""Processes as the parent, their supervisor, sees them: fork servers, and workers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from typing import Any, Protocol

import psutil

from torchcontinuous import _context, _devices, _nursery, _settings, _worker
from torchcontinuous._channel import STALL_SECONDS, Channel
from torchcontinuous._messages import (
    Exited,
    Forked,
    ForkFailed,
    ForkServerReady,
    Kill,
    ProcessContext,
)
from torchcontinuous.errors import ChannelError, StartError

logger = logging.getLogger("torchcontinuous")

#: Longest that a process which has ended keeps its exit code from us.
EXIT_CODE_SECONDS = 5.0

#: Longest that the nursery is waited for at the end of the run, then it is killed.
NURSERY_END_SECONDS = 3.0

#: Variables that native code reads when it is loaded, or the interpreter when it starts; what
#: Python code reads while the nursery imports is noted there.
NATIVE_PREFIXES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_",
    "LD_", "MALLOC_", "GLIBC_", "PYTHON", "LC_", "ATEN_CPU_", "TORCH_CPP_LOG", "TORCH_SHOW_",
)  # fmt: skip
NATIVE_NAMES = frozenset({"LANG", "TZ", *_devices.VARIABLES_ON_LOAD})


def native_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in NATIVE_NAMES or name.startswith(NATIVE_PREFIXES)
    }


class WorkerProcess(Protocol):
    """A worker as its supervisor sees it: an operating-system process."""

    pid: int

    @property
    def sentinel(self) -> int:
        """Something to wait on, ready once the process has ended."""

    @property
    def lost(self) -> bool:
        """Whether its exit code can never be known (its nursery died)."""

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended, negative for a signal; None if unknown."""

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def kill(self) -> None:
        """Kill it and what it started."""

    def dump_stacks(self) -> bool:
        """Ask for its Python stacks; False where that is not possible."""

    def close(self) -> None:
        """Let go of what the parent holds of it."""


class ForkServer:
    """The parent's view of a nursery or template."""

    def __init__(self, channel: Channel, what: str, context: ProcessContext) -> None:
        self.channel = channel
        self.context = context
        self.what = what
        self.broken = False
        self.ready: ForkServerReady | None = None
        self._native = native_variables(context.environ)
        self._exit_codes: dict[int, int] = {}

    def wait_until_ready(self, deadline: float) -> ForkServerReady:
        """Wait for it to be up.

        Raises:
            StartError: it died, or was not up in time.
        """
        while self.ready is None:
            try:
                message = self._receive(deadline)
            except TimeoutError as error:
                raise StartError(f"{self.what} was not up in time{self.log()}") from error
            if isinstance(message, ForkServerReady):
                self.ready = message
                for note in message.notes:
                    logger.debug("%s: %s", self.what, note)
        return self.ready

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Whether a process forked from it is what a fresh one with this environment would be."""
        if self._native != native_variables(environ):
            return False
        # Not up yet: only what native code reads is known.
        return self.ready is None or _context.fits(self.ready.reads, environ)

    def _receive(self, deadline: float) -> Any:
        try:
            message = self.channel.receive(deadline)
        except (EOFError, ChannelError) as error:
            self.broken = True
            raise StartError(f"{self.what} died{self.log()}") from error
        if isinstance(message, Exited):
            self._exit_codes[message.pid] = message.exit_code
        return message

    def _send(self, message: object, descriptors: list[int]) -> None:
        try:
            self.channel.send(message)
            if descriptors:
                self.channel.send_descriptors(descriptors)
        except ChannelError as error:
            self.broken = True
            raise StartError(f"{self.what} died{self.log()}") from error

    def fork(
        self, requests: list[tuple[object, list[int]]], deadline: float
    ) -> list[tuple[int, int]]:
        """Fork one process for each request; the process ids and pidfds, in order.

        Raises:
            StartError: a fork failed, or the server died or did not answer in time.
        """
        for request, descriptors in requests:
            self._send(request, descriptors)
        forked: list[tuple[int, int]] = []
        failures: list[str] = []
        while len(forked) + len(failures) < len(requests):
            try:
                message = self._receive(deadline)
            except TimeoutError as error:
                self.broken = True
                raise StartError(f"{self.what} did not fork in time") from error
            if isinstance(message, Forked):
                try:
                    forked.append((message.pid, self.channel.receive_descriptors(1)[0]))
                except ChannelError as error:
                    self.broken = True
                    raise StartError(f"{self.what} died while it forked{self.log()}") from error
            elif isinstance(message, ForkFailed):
                failures.append(message.reason)
        if failures:
            for pid, pidfd in forked:
                self.kill(pid)
                os.close(pidfd)
            raise StartError(f"{self.what} could not fork: {failures[0]}")
        return forked

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a process that has ended; None if the server died before telling."""
        deadline = time.monotonic() + EXIT_CODE_SECONDS
        while pid not in self._exit_codes and not self.broken:
            try:
                self._receive(deadline)
            except TimeoutError:
                self.broken = True
            except StartError as error:
                logger.debug("%s", error)
        return self._exit_codes.get(pid)

    def kill(self, pid: int) -> None:
        """Kill a worker and its descendants."""
        with contextlib.suppress(StartError):
            if not self.broken:
                self._send(Kill(pid), [])

    def log(self) -> str:
        """What it wrote last, to be put into a message."""
        return ""

    def close(self) -> None:
        """Let it go: it ends, and with it all that it forked."""
        self.broken = True
        self.channel.close()


class Nursery(ForkServer):
    """A nursery: the fork server that was started by exec."""

    def __init__(self, context: ProcessContext) -> None:
        ours, theirs = Pipe()
        self._log = os.memfd_create("torchcontinuous-nursery")
        control = theirs.fileno()
        command = _nursery.command_line(control, (), _settings.preload())
        try:
            # A session of its own: a terminal's Ctrl-C is for the parent to deal with.
            self._process = subprocess.Popen(
                command,
                env=dict(context.environ),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(control,),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StartError(f"cannot start the nursery: {error}") from error
        finally:
            theirs.close()
        super().__init__(Channel(ours, STALL_SECONDS), "the nursery", context)

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, 8192, max(0, size - 8192)).decode(errors="backslashreplace")
        return f"; it wrote:\n{text}" if text.strip() else ""

    def close(self) -> None:
        up = self.ready is not None
        super().close()
        if not up:
            self._process.kill()  # Still importing: there is nothing to put in order.
        try:
            self._process.wait(NURSERY_END_SECONDS)
        except subprocess.TimeoutExpired:
            for child in _descendants(self._process.pid):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            self._process.kill()
            self._process.wait()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


class ForkedWorker:
    """A worker forked by a nursery or template."""

    def __init__(self, server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._server = server
        self._pidfd = pidfd

    @property
    def sentinel(self) -> int:
        return self._pidfd

    @property
    def lost(self) -> bool:
        return self._server.broken

    def exit_code(self) -> int | None:
        return self._server.exit_code(self.pid)

    def _signal(self, number: int) -> bool:
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        # By the one process that knows whether the number is still the worker's; and by this one,
        # should that be busy or dead.
        self._server.kill(self.pid)
        if self._server.broken:
            self._signal(signal.SIGKILL)

    def dump_stacks(self) -> bool:
        assert _worker.DUMP_SIGNAL is not None
        return self._signal(_worker.DUMP_SIGNAL)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class SpawnedWorker:
    """A worker started by ``multiprocessing``'s ``spawn``."""

    lost = False

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = int(process.pid)

    @property
    def sentinel(self) -> int:
        return int(self._process.sentinel)

    def exit_code(self) -> int | None:
        self._process.join(EXIT_CODE_SECONDS)
        return self._process.exitcode  # type: ignore[no-any-return]

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        for child in _descendants(self.pid):
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.kill()

    def dump_stacks(self) -> bool:
        if _worker.DUMP_SIGNAL is None:
            return False
        try:
            os.kill(self.pid, _worker.DUMP_SIGNAL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._process.close()
