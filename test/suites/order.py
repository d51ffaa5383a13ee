"""A plugin of pytest (``-p test.suites.order``): the order in which a suite's tests run."""

from __future__ import annotations

import os
from typing import Any

#: Holds what ``torchcontinuous._order.ordered`` takes, which the bisect command takes as well.
VARIABLE = "TC_TEST_ORDER"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Order the tests within each class, and shuffle the classes where tests are shuffled."""
    # Not on top: that would import the package, and torch, before the suite does.
    from torchcontinuous._order import ordered

    order = os.environ.get(VARIABLE, "forwards")
    classes: dict[Any, list[Any]] = {}
    for item in items:
        classes.setdefault(item.cls, []).append(item)
    names = list(classes)
    if order.startswith("shuffle"):
        names = ordered(names, order)
    items[:] = [item for name in names for item in ordered(classes[name], order)]
