"""Starting workers, in the parent: from nurseries and templates, or by ``spawn``."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, get_context, process
from multiprocessing.connection import Connection
from typing import Any, Protocol

import psutil

from torchcontinuous import _context, _nursery, _settings, _worker
from torchcontinuous._channel import STALL_SECONDS, Channel
from torchcontinuous._messages import (
    ClassReference,
    Exited,
    Forked,
    ForkFailed,
    ForkServerReady,
    ForkTemplate,
    ForkWorker,
    Kill,
    ProcessContext,
    Start,
)
from torchcontinuous._output import Capture
from torchcontinuous.errors import ChannelError, StartError

logger = logging.getLogger("torchcontinuous")

#: Fork servers kept at a time: each costs 7 MB of its own, and a start.
MAX_NURSERIES = 3
MAX_TEMPLATES = 8

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
NATIVE_NAMES = frozenset(
    {
        "LANG", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING",
        "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
        "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    }
)  # fmt: skip

#: Variables that are read at first use, and then kept: workers that have run a test do not fit.
FIRST_USE_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "TP_", "UCX_", "UCC_", "CUDA_")
#: c10d's debug level is read again before each test.
_REREAD = {"TORCH_DISTRIBUTED_DEBUG"}


def _native(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in NATIVE_NAMES or name.startswith(NATIVE_PREFIXES)
    }


def _first_use(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FIRST_USE_PREFIXES) and name not in _REREAD
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

    def kill(self) -> None:
        """Kill it and what it started."""

    def dump_stacks(self) -> bool:
        """Ask for its Python stacks; False where that is not possible."""

    def close(self) -> None:
        """Let go of what the parent holds of it."""


class _ForkServer:
    """The parent's view of a nursery or template."""

    def __init__(self, channel: Channel, what: str, environ: Mapping[str, str]) -> None:
        self.channel = channel
        self.what = what
        self.broken = False
        self.ready: ForkServerReady | None = None
        self._native = _native(environ)
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
        if self._native != _native(environ):
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

    def fork(self, requests: list[tuple[object, list[int]]], deadline: float) -> list[tuple[int, int]]:
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
        """Kill a worker and its process group."""
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


