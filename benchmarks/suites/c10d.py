"""Collectives, process groups and stores on c10d."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.base import GroupTest


class CollectivesTest(GroupTest):
    def test_collectives(self) -> None:
        with self.group():
            mine = torch.full((8,), float(self.rank))
            total = mine.clone()
            dist.all_reduce(total)
            self.assertEqual(total, torch.full((8,), float(sum(range(self.world_size)))))

            received = mine.clone()
            dist.broadcast(received, src=self.world_size - 1)
            self.assertEqual(received, torch.full((8,), self.world_size - 1.0))

            gathered = [torch.empty(8) for _ in range(self.world_size)]
            dist.all_gather(gathered, mine)
            self.assertEqual(torch.stack(gathered)[:, 0], torch.arange(float(self.world_size)))

    def test_new_groups(self) -> None:
        with self.group():
            last = self.world_size - 1
            for ranks in ([0, 1], [last - 1, last], [0, last]):
                group = dist.new_group(ranks)
                if self.rank not in ranks:
                    continue
                value = torch.tensor(float(self.rank))
                dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
                self.assertEqual(value.item(), float(max(ranks)))
                self.assertEqual(dist.get_group_rank(group, self.rank), ranks.index(self.rank))
            dist.barrier()

    def test_objects_and_points(self) -> None:
        with self.group():
            everyone: list[Any] = [None] * self.world_size
            dist.all_gather_object(everyone, {"rank": self.rank})
            self.assertEqual([entry["rank"] for entry in everyone], [*range(self.world_size)])

            following = (self.rank + 1) % self.world_size
            preceding = (self.rank - 1) % self.world_size
            request = dist.isend(torch.tensor([self.rank]), following)
            received = torch.tensor([-1])
            dist.recv(received, preceding)
            request.wait()
            self.assertEqual(received.item(), preceding)
