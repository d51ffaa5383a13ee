"""The fork server: a warm process that imports torch and then only forks.

The same loop serves as *nursery* (started by exec, with torch imported) and as *template* (forked
from the nursery, with one test module imported as well). It knows of operating-system processes
only; which test runs where is the parent's business.

It never starts a thread, and every child leaves through ``main`` on a clean stack, so that a
worker can end as an interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import math
import os
import select
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from torchcontinuous import _context, _devices, _single, _torch_api, _worker
from torchcontinuous._channel import Channel
from torchcontinuous._messages import (
    Exited,
    Forked,
    ForkFailed,
    ForkServerReady,
    ForkTemplate,
    ForkWorker,
    Kill,
)
from torchcontinuous.errors import ChannelError

_PR_SET_CHILD_SUBREAPER = 36

#: Longest that killed children are waited for once the parent has gone.
END_SECONDS = 1.5

#: What a child does in place of going on with the server's loop. A template returns the channel
#: that it serves from then on, a worker its exit code and whether to end in full.
Job = Callable[[], "Channel | tuple[int, bool]"]

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

#: True in nurseries, templates and workers: nothing of ours is started there.
active = False


def main(control: int, excluded: tuple[str, ...], preload: tuple[str, ...]) -> NoReturn:
    """Be a nursery. ``excluded``: preloads left out since they broke the attempt before."""
    global active
    active = True
    # Only for as long as this process cannot watch its connection.
    _worker.die_with_parent(signal.SIGKILL)
    if _hung_up(control):
        os._exit(1)  # The parent ended before that was asked for: while Python started, say.
    channel = Channel(Connection(control))
    os.environ.update(_context.WORKER_ENVIRONMENT | _context.FORK_SERVER_ENVIRONMENT)
    notes = [f"preload {name} left out: it made forking unsafe" for name in excluded]
    # torch goes through all variables for this or that; what it sees only so does not count.
    with _context.noted_reads(going_through_counts=False) as reads:
        importlib.import_module(_torch_api.STOCK_MODULE)
        threads = _threads_that_stay()
        for name in preload:
            if name in excluded:
                continue
            try:
                importlib.import_module(name)
            except BaseException as error:
                notes.append(f"preload {name} left out: {type(error).__name__}: {error}")
            if _unsafe_to_fork(threads):
                _restart_without(control, (*excluded, name), preload)
    _own_exit_callbacks()
    if _libc is not None and hasattr(_libc, "on_exit"):
        # Exit handlers run last registered first: what is registered from here on runs in each
        # worker, then the process ends. torch's own (0.1 s for each worker) are for the kernel.
        _libc.on_exit(ctypes.cast(_libc._exit, ctypes.c_void_p), None)
    channel.send(ForkServerReady(reads, notes=tuple(notes)))
    _worker.die_with_parent(0)
    _serve_and_leave(channel)


def _hung_up(descriptor: int) -> bool:
    """Whether the other end of a connection is closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    return bool(poll.poll(0))


def _restart_without(control: int, excluded: tuple[str, ...], preload: tuple[str, ...]) -> None:
    os.set_inheritable(control, True)
    code = command_line(control, excluded, preload)
    os.execv(sys.executable, code)


def command_line(
    control: int, excluded: tuple[str, ...], preload: tuple[str, ...], path: list[str] | None = None
) -> list[str]:
    """The command that starts a nursery, with this interpreter's options and ``sys.path``."""
    from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]

    code = (
        f"import sys; sys.path[:] = {path or sys.path!r}; "
        f"from torchcontinuous._nursery import main; main({control}, {excluded!r}, {preload!r})"
    )
    return [sys.executable, *_args_from_interpreter_flags(), "-c", code]


