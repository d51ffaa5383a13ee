"""Run probes on this process's arm, time each test in the parent, and write figures as JSON.

A test's time is that of ``test.run(result)``: setUp to cleanups, as a runner would wait for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import arms
from benchmarks.probes.base import NOTES
from benchmarks.probes.cost import Cost
from benchmarks.probes.crash import Crash
from benchmarks.probes.unguarded import Unguarded


class Step(NamedTuple):
    """One test of a class, some times over, and the figure that its times go to."""

    figure: str
    test: str
    times: int = 1


class Class(NamedTuple):
    """One class start to end: on ours one pool, on torch's own class one start of workers."""

    test_class: Any
    steps: tuple[Step, ...]


#: Not a figure: what comes before it has been timed elsewhere, or fails on purpose.
UNTIMED = ""

_MEMORY = Step(UNTIMED, "test_memory")
_CRASH = (Step(UNTIMED, "test_crash"), Step(UNTIMED, "test_next"))
_START = Class(Cost, (Step("start", "test_noop"),))

#: What each arm runs, every time. Times differ by three orders of magnitude, so counts do as well.
PLANS: dict[str, tuple[Class, ...]] = {
    arms.STOCK: (Class(Cost, (Step("noop", "test_noop"), Step("group", "test_group"))),),
    arms.TORCH: (
        Class(
            Cost,
            (
                Step("start", "test_noop"),
                Step("noop", "test_noop", 200),
                Step("group", "test_group", 50),
                _MEMORY,
            ),
        ),
    ),
    arms.NONE: (
        Class(Cost, (Step("cold start", "test_noop"),)),
        *[_START] * 5,
        Class(
            Cost,
            (
                Step(UNTIMED, "test_noop"),
                Step("noop", "test_noop", 200),
                Step("group", "test_group", 30),
                _MEMORY,
            ),
        ),
        Class(Unguarded, (Step(UNTIMED, "test_noop"), Step("noop, no guard", "test_noop", 200))),
        Class(Crash, (Step("start, new file", "test_next"), *_CRASH * 5)),
    ),
    arms.GROUP: (Class(Cost, (Step(UNTIMED, "test_noop"), Step("group", "test_group", 30))),),
    arms.PROCESS: (
        Class(
            Cost,
            (
                Step("cold start", "test_noop"),
                Step("noop", "test_noop", 15),
                Step("group", "test_group", 15),
            ),
        ),
    ),
}

#: What stock runs beside that when asked for all: half a minute for what hardly varies.
ALL_OF_STOCK = (Class(Cost, (_MEMORY,)), Class(Crash, _CRASH))


class ProbeError(Exception):
    """A test came out otherwise than it is meant to: the figures mean nothing."""


def run_class(probe: Class, figures: dict[str, list[float]]) -> None:
    """Run the steps of a class, and note the seconds of each test."""
    result = unittest.TestResult()
    probe.test_class.setUpClass()
    try:
        for step in probe.steps:
            for _ in range(step.times):
                test = probe.test_class(step.test)
                began = time.perf_counter()
                test.run(result)
                figures[step.figure].append(time.perf_counter() - began)
    finally:
        probe.test_class.tearDownClass()
        probe.test_class.doClassCleanups()
    _check(probe, result)


def _check(probe: Class, result: unittest.TestResult) -> None:
    crashes = sum(step.times for step in probe.steps if step.test == "test_crash")
    failed = [(t.id(), text) for t, text in (*result.errors, *result.failures, *result.skipped)]
    wrong = [text for name, text in failed if not name.endswith("test_crash")]
    if wrong or len(failed) != crashes:
        raise ProbeError("\n".join(wrong) or f"{crashes} tests were to crash, {len(failed)} did")


def read_notes(lines: Sequence[str]) -> dict[str, list[float]]:
    """What workers noted: their memory, and seconds from each crash to the next body's begin.

    The next body has begun when the last rank's has. Where the crash was in used workers, it is
    that of the same test, run again.
    """
    found: dict[str, list[float]] = defaultdict(list)
    crashed: float | None = None
    begun: list[float] = []

    def end_gap() -> None:
        if crashed is not None and begun:
            found["crash"].append(max(begun) - crashed)

    for note in map(json.loads, lines):
        if note["event"] == "memory":
            found["memory"].append(note["value"])
        elif note["event"] == "begin":
            begun.append(note["value"])
        else:
            end_gap()
            crashed, begun = note["value"], []
    end_gap()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("figures", type=Path, help="the file to write")
    parser.add_argument("--all", action="store_true", help="on stock, also what takes long")
    arguments = parser.parse_args()
    plan = PLANS[arms.current()]
    if arguments.all and arms.current() == arms.STOCK:
        plan += ALL_OF_STOCK
    figures: dict[str, list[float]] = defaultdict(list)
    # Beside the figures, where the caller cleans up even if this process is killed.
    folder = arguments.figures.absolute().parent
    with tempfile.NamedTemporaryFile("r", prefix="notes-", dir=folder) as notes:
        os.environ[NOTES] = notes.name
        for probe in plan:
            run_class(probe, figures)
        figures |= read_notes(notes.readlines())
    figures.pop(UNTIMED, None)
    arguments.figures.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
