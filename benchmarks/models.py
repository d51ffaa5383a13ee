"""The small network that suites train, alike on every rank, its batches, and how it is compared."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.base import GroupTest


def network(seed: int = 0) -> Any:
    """Three linear layers, of which the last two do not divide evenly by four."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))


def batch(seed: int = 0) -> Any:
    """Eight rows: two for each of four ranks."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def backward(model: Any, rows: Any) -> Any:
    """Gradients of a mean, so that those of a batch are the average of its equal parts'."""
    loss = model(rows).square().mean()
    loss.backward()
    return loss.detach()


def train(model: Any, batches: Iterable[Any], kind: Any = torch.optim.SGD) -> Any:
    """One step of an optimizer for each batch; gives the optimizer back."""
    optimizer = kind(model.parameters(), lr=0.05)
    for rows in batches:
        optimizer.zero_grad()
        backward(model, rows)
        optimizer.step()
    return optimizer


def whole(value: Any) -> Any:
    """A value, gathered where it is a sharded tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class TrainingTest(GroupTest):
    """A class that trains a distributed model beside the same one on one process."""

    def mine(self, rows: Any) -> Any:
        """This rank's part of a batch."""
        return rows.chunk(self.world_size)[self.rank]

    def assert_same(
        self, model: Any, reference: Any, *, gradients: bool = False, **tolerance: float
    ) -> None:
        """Parameters (or gradients) are those of the plain model."""
        for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            if gradients:
                got, wanted = got.grad, wanted.grad
            self.assertEqual(whole(got), wanted, **tolerance)

    def train_both(self, model: Any, reference: Any, kind: Any = torch.optim.SGD) -> None:
        """Each rank trains the model with its part of the batches that the plain one gets."""
        batches = [batch(seed) for seed in range(3)]
        train(reference, batches, kind)
        train(model, map(self.mine, batches), kind)
        self.assert_same(model, reference)
