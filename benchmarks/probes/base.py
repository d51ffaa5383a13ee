"""What every probe is: a class of 4 gloo ranks on the arm's base, and notes from its workers."""

# mypy: allow-subclassing-any

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from benchmarks import arms

#: Names the file that workers write their notes to.
NOTES = "BENCH_NOTES"

#: On torch's own class workers start with the class, and one group stands for all its tests.
CLASS_STYLE = arms.current() == arms.TORCH

Base: Any = MultiProcContinuousTest if CLASS_STYLE else arms.on_arm(MultiProcessTestCase)


class Probe(Base):
    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def setUp(self) -> None:
        super().setUp()
        if not CLASS_STYLE:
            self._spawn_processes()

    @contextmanager
    def group(self) -> Iterator[None]:
        """A process group: the test's own, or the one that the class keeps."""
        if CLASS_STYLE:
            yield
            return
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        yield
        dist.destroy_process_group()

    def note(self, event: str, value: float) -> None:
        """Write down what this worker alone knows; one write, so that ranks do not mix."""
        line = json.dumps({"event": event, "rank": self.rank, "value": value}) + "\n"
        descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def note_moment(self, event: str) -> None:
        """Note that something happens now. The monotonic clock is the whole system's on Linux."""
        self.note(event, time.monotonic())
