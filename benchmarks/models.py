"""The small network that suites train, alike on every rank, and the batches they train it with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


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