class _Nursery(_ForkServer):
    """A nursery: the fork server that was started by exec."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        self._log = os.memfd_create("torchcontinuous-nursery")
        control = theirs.fileno()
        command = _nursery.command_line(control, (), _settings.preload())
        try:
            # A session of its own: a terminal's Ctrl-C is for the parent to deal with.
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
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
        super().__init__(Channel(ours, STALL_SECONDS), "the nursery", environ)

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


class _ForkedWorker:
    """A worker forked by a nursery or template."""

    def __init__(self, server: _ForkServer, pid: int, pidfd: int) -> None:
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

    def kill(self) -> None:
        # Its group first, by the one process that knows whether the number is still the group's.
        self._server.kill(self.pid)
        self._signal(signal.SIGKILL)

    def dump_stacks(self) -> bool:
        assert _worker.DUMP_SIGNAL is not None
        return self._signal(_worker.DUMP_SIGNAL)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class _SpawnedWorker:
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


@dataclass
class Member:
    """One rank of a generation: its process, its connection, its output."""

    rank: int
    process: WorkerProcess
    channel: Channel
    stdout: Capture | None
    stderr: Capture | None
    dump: Capture | None

    def captures(self) -> list[Capture]:
        return [c for c in (self.stdout, self.stderr) if c is not None]

    def close(self) -> None:
        self.channel.close()
        self.process.close()
        for capture in (self.stdout, self.stderr, self.dump):
            if capture is not None:
                capture.close()


@dataclass
class Crew:
    """The members of a new generation, and whether they fit a later environment, too."""

    members: list[Member]
    fits: Callable[[Mapping[str, str]], bool]


class Launcher:
    """Starts workers; keeps nurseries and templates, one launcher for a process."""

    def __init__(self) -> None:
        self._nurseries: list[_Nursery] = []
        self._templates: dict[tuple[object, ...], list[_ForkServer]] = {}
        self._unsafe: dict[tuple[object, ...], str] = {}
        self._lock = threading.RLock()

    def start_early(self) -> None:
        """Start a nursery beside the parent's own imports, without waiting for it."""
        if _settings.start_method() == "fork" and not self._nurseries:
            with contextlib.suppress(StartError):
                self._nurseries.append(_Nursery(_context.capture_context().environ))

    def launch(
        self, generation: int, world_size: int, module: ClassReference, context: ProcessContext
    ) -> Crew:
        """Start the workers of a generation; they are not waited for.

        Raises:
            StartError: they cannot be started.
        """
        with self._lock:
            if _settings.start_method() == "spawn":
                return self._spawn(generation, world_size, module, context)
            try:
                return self._fork(generation, world_size, module, context)
            except StartError as error:
                # A nursery that dies is started again, once for each request.
                logger.debug("trying again: %s", error)
                self._forget_broken()
                return self._fork(generation, world_size, module, context)

    def _fork(
        self, generation: int, world_size: int, module: ClassReference, context: ProcessContext
    ) -> Crew:
        deadline = time.monotonic() + _settings.start_timeout()
        preparation = _context.capture_preparation()
        nursery = self._nursery(context, deadline)
        template = self._template(nursery, module, preparation, context, deadline)
        server = template or nursery
        start = Start(
            generation, -1, world_size, module, context, None if template else preparation
        )
        pipes = [_Pipes() for _ in range(world_size)]
        requests: list[tuple[object, list[int]]] = [
            (ForkWorker(f"process {rank}", os.getpid()), pipe.theirs())
            for rank, pipe in enumerate(pipes)
        ]
        try:
            forked = server.fork(requests, deadline)
        except BaseException:
            for pipe in pipes:
                pipe.close()
            raise
        members = [
            pipe.member(rank, _ForkedWorker(server, pid, pidfd))
            for rank, (pipe, (pid, pidfd)) in enumerate(zip(pipes, forked, strict=True))
        ]
        _send_start(members, start)
        first_use = _first_use(context.environ)

        def fits(environ: Mapping[str, str]) -> bool:
            servers_fit = nursery.fits(environ) and (template is None or template.fits(environ))
            return servers_fit and first_use == _first_use(environ)

        return Crew(members, fits)

    def _spawn(
        self, generation: int, world_size: int, module: ClassReference, context: ProcessContext
    ) -> Crew:
        spawn = get_context("spawn")
        members = []
        capture = sys.platform != "win32"
        for rank in range(world_size):
            pipe = _Pipes(capture)
            theirs: list[Any] = [pipe.peer]
            theirs += [Connection(os.dup(c.write_end), readable=False) for c in pipe.captures]
            worker = spawn.Process(
                target=_worker.spawned_main, name=f"process {rank}", args=tuple(theirs)
            )
            try:
                worker.start()
            except OSError as error:
                raise StartError(f"cannot spawn rank {rank}: {error}") from error
            finally:
                for end in theirs[1:]:
                    end.close()
            members.append(pipe.member(rank, _SpawnedWorker(worker)))
        _send_start(members, Start(generation, -1, world_size, module, context))
        environ = dict(context.environ)
        return Crew(members, lambda other: _imported(environ) == _imported(other))

    def _nursery(self, context: ProcessContext, deadline: float) -> _Nursery:
        """A nursery that fits the context's environment, and is up."""
        for nursery in self._nurseries:
            if nursery.broken or not nursery.fits(context.environ):
                continue
            with contextlib.suppress(StartError):
                nursery.wait_until_ready(deadline)
                if nursery.fits(context.environ):
                    self._nurseries.remove(nursery)
                    self._nurseries.append(nursery)  # The last used at the end.
                    return nursery
        self._forget_broken()
        while len(self._nurseries) >= MAX_NURSERIES:
            self._drop_nursery(self._nurseries[0])
        nursery = _Nursery(context.environ)
        self._nurseries.append(nursery)
        nursery.wait_until_ready(deadline)
        return nursery

    def _template(
        self,
        nursery: _Nursery,
        module: ClassReference,
        preparation: Mapping[str, Any],
        context: ProcessContext,
        deadline: float,
    ) -> _ForkServer | None:
        """A template for the module, or None where forking from one is not safe."""
        main = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
        key = (nursery.pid, module.module, module.file, main)
        if key in self._unsafe:
            return None
        kept = self._templates.setdefault(key, [])
        for template in kept:
            if not template.broken and template.fits(context.environ):
                return template
        ours, theirs = Pipe()
        template = _ForkServer(
            Channel(ours, STALL_SECONDS), f"the template of {module.module}", context.environ
        )
        try:
            request = ForkTemplate(module, preparation, context)
            _, pidfd = nursery.fork([(request, [theirs.fileno()])], deadline)[0]
            os.close(pidfd)
        finally:
            theirs.close()
        try:
            unsafe = template.wait_until_ready(deadline).unsafe
        except StartError as error:
            unsafe = str(error)
        if unsafe:
            logger.debug("workers import %s themselves: %s", module.module, unsafe)
            self._unsafe[key] = unsafe
            template.close()
            return None
        while sum(map(len, self._templates.values())) >= MAX_TEMPLATES:
            oldest = next(servers for servers in self._templates.values() if servers)
            oldest.pop(0).close()
        kept.append(template)
        return template

    def _forget_broken(self) -> None:
        for nursery in [n for n in self._nurseries if n.broken]:
            self._drop_nursery(nursery)
        for servers in self._templates.values():
            servers[:] = [s for s in servers if not s.broken]

    def _drop_nursery(self, nursery: _Nursery) -> None:
        self._nurseries.remove(nursery)
        for key in [k for k in self._templates if k[0] == nursery.pid]:
            for template in self._templates.pop(key):
                template.close()
        nursery.close()

    def close(self) -> None:
        """End every nursery and template, and with them all that they forked."""
        with self._lock:
            for nursery in list(self._nurseries):
                self._drop_nursery(nursery)

    def forget(self) -> None:
        """In a fork of this process: close what belongs to the parent."""
        for server in (*self._nurseries, *(t for ts in self._templates.values() for t in ts)):
            server.channel.close()
        self.__init__()  # type: ignore[misc]


