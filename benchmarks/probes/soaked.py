"""Classes of many tests that end in every way, made from a seed: what a soak runs.

``BENCH_SOAK`` holds seed, number of tests and number of classes. A test's name ends with its kind.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

from benchmarks.probes.names import SOAK
from torchcontinuous import ContinuousMixin

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


class _Soaked(ContinuousMixin, MultiProcessTestCase):  # type: ignore[misc]
    size = 2

    @property
    def world_size(self) -> int:
        return self.size

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)


def _noop(test: Any) -> None:
    # What an earlier test left would show here.
    test.assertNotIn("SOAK_LEAK", os.environ)
    test.assertFalse(dist.is_initialized())
    test.assertEqual(torch.get_default_dtype(), torch.float32)


def _group(test: Any) -> None:
    test.init()
    value = torch.tensor([float(test.rank)])
    dist.all_reduce(value)
    test.assertEqual(value.item(), float(sum(range(test.world_size))))


def _sub_group(test: Any) -> None:
    test.init()
    group = dist.new_group([0, 1])
    if test.rank < 2:
        dist.barrier(group)


def _leak(test: Any) -> None:
    os.environ["SOAK_LEAK"] = "1"
    torch.set_default_dtype(torch.float64)


def _write(test: Any) -> None:
    print("x" * 100_000)


def _send(test: Any) -> None:
    """Leave a message that nobody receives."""
    test.init()
    if test.rank == 0:
        dist.isend(torch.ones(1), 1)


def _skip(test: Any) -> None:
    raise unittest.SkipTest("on purpose")


def _fail(test: Any) -> None:
    test.assertEqual(test.rank, 0)


def _fail_in_group(test: Any) -> None:
    test.init()
    if test.rank == 0:
        raise ValueError("on purpose")
    dist.barrier()


def _end(test: Any) -> None:
    if test.rank == 0:
        os._exit(3)


def _kill(test: Any) -> None:
    if test.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_in_group(test: Any) -> None:
    test.init()
    if test.rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _hang(test: Any) -> None:
    if test.rank == 0:
        time.sleep(1000)


def _stop(test: Any) -> None:
    if test.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def _leave_process(test: Any) -> None:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])


#: By kind: what it does, how it ends, and how often it comes, relative to the others.
KINDS: dict[str, tuple[Callable[[Any], None], str, float]] = {
    "noop": (_noop, PASSED, 40),
    "group": (_group, PASSED, 30),
    "sub_group": (_sub_group, PASSED, 5),
    "leak": (_leak, PASSED, 4),
    "write": (_write, PASSED, 2),
    "send": (_send, PASSED, 2),
    "skip": (_skip, SKIPPED, 5),
    "fail": (_fail, FAILED, 3),
    "fail_in_group": (_fail_in_group, FAILED, 3),
    "end": (_end, FAILED, 2),
    "kill": (_kill, FAILED, 1.5),
    "kill_in_group": (_kill_in_group, FAILED, 1.5),
    "leave_process": (_leave_process, PASSED, 0.5),
    "hang": (_hang, FAILED, 0.25),
    "stop": (_stop, FAILED, 0.25),
}


def make(seed: int, tests: int, classes: int) -> dict[str, type]:
    """The classes, by name: the same for the same arguments, in every process."""
    chance = random.Random(seed)
    kinds, weights = list(KINDS), [weight for *_, weight in KINDS.values()]
    made: dict[str, type] = {}
    for number in range(classes):
        count = tests * (number + 1) // classes - tests * number // classes
        members: dict[str, Any] = {
            "__module__": __name__,
            "size": chance.choice([2, 2, 3, 4]),
        }
        for place, kind in enumerate(chance.choices(kinds, weights, k=count)):
            body = KINDS[kind][0]
            members[f"test_{place:04}_{kind}"] = lambda self, body=body: body(self)
        name = f"Soak{number:03}"
        members["__qualname__"] = name
        made[name] = type(name, (_Soaked,), members)
    return made


if SOAK in os.environ:
    globals().update(make(*map(int, os.environ[SOAK].split(","))))
