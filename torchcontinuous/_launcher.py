"""Starting workers, in the parent: from nurseries and templates, or by ``spawn``."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe, get_context, process
from multiprocessing.connection import Connection
from typing import Any

from torchcontinuous import _context, _devices, _nursery, _settings, _worker
from torchcontinuous._channel import STALL_SECONDS, Channel
from torchcontinuous._messages import (
    ClassReference,
    ForkTemplate,
    ForkWorker,
    ProcessContext,
    Start,
)
from torchcontinuous._output import Capture
from torchcontinuous._processes import (
    ForkedWorker,
    ForkServer,
    Nursery,
    SpawnedWorker,
    WorkerProcess,
    native_variables,
)
from torchcontinuous.errors import ChannelError, StartError

logger = logging.getLogger("torchcontinuous")

#: Fork servers kept at a time: each costs 7 MB of its own, and a start.
MAX_NURSERIES = 3
MAX_TEMPLATES = 8

#: Variables that are read at first use, and then kept: workers that have run a test do not fit.
FIRST_USE_PREFIXES = (
    *("TORCH_", "PYTORCH_", "GLOO_", "TP_", "UCX_", "UCC_"),
    *_devices.PREFIXES_ON_FIRST_USE,
)
#: c10d's debug level is read again before each test.
_REREAD = {"TORCH_DISTRIBUTED_DEBUG"}


def _first_use(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FIRST_USE_PREFIXES) and name not in _REREAD
    }


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
        self._nurseries: list[Nursery] = []
        self._templates: dict[tuple[object, ...], list[ForkServer]] = {}
        self._unsafe: dict[tuple[object, ...], str] = {}
        self._lock = threading.RLock()

    def start_early(self) -> None:
        """Start a nursery beside the parent's own imports, without waiting for it."""
        if _settings.start_method() == "fork" and not self._nurseries:
            with contextlib.suppress(StartError):
                self._nurseries.append(Nursery(_context.capture_context()))

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
            (ForkWorker(rank, os.getpid()), pipe.theirs()) for rank, pipe in enumerate(pipes)
        ]
        try:
            forked = server.fork(requests, deadline)
        except BaseException:
            for pipe in pipes:
                pipe.close()
            raise
        members = [
            pipe.member(rank, ForkedWorker(server, pid, pidfd))
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
            # The kernel's notice of a parent's end goes by the thread that started the process.
            by_main_thread = threading.current_thread() is threading.main_thread()
            theirs: list[Any] = [by_main_thread, pipe.peer]
            theirs += [Connection(os.dup(c.write_end), readable=False) for c in pipe.captures]
            worker = spawn.Process(
                target=_worker.spawned_main, name=f"process {rank}", args=tuple(theirs)
            )
            try:
                worker.start()
            except OSError as error:
                raise StartError(f"cannot spawn rank {rank}: {error}") from error
            finally:
                for end in theirs[2:]:
                    end.close()
            members.append(pipe.member(rank, SpawnedWorker(worker)))
        _send_start(members, Start(generation, -1, world_size, module, context))
        environ = dict(context.environ)
        return Crew(members, lambda other: _imported(environ) == _imported(other))

    def _nursery(self, context: ProcessContext, deadline: float) -> Nursery:
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
        nursery = Nursery(context)
        self._nurseries.append(nursery)
        nursery.wait_until_ready(deadline)
        return nursery

    def _template(
        self,
        nursery: Nursery,
        module: ClassReference,
        preparation: Mapping[str, Any],
        context: ProcessContext,
        deadline: float,
    ) -> ForkServer | None:
        """A template for the module, or None where forking from one is not safe."""
        main = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
        key = (nursery.pid, module.module, module.file, main)
        if key in self._unsafe:
            return None
        kept = self._templates.setdefault(key, [])
        for template in kept:
            alike = _context.imports_alike(template.context, context)
            if alike and not template.broken and template.fits(context.environ):
                return template
        ours, theirs = Pipe()
        template = ForkServer(
            Channel(ours, STALL_SECONDS), f"the template of {module.module}", context
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

    def _drop_nursery(self, nursery: Nursery) -> None:
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
    return {**native_variables(environ), **_first_use(environ)}


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
        message = dataclasses.replace(start, rank=member.rank)
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
