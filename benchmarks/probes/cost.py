"""Tests that do nothing, or the least that a distributed test does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.probes.base import Probe


def private_dirty() -> int:
    """The bytes that this process alone holds and has written to."""
    with open("/proc/self/smaps_rollup") as rollup:
        lines = [line.split() for line in rollup]
    return sum(int(fields[1]) * 1024 for fields in lines if fields[0] == "Private_Dirty:")


class Cost(Probe):
    def test_noop(self) -> None:
        pass

    def test_group(self) -> None:
        with self.group():
            value = torch.ones(1)
            dist.all_reduce(value)
            self.assertEqual(value.item(), 4.0)

    def test_memory(self) -> None:
        self.note("memory", private_dirty())
