"""What became of a run's tests: noted, written down, told, and compared with another run's."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchcontinuous._counts import counts

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: What stock gives as the reason of a skip in a worker (``TEST_SKIPS["generic"]``).
_NO_REASON = "Test skipped at subprocess level, look at subprocess log for skip reason"

#: Differences that are listed, at most.
_LISTED = 50


@dataclass
class Outcomes:
    """The outcome of each test by its id, with the reason of a skip, and its seconds.

    A failure and an error are alike here: stock makes an error of every exception in a worker.
    """

    found: dict[str, tuple[str, str]] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, test_id: str, outcome: str, reason: str = "") -> None:
        """Note an outcome; a failure stands, whatever comes after it."""
        if self.found.get(test_id, ("",))[0] != FAILED:
            self.found[test_id] = (outcome, reason)

    def write(self, file: str | os.PathLike[str]) -> None:
        """Write all of it as JSON."""
        Path(file).write_text(
            json.dumps(
                {
                    "seconds": self.seconds,
                    "tests": {
                        name: {"outcome": outcome, "reason": reason}
                        for name, (outcome, reason) in self.found.items()
                    },
                },
                indent=1,
            )
        )

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Outcomes:
        """What ``write`` wrote; nothing where it did not come to that."""
        try:
            data: Mapping[str, Any] = json.loads(Path(file).read_text())
        except (OSError, ValueError):
            return cls()
        found = {name: (test["outcome"], test["reason"]) for name, test in data["tests"].items()}
        return cls(found, seconds=data["seconds"])

    def slowest(self, number: int) -> Iterator[str]:
        """Lines on the tests that took longest."""
        by_time = sorted(self.durations.items(), key=lambda item: -item[1])
        for name, seconds in by_time[:number]:
            yield f"{seconds:8.3f} s  {name}"

    def describe(self, order: str | None = None) -> str:
        """One line."""
        numbers = Counter(outcome for outcome, _ in self.found.values())
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(numbers.items()))
        tests = f"{len(self.found)} test{'' if len(self.found) == 1 else 's'}"
        in_order = f", in order {order}" if order else ""
        return f"{tests} in {self.seconds:.1f} s{in_order}: {told or 'none was run'}"


def lines(outcomes: Outcomes, adopted: bool, order: str | None = None) -> list[str]:
    """The summary of a run.

    Args:
        adopted: whether any of its classes runs on reused workers.
        order: in which the tests ran, where one was asked for.
    """
    told = [outcomes.describe(order)]
    if counts.tests:
        told.append(counts.describe())
    if outcomes.found and not adopted:
        told.append(
            "no class here derives from MultiProcessTestCase or from torch's continuous class: the "
            "tests ran as they would have anyway. A project's own copy of it can be named (--base)"
        )
    return told


def differences(stock: Outcomes, here: Outcomes) -> list[str]:
    """A line for each test whose outcome, or reason for skipping, differs. (Stock says nothing of a
    ``SkipTest`` that was raised in a worker.)"""
    found = []
    for name in sorted(stock.found.keys() | here.found.keys()):
        before, after = (run.found.get(name, ("not run", "")) for run in (stock, here))
        same = before == after or (before[0] == after[0] and before[1] == _NO_REASON)
        if not same:
            texts = (
                f"{outcome} ({reason})" if reason else outcome
                for outcome, reason in (before, after)
            )
            found.append("{}: stock {}, here {}".format(name, *texts))
    return found


def comparison(stock: Outcomes, here: Outcomes) -> tuple[list[str], bool]:
    """What two runs come to, and whether their outcomes are the same."""
    if not stock.found or not here.found:
        return [
            f"nothing to compare: {len(stock.found)} outcomes on stock, {len(here.found)} here"
        ], (not stock.found and not here.found)
    wrong = differences(stock, here)
    told = wrong[:_LISTED]
    if len(wrong) > _LISTED:
        told.append(f"and {len(wrong) - _LISTED} more")
    alike = len(stock.found.keys() | here.found.keys()) - len(wrong)
    ratio = f", {stock.seconds / here.seconds:.1f}x" if here.seconds else ""
    told.append(
        f"{alike} outcomes the same, {len(wrong)} not; stock {stock.seconds:.1f} s, "
        f"here {here.seconds:.1f} s{ratio}"
    )
    return told, not wrong
