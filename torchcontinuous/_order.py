"""The orders in which a suite's tests can be run, the same each time."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

FORWARDS, REVERSED, SHUFFLE = "forwards", "reversed", "shuffle"

ORDERS = "'forwards', 'reversed' or 'shuffle:SEED'"

_OTHER_NAMES = {"forward": FORWARDS, "reverse": REVERSED}


def ordered(items: Sequence[T], order: str) -> list[T]:
    """``items`` in an order that was asked for.

    Raises:
        ValueError: there is no such order.
    """
    found = list(items)
    kind, _, seed = order.partition(":")
    if kind == SHUFFLE and seed:
        random.Random(seed).shuffle(found)
    elif order == REVERSED:
        found.reverse()
    elif order != FORWARDS:
        raise ValueError(f"{order!r} is no order: give {ORDERS}")
    return found


def ordered_by_class(tests: Iterable[T], order: str, class_of: Callable[[T], Hashable]) -> list[T]:
    """Tests in an order that was asked for. Classes stay together, as unittest keeps them: what is
    ordered is the tests of each class and, in a shuffle, the classes too."""
    classes: dict[Hashable, list[T]] = {}
    for test in tests:
        classes.setdefault(class_of(test), []).append(test)
    groups = list(classes.values())
    if order.startswith(SHUFFLE):
        groups = ordered(groups, order)
    return [test for group in groups for test in ordered(group, order)]


def checked_order(text: str) -> str:
    """An order's name, as argparse's ``type``. It may also be written ``forward``, ``reverse``,
    ``shuffle=SEED``, and ``shuffle`` for a seed that is made up.

    Raises:
        argparse.ArgumentTypeError: there is no such order.
    """
    name = _OTHER_NAMES.get(text, text)
    if name == SHUFFLE:
        name = f"{SHUFFLE}:{random.randrange(1 << 16)}"
    name = name.replace(f"{SHUFFLE}=", f"{SHUFFLE}:", 1)
    try:
        ordered((), name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name
