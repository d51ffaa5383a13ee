"""A file of one test: what a whole run costs at the least."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.probes.base import Probe


class OneTest(Probe):
    def test_all_reduce(self) -> None:
        with self.group():
            value = torch.ones(1)
            dist.all_reduce(value)
            self.assertEqual(value.item(), 4.0)
