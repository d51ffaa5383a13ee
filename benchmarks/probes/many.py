"""As many tests as ``BENCH_TESTS`` says: no-ops, or with ``BENCH_GROUPS`` a group and a reduction.

With ``BENCH_MEMORY``, a file, a last test writes what the ranks and whatever keeps them hold, in
bytes.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from benchmarks.base import GroupTest
from benchmarks.probes.names import GROUPS, MEMORY, PARENT, TESTS


class ManyTest(GroupTest):
    """Its tests are added below."""


def _noop(self: ManyTest) -> None:
    pass


def _reduce(self: ManyTest) -> None:
    with self.group():
        value = torch.ones(1)
        dist.all_reduce(value)
        self.assertEqual(value.item(), self.world_size)


def _memory(self: ManyTest) -> None:
    with self.group():
        dist.barrier()
        if self.rank == 0:
            Path(os.environ[MEMORY]).write_text(str(_held()))
        dist.barrier()


def _held() -> int:
    """Bytes of all processes below the parent; of a page that several share, each has its part."""
    held = 0
    for process in psutil.Process(int(os.environ[PARENT])).children(recursive=True):
        information = process.memory_full_info()
        # Linux only; elsewhere what is shared counts in none.
        held += getattr(information, "pss", information.uss)
    return held


for _number in range(int(os.environ.get(TESTS, "1"))):
    setattr(ManyTest, f"test_{_number:04}", _reduce if os.environ.get(GROUPS) == "1" else _noop)
if MEMORY in os.environ:
    ManyTest.test_memory = _memory  # type: ignore[attr-defined]
