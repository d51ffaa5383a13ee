"""The crash matrix: a rank ends in each of these manners, at each of these moments.

Each case is a test, and is followed by one that must not notice. On stock (``CRASH_BASE=stock``)
the same file says what the outcomes have to be.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

if os.environ.get("CRASH_BASE") == "stock":
    from torch.testing._internal.common_distributed import MultiProcessTestCase as Base
else:
    from torchcontinuous import MultiProcContinuousTest as Base

WORLD_SIZE = 2
RANKS = {"first": (0,), "last": (WORLD_SIZE - 1,), "all": tuple(range(WORLD_SIZE))}

#: Seconds after its test at which a strike "between tests" falls: a stock worker has ended then.
LATER = 1.0


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.function = lambda: b

    def __reduce__(self):
        raise TypeError("never")


class Base2(BaseException):
    pass


def raise_exception():
    raise ValueError("struck")


def raise_unpicklable():
    raise Unpicklable(1, 2)


def raise_base_exception():
    raise Base2("struck")


def recurse():
    recurse()


def loop():
    while True:
        pass


def block():
    """Block in C++, for ever."""
    if dist.is_initialized():
        dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % WORLD_SIZE)
    else:
        dist.HashStore().wait(["never"], timedelta(hours=1))


def kill(number):
    os.kill(os.getpid(), number)
    time.sleep(5)


MANNERS = {
    "exception": raise_exception,
    "unpicklable": raise_unpicklable,
    "sys_exit_3": lambda: sys.exit(3),
    "os_exit_0": lambda: os._exit(0),
    "sigkill": lambda: kill(signal.SIGKILL),
    "sigsegv": lambda: kill(signal.SIGSEGV),
    "sigabrt": lambda: kill(signal.SIGABRT),
    "loop": loop,
    "block": block,
    "base_exception": raise_base_exception,
    "recursion": recurse,
    "close_fds": lambda: os.closerange(0, 4096),
}


def in_worker():
    return multiprocessing.parent_process() is not None


class Matrix(Base):
    """One moment's cases. ``test_MANNER_RANKS_1`` strikes; the next one must pass."""

    moment = ""
    world_size = WORLD_SIZE

    def __init__(self, method_name="runTest", methodName="runTest"):
        super().__init__(method_name, methodName)
        if in_worker():
            self.strike("starting", int(multiprocessing.current_process().name.split()[-1]))

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def strike(self, moment, rank):
        if self.moment == moment and self._testMethodName.endswith("_1"):
            manner, ranks = self._testMethodName[5:-2].rsplit("_", 1)
            if rank in RANKS[ranks]:
                MANNERS[manner]()

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        cls(test_name).strike("before", rank)
        super()._run(rank, test_name, file_name, pipe, **kwargs)
        cls(test_name).strike("after", rank)

    def body(self):
        store = dist.FileStore(self.file_name, WORLD_SIZE)
        dist.init_process_group("gloo", rank=self.rank, world_size=WORLD_SIZE, store=store)
        # A rank that ends before a peer has connected to it fails that peer's init, by chance, on
        # stock as well: the moment is after every rank's.
        store.set(f"connected/{self.rank}", "")
        store.wait([f"connected/{rank}" for rank in range(WORLD_SIZE)])
        self.strike("collective", self.rank)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), WORLD_SIZE)
        if self.moment == "teardown":
            atexit.register(self.strike, "teardown", self.rank)
        if self.moment == "between" and self._testMethodName.endswith("_1"):
            threading.Thread(target=self.later, daemon=True).start()

    def later(self):
        time.sleep(LATER)
        self.strike("between", self.rank)

    def next_body(self):
        if self.moment == "between":
            time.sleep(LATER + 0.2)
        self.body()


for _manner in MANNERS:
    for _ranks in RANKS:
        setattr(Matrix, f"test_{_manner}_{_ranks}_1", lambda self: self.body())
        if os.environ.get("CRASH_BASE") != "stock":
            setattr(Matrix, f"test_{_manner}_{_ranks}_2", lambda self: self.next_body())

for _moment in ("starting", "before", "collective", "after", "between", "teardown"):
    _name = f"Test{_moment.capitalize()}"
    # At the other levels a worker's exit is not the test's.
    _level = "process" if _moment == "teardown" else "none"
    _members = {"moment": _moment, "isolation": _level, "__module__": __name__}
    globals()[_name] = type(_name, (Matrix,), _members)
del Matrix
