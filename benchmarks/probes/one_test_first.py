"""The file of one test, torchcontinuous imported before torch: the nursery starts beside it."""

# mypy: allow-subclassing-any

from __future__ import annotations

from torchcontinuous import MultiProcContinuousTest  # isort: split

import torch
import torch.distributed as dist


class OneTestFirst(MultiProcContinuousTest):
    world_size = 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def test_all_reduce(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        value = torch.ones(1)
        dist.all_reduce(value)
        self.assertEqual(value.item(), 4.0)
        dist.destroy_process_group()
