"""``python -m unittest -v`` with a suite's tests in another order, the same one each time.

Classes stay together, as unittest keeps them: what is ordered is the tests of each class, and, in
a shuffle, the classes too.
"""

from __future__ import annotations

import argparse
import random
import unittest
from collections.abc import Iterator, Sequence

FORWARDS = "forwards"
REVERSED = "reversed"
SHUFFLE = "shuffle:"


def order(text: str) -> str:
    """Check what ``--order`` was given."""
    if text in (FORWARDS, REVERSED) or (
        text.startswith(SHUFFLE) and text.removeprefix(SHUFFLE).isdecimal()
    ):
        return text
    raise argparse.ArgumentTypeError(f"give {FORWARDS}, {REVERSED} or {SHUFFLE}SEED, not {text!r}")


class OrderedLoader(unittest.TestLoader):
    """Loads as unittest does, and puts the tests in order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self._order = order

    def loadTestsFromNames(self, names: Sequence[str], module: object = None) -> unittest.TestSuite:
        classes: dict[type, list[unittest.TestCase]] = {}
        for test in _flat(super().loadTestsFromNames(names, module)):  # type: ignore[arg-type]
            classes.setdefault(type(test), []).append(test)
        groups = list(classes.values())
        if self._order == REVERSED:
            groups = [tests[::-1] for tests in groups]
        elif self._order != FORWARDS:
            generator = random.Random(int(self._order.removeprefix(SHUFFLE)))
            for tests in (groups, *groups):
                generator.shuffle(tests)  # type: ignore[arg-type]
        return unittest.TestSuite(test for tests in groups for test in tests)


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ordered", description=__doc__)
    parser.add_argument("--order", type=order, default=FORWARDS, help="default: %(default)s")
    parser.add_argument("names", nargs="+", help="what to run, as for unittest")
    parsed = parser.parse_args()
    unittest.main(
        module=None,
        argv=[parser.prog, "-v", *parsed.names],
        testLoader=OrderedLoader(parsed.order),
    )


if __name__ == "__main__":
    main()
