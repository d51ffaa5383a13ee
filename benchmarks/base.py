"""The bases of suites and probes: 4 gloo ranks unless told, stock style, on the arm's own class."""

# mypy: allow-subclassing-any

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from benchmarks import arms

#: On torch's own class workers start with the class, and one group stands for all its tests.
CLASS_STYLE = arms.current() == arms.TORCH

_Base: Any = MultiProcContinuousTest if CLASS_STYLE else arms.on_arm(MultiProcessTestCase)


class GroupTest(_Base):
    """A class whose tests make a process group of their own, where none stands already."""

    world_size = arms.world_size()

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    def setUp(self) -> None:
        super().setUp()
        if not CLASS_STYLE:
            self._spawn_processes()

    @contextmanager
    def group(self) -> Iterator[None]:
        """The default process group, for as long as the test needs it."""
        if CLASS_STYLE:
            yield
            return
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        # For as long as the test: torch may hang where a DDP model is the last to let go of it.
        self.process_group = dist.group.WORLD
        yield
        dist.destroy_process_group()

    @contextmanager
    def shared_folder(self) -> Iterator[str]:
        """A folder that all ranks see, gone afterwards; to be used within the group."""
        made = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(made)
        try:
            yield made[0]
            dist.barrier()
        finally:
            shutil.rmtree(made[0], ignore_errors=True)
