"""Collectives, process groups and stores on c10d."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

from benchmarks.arms import on_arm

Base: Any = on_arm(MultiProcessTestCase)


class CollectivesTest(Base):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)

    def test_collectives(self) -> None:
        self.init()
        mine = torch.full((8,), float(self.rank))
        total = mine.clone()
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((8,), 6.0))

        received = mine.clone()
        dist.broadcast(received, src=2)
        self.assertEqual(received, torch.full((8,), 2.0))

        gathered = [torch.empty(8) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine)
        self.assertEqual(torch.stack(gathered)[:, 0], torch.arange(4.0))
        dist.destroy_process_group()

    def test_new_groups(self) -> None:
        self.init()
        for ranks in ([0, 1], [2, 3], [0, 2]):
            group = dist.new_group(ranks)
            if self.rank not in ranks:
                continue
            value = torch.tensor(float(self.rank))
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
            self.assertEqual(value.item(), float(max(ranks)))
            self.assertEqual(dist.get_group_rank(group, self.rank), ranks.index(self.rank))
        dist.barrier()
        dist.destroy_process_group()

    def test_objects_and_points(self) -> None:
        self.init()
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, {"rank": self.rank})
        self.assertEqual([entry["rank"] for entry in everyone], [0, 1, 2, 3])

        following, preceding = (self.rank + 1) % 4, (self.rank - 1) % 4
        request = dist.isend(torch.tensor([self.rank]), following)
        received = torch.tensor([-1])
        dist.recv(received, preceding)
        request.wait()
        self.assertEqual(received.item(), preceding)
        dist.destroy_process_group()