def _serve_and_leave(channel: Channel) -> NoReturn:
    """Serve until the parent goes; whatever process comes back here has its job done and ends."""
    exit_code, full = 0, False
    job = _ForkServer(channel).serve()
    while job is not None:
        result = job()
        # A template, once it has imported its module, serves in turn; a worker has ended.
        job = _ForkServer(result).serve() if isinstance(result, Channel) else None
        if not isinstance(result, Channel):
            exit_code, full = result
    if full:
        sys.exit(exit_code)
    _exit_quickly(exit_code)


def _exit_quickly(exit_code: int) -> NoReturn:
    """End as an interpreter ends, less the taking apart of every module (0.2 s for torch's)."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if _libc is not None:
        _libc.fflush(None)
        # Destructors of native code may touch Python objects (DTensor's caches do): PyDLL, unlike
        # CDLL, keeps the interpreter's lock.
        ctypes.PyDLL(None).exit(exit_code)
    os._exit(exit_code)


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_that_stay() -> int:
    """The number of threads, less those that end at a fork (OpenBLAS ends its own)."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _thread_count()


def _unsafe_to_fork(threads: int) -> str | None:
    """Why a child of this process could hang or crash, or None.

    A parallel operator or a backward pass starts threads that a child would wait for; so does an
    armed ``faulthandler.dump_traceback_later``.
    """
    if _thread_count() > threads:
        return "it started threads (a large operator, a backward pass, or threads of its own)"
    pid = os.fork()
    if pid == 0:
        os._exit(1 if _devices.in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        return "it initialised or queried an accelerator"
    return None


def _own_exit_callbacks() -> None:
    """Keep ``weakref.finalize`` callbacks of this process from running in every child's exit.

    torch registers some 170, to deregister operators: 25 ms for each worker, and for nothing.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


@contextlib.contextmanager
def _noted_exit_callbacks() -> Iterator[set[str]]:
    """Collect what other code than torch's registers meanwhile to be run at exit.

    A temporary folder made by a module on import, say, would be shared by all ranks and removed by
    the first that ends.
    """
    found: set[str] = set()
    original = atexit.register
    finalizers = getattr(weakref.finalize, "_registry", {})
    before = set(finalizers)

    def register(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        _note_callback(found, function)
        return original(function, *arguments, **keywords)

    atexit.register = register  # type: ignore[assignment]
    try:
        yield found
    finally:
        atexit.register = original
        for finalizer in set(finalizers) - before:
            if finalizer.atexit:
                _note_callback(found, finalizers[finalizer].func)


def _note_callback(found: set[str], function: Any) -> None:
    module = getattr(function, "__module__", None) or "?"
    if module.partition(".")[0] not in ("torch", "weakref", "concurrent", "logging"):
        found.add(f"{module}.{getattr(function, '__qualname__', function)}")


class _ForkServer:
    """Forks on request, says who ended and how, and kills what must not outlive it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._workers: dict[int, int] = {}  # pid: pidfd
        self._templates: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        # What a worker's children leave running becomes a child of this process.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> Job | None:
        """Answer the parent until it goes (None), or, in a child, return the child's job."""
        gc.collect()
        gc.freeze()
        while True:
            events = dict(self._poll.poll())
            self._reap()
            if self._channel.fileno() not in events:
                continue
            try:
                job = self._answer(self._channel.receive(math.inf))
            except (EOFError, ChannelError):
                self._end()
                return None
            if job is not None:
                return job

    def _answer(self, request: object) -> Job | None:
        if isinstance(request, ForkWorker):
            descriptors = self._channel.receive_descriptors(4)
            return self._fork(
                functools.partial(_be_worker, request, descriptors), descriptors, self._workers
            )
        if isinstance(request, ForkTemplate):
            control = self._channel.receive_descriptors(1)
            return self._fork(
                functools.partial(_be_template, request, control[0]), control, self._templates
            )
        if isinstance(request, Kill) and request.pid in self._workers:
            self._kill(request.pid)
        return None

    def _fork(self, job: Job, descriptors: list[int], children: dict[int, int]) -> Job | None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        own = os.getpid()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of the threads that numpy's BLAS keeps (it knows of forks).
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._channel.send(ForkFailed(str(error)))
            return None
        if pid == 0:
            self._forget()
            _worker.die_with_parent(signal.SIGKILL)
            if os.getppid() != own:
                os._exit(1)
            return job
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        children[pid] = pidfd
        self._poll.register(pidfd, select.POLLIN)
        self._channel.send(Forked(pid))
        self._channel.send_descriptors([pidfd])
        return None

    def _forget(self) -> None:
        """In a child: close what belongs to the server."""
        self._channel.close()
        for pidfd in (*self._workers.values(), *self._templates.values()):
            os.close(pidfd)

    def _reap(self) -> None:
        """Report children that ended, and kill what workers leave behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            _, status = os.waitpid(pid, 0)
            children = self._workers if pid in self._workers else self._templates
            pidfd = children.pop(pid, None)
            if pidfd is None:
                continue  # An adopted one.
            self._poll.unregister(pidfd)
            os.close(pidfd)
            if children is self._workers:
                if not self._workers:
                    self._kill_adopted()
                with contextlib.suppress(ChannelError):
                    self._channel.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    @staticmethod
    def _kill(pid: int) -> None:
        """Kill a child, whose number is its own until it is waited for, and its descendants."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # Stopped first, so that it starts nothing meanwhile.
            process.suspend()
            for descendant in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _kill_adopted(self) -> None:
        """Kill processes that workers left behind. Only once no worker lives whose they may be."""
        ours = {*self._workers, *self._templates}
        for child in psutil.Process().children():
            if child.pid not in ours:
                with contextlib.suppress(psutil.Error):
                    for process in (*child.children(recursive=True), child):
                        process.kill()

    def _end(self) -> None:
        """The parent has gone: leave nothing behind."""
        with contextlib.suppress(OSError):
            self._poll.unregister(self._channel.fileno())
        for pid in self._workers:
            self._kill(pid)
        # Templates have seen the parent go as well, and end by themselves.
        deadline = time.monotonic() + END_SECONDS
        while (self._workers or self._templates) and time.monotonic() < deadline:
            self._poll.poll(50)
            self._reap()
        for pid in (*self._workers, *self._templates):
            self._kill(pid)
        self._kill_adopted()


def _be_worker(request: ForkWorker, descriptors: list[int]) -> tuple[int, bool]:
    """In a forked child: run tests until told to end."""
    commands, stdout, stderr, dump = descriptors
    _worker.prepare_descriptors(stdout, stderr, dump)
    # The way in that multiprocessing's own children take (coverage tools hook it).
    end = _worker.WorkerEnd()
    channel = Channel(Connection(commands))
    process: Any = get_context("spawn").Process(
        target=_worker.serve, name=f"process {request.rank}", args=(channel, end)
    )
    process._identity = (request.rank + 1,)
    process._parent_pid = request.parent_pid
    process._parent_name = "MainProcess"
    exit_code = process._bootstrap(parent_sentinel=_sentinel(request.parent_pid))
    return exit_code, end.full


def _sentinel(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)  # Gone: a descriptor that is always ready.


def _be_template(request: ForkTemplate, control: int) -> Channel:
    """In a forked child: import a test module, and say whether to fork from here is safe."""
    channel = Channel(Connection(control))
    unsafe = None
    _context.apply_context(request.context)
    os.environ.update(_context.FORK_SERVER_ENVIRONMENT)
    with _context.noted_reads() as reads, _noted_exit_callbacks() as callbacks:
        threads = _thread_count()
        try:
            _context.apply_preparation(request.preparation, "process 0")
            _single.load_module(request.module)
        except BaseException as error:
            unsafe = f"its import raised {type(error).__name__}: {error}"
    unsafe = unsafe or _unsafe_to_fork(threads)
    if callbacks:
        unsafe = unsafe or f"its import registered {', '.join(sorted(callbacks))} for the exit"
    _own_exit_callbacks()
    channel.send(ForkServerReady(reads, unsafe))
    return channel