def _imported(environ: Mapping[str, str]) -> dict[str, str]:
    """For ``spawn``, where reads are not noted: all that is not plainly a test's own."""
    return {**_native(environ), **_first_use(environ)}


class _Pipes:
    """The parent's and the worker's ends of what runs between them."""

    def __init__(self, capture: bool = True) -> None:
        self._ours, self.peer = Pipe()
        self.captures = [Capture() for _ in range(3)] if capture else []

    def theirs(self) -> list[int]:
        return [self.peer.fileno(), *(c.write_end for c in self.captures)]

    def member(self, rank: int, worker: WorkerProcess) -> Member:
        """Close the worker's ends here, and put the rest together."""
        self.peer.close()
        for capture in self.captures:
            capture.close_write_end()
        stdout, stderr, dump = self.captures or (None, None, None)
        return Member(rank, worker, Channel(self._ours, STALL_SECONDS), stdout, stderr, dump)

    def close(self) -> None:
        self._ours.close()
        self.peer.close()
        for capture in self.captures:
            capture.close()


def _send_start(members: list[Member], start: Start) -> None:
    for member in members:
        message = Start(**{**vars(start), "rank": member.rank})
        with contextlib.suppress(ChannelError):  # Dead already: its sentinel tells.
            member.channel.send(message)


_launcher: Launcher | None = None


def may_start() -> bool:
    """Whether this is a process that tests are run from: not a worker, nor a child of one."""
    return not _nursery.active and process.current_process().name == "MainProcess"


def launcher() -> Launcher:
    """This process's launcher."""
    global _launcher
    if not may_start():
        raise StartError(
            "no workers are started inside a worker: a test that runs tests of its own must run "
            "them in a process started for it"
        )
    if _launcher is None:
        _launcher = Launcher()
        # After multiprocessing's own callback, which waits for children for ever, was registered,
        # so that this one runs before it.
        import multiprocessing.util  # noqa: F401

        atexit.register(_launcher.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_launcher.forget)
    return _launcher
