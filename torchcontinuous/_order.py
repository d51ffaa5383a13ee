"""Orders in which tests can be run, the same each time."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FORWARDS = "forwards"
REVERSED = "reversed"

ORDERS = "'forwards', 'reversed' or 'shuffle:SEED'"


def ordered(items: Sequence[T], order: str) -> list[T]:
    """``items`` in an order that was asked for, the same each time.

    Raises:
        ValueError: there is no such order.
    """
    found = list(items)
    kind, _, seed = order.partition(":")
    if kind == "shuffle" and seed:
        random.Random(seed).shuffle(found)
    elif order == REVERSED:
        found.reverse()
    elif order != FORWARDS:
        raise ValueError(f"{order!r} is no order: give {ORDERS}")
    return found


def checked_order(text: str) -> str:
    """An order's name, as argparse's ``type``.

    Raises:
        argparse.ArgumentTypeError: there is no such order.
    """
    try:
        ordered((), text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
