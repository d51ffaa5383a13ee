"""What reuse has to do right with an accelerator: for ``python -m benchmarks.accelerator``."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import arms
from benchmarks.probes.base import Probe

KIND = str(torch.accelerator.current_accelerator() or "cpu")

#: The part of the free memory that a test takes and leaves.
HELD = 0.1


def device_module() -> Any:
    return torch.get_device_module(KIND)


class AcceleratorTest(Probe):
    backend = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device(KIND, self.rank % torch.accelerator.device_count())

    def start(self) -> None:
        torch.accelerator.set_device_index(self.device.index)
        dist.init_process_group(
            self.backend,
            rank=self.rank,
            world_size=self.world_size,
            store=dist.FileStore(self.file_name, self.world_size),
            timeout=timedelta(seconds=60),
        )

    def reduce(self, size: int) -> None:
        self.start()
        value = torch.full((size,), float(self.rank + 1), device=self.device)
        dist.all_reduce(value)
        expected = self.world_size * (self.world_size + 1) / 2
        self.assertEqual(value.cpu(), torch.full((size,), expected))
        dist.barrier()
        dist.destroy_process_group()

    def test_1(self) -> None:
        self.reduce(1)

    def test_2(self) -> None:
        self.reduce(1000)

    def test_3(self) -> None:
        self.reduce(1_000_000)

    def test_4_backward(self) -> None:
        self.start()
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(64, 64, device=self.device)
        )
        model(torch.ones(8, 64, device=self.device)).sum().backward()
        dist.destroy_process_group()


class OneRankTest(AcceleratorTest):
    """On the device's own backend: NCCL, on CUDA."""

    world_size = 1
    backend = dist.get_default_backend_for_device(KIND)


class SharedDeviceTest(AcceleratorTest):
    """Two ranks with gloo, on one device if there is but one."""

    world_size = 2


class HoldingTest(Probe):
    """Takes memory and never gives it back: the end of the class has to."""

    world_size = 1
    held: torch.Tensor | None = None

    def test_1_holds(self) -> None:
        free, _ = device_module().mem_get_info()
        self.note("free before", float(free))
        type(self).held = torch.empty(int(HELD * free), dtype=torch.uint8, device=KIND)


class LaterTest(Probe):
    """Of the class after that one."""

    world_size = 1

    def test_1_free(self) -> None:
        free, _ = device_module().mem_get_info()
        self.note("free after", float(free))


class NurseryTest(Probe):
    """The processes that workers are forked from have not opened a device."""

    world_size = 1

    def test_1_untouched(self) -> None:
        torch.ones(1, device=KIND)
        if arms.current() == arms.STOCK:
            return
        template = os.getppid()
        with open(f"/proc/{template}/stat") as status:
            nursery = int(status.read().rpartition(")")[2].split()[1])
        for pid in (template, nursery):
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
            opened = [link for link in links if link.startswith(("/dev/nvidia", "/dev/kfd"))]
            self.assertEqual(opened, [])
            self.note("untouched", float(pid))
