"""A rank that kills itself while its peers wait for it, and the test after that."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from benchmarks.probes.base import Probe


class Crash(Probe):
    def test_crash(self) -> None:
        self.note_moment("begin")
        with self.group():
            # Every rank has begun, and is connected with every other.
            dist.all_reduce(torch.ones(1))
            if self.rank == 1:
                self.note_moment("crash")
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))

    def test_next(self) -> None:
        self.note_moment("begin")
