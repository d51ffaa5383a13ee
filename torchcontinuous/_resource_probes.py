"""Probes of what a test may leave running or held: only new workers are rid of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

from torchcontinuous import _devices, _torch_state
from torchcontinuous._probes import Probe, leak
from torchcontinuous._report import Leak

try:
    import resource
except ImportError:  # Windows.
    resource = None  # type: ignore[assignment]

#: Seconds that threads and children have to end, which they may be doing already.
ENDING_GRACE = 0.05

#: Open descriptors more than at first; sockets and logs that libraries keep are fewer. Ranks keep
#: connections to each other and to their store, for each group that outlives a test.
DESCRIPTOR_GROWTH = 64
DESCRIPTOR_GROWTH_PER_RANK = 4

#: Native threads more than at first. Pools of torch, OpenMP and OpenBLAS have one for each CPU;
#: gloo, autograd and watchdogs have a few more.
NATIVE_THREAD_GROWTH = 64 + 4 * (os.cpu_count() or 1)

#: Bytes of resident memory more than at first; below it are caches and allocators that keep pages.
HOST_MEMORY_GROWTH = 1 << 30

#: Bytes allocated on the current device more than at first.
DEVICE_MEMORY_GROWTH = 256 << 20


class Threads(Probe):
    """Python threads. A thread of C++ that ran Python is none of the test's."""

    def __init__(self) -> None:
        self._known = set(threading.enumerate())

    def changed(self) -> bool:
        return not self._known.issuperset(threading.enumerate())

    def restore(self) -> Iterator[Leak]:
        known = self._known
        known &= set(threading.enumerate())  # Those that ended are not to be kept alive.
        new = [t for t in threading.enumerate() if t not in known]
        # As long as the process lives, and no matter to a test.
        lasting = _torch_state.compile_threads()
        known |= {t for t in new if t in lasting or isinstance(t, threading._DummyThread)}
        deadline = time.monotonic() + ENDING_GRACE
        for thread in new:
            if thread not in known:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    yield leak(f"thread {thread.name!r}", "not there", "running", False)


class Children(Probe):
    """Child processes, besides helpers of torch's and of multiprocessing's that last."""

    def __init__(self) -> None:
        self._known = set(_children())

    def changed(self) -> bool:
        try:
            # Raises where there is no child at all, which is the common case.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def restore(self) -> Iterator[Leak]:
        lasting = self._known | _lasting_children()
        deadline = time.monotonic() + ENDING_GRACE
        while True:
            new = [pid for pid in _children() if pid not in lasting and not _symbolizes(pid)]
            running = [pid for pid in new if not _reap(pid)]
            if not running or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        for pid in running:
            yield leak(f"child process {pid}", "not there", f"running {_command(pid)}", False)


def _reap(pid: int) -> bool:
    """Whether a child has ended. Nobody waits for it any more: the test is over."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


#: Where Linux lists the children that a thread started, if it was built to.
_CHILDREN = "/proc/self/task/{}/children"


def _children() -> list[int]:
    """This process's children, from each of its threads."""
    found: list[int] = []
    if not os.path.exists(_CHILDREN.format(os.getpid())):
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_child(pid)]
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(_CHILDREN.format(thread)) as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            continue  # It has ended, and its children are another's.
    return found


def _is_child(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name, in parentheses, may hold anything; then come the state and the parent.
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


def _lasting_children() -> set[int]:
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    return {getattr(tracker, "_pid", None) or 0, *_torch_state.compile_worker_pids()}


def _symbolizes(pid: int) -> bool:
    """Whether a child is torch's symbolizer: C++ keeps one open for each library in a trace."""
    program = _command(pid).partition(" ")[0]
    return os.path.basename(program) == "addr2line"


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Growth(Probe):
    """A quantity that may grow by so much and no more; only what it is at the end counts."""

    def __init__(self, what: str, read: Callable[[], int], limit: int) -> None:
        self._what = what
        self._read = read
        self._first = read()
        self._most = self._first + limit

    def changed(self) -> bool:
        return self._read() > self._most

    def restore(self) -> Iterator[Leak]:
        now = self._read()
        if now > self._most:
            yield leak(self._what, self._first, now, False)


def descriptors(world_size: int) -> Probe | None:
    """How many descriptors are open."""
    if not os.path.isdir("/proc/self/fd"):
        return None

    def count() -> int:
        # Since Linux 6.2 the folder's size is the number.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))

    limit = DESCRIPTOR_GROWTH + DESCRIPTOR_GROWTH_PER_RANK * world_size
    return Growth("open descriptors", count, limit)


def native_threads() -> Probe | None:
    """How many threads there are, those of C++ included."""
    if not os.path.isdir("/proc/self/task"):
        return None
    # A folder has a link for each folder in it, and two more.
    return Growth(
        "native threads", lambda: os.stat("/proc/self/task").st_nlink - 2, NATIVE_THREAD_GROWTH
    )


class _HostMemory(Growth):
    """Resident memory, looked at once its peak, which is cheaper to ask for, is past the limit."""

    def __init__(self) -> None:
        super().__init__("resident memory (bytes)", _resident, HOST_MEMORY_GROWTH)
        self._most_at_peak = self._most >> 10

    def changed(self) -> bool:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak > self._most_at_peak and super().changed()


def _resident() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def host_memory() -> Probe | None:
    """How much memory is resident."""
    if resource is None or not os.path.exists("/proc/self/statm"):
        return None
    return _HostMemory()


def device_memory() -> Probe:
    """How much of the current device's memory is allocated; nothing before it is initialised."""
    return Growth(
        "allocated memory of the device (bytes)",
        _devices.allocated_memory,
        DEVICE_MEMORY_GROWTH,
    )


def threads() -> Probe:
    """Python threads."""
    return Threads()


def children() -> Probe | None:
    """Child processes."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/task"):
        return None
    return Children()
