"""What the harness itself costs, beside stock and beside torch's own continuous class.

Each round runs each arm's probes in a process of their own, the arms in turn, on 4 gloo ranks. A
figure is a round's median; the table has the median of the rounds, and the least and the greatest
in brackets. Targets are reported on, never asserted: the exit status is 1 only where a probe did
not run as it should.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import arms, tables
from benchmarks.comparison import SUITES
from benchmarks.processes import run_python

#: Seconds for one process of an arm: stock's longest run takes 40, twice that on a loaded machine.
DRIVER_TIMEOUT = 300.0

ROUND = (arms.STOCK, arms.NONE, arms.TORCH, arms.GROUP, arms.PROCESS)

#: A file of one test, run whole: by arm, figure and module.
WHOLE_RUNS = {
    arms.STOCK: {"whole": "one_test"},
    arms.TORCH: {"whole": "one_test"},
    arms.NONE: {"whole": "one_test", "whole, first": "one_test_first"},
}

_NAMES = {arms.STOCK: "stock", arms.TORCH: "torch's own"}

#: Columns of the suites' table, and where their numbers are.
TOTALS = {
    "tests": "tests",
    "groups made": "groups_made",
    "default groups reused": "groups_reused",
    "generations": "generations",
    "leaks": "leaks",
}

#: Raw figures: by arm, then by figure, a list for each round.
Raw = dict[str, dict[str, list[list[float]]]]


class RunError(Exception):
    """A process of a probe failed, or was not done in time."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        ours: the arm and the drivers' name of our figure.
        theirs: the name of the same figure on stock and on torch's own class.
        at_most: a target in the figure's own unit.
        times_less: a target as a multiple, and the arm that it is a multiple of.
    """

    title: str
    ours: tuple[str, str]
    theirs: Mapping[str, str]
    at_most: float | None = None
    times_less: tuple[float, str] | None = None
    unit: str = "s"

    @property
    def against(self) -> str:
        """The arm that the ratio is of."""
        if self.times_less is not None:
            return self.times_less[1]
        return arms.STOCK if arms.STOCK in self.theirs else arms.TORCH


def _both(name: str) -> Mapping[str, str]:
    return {arms.STOCK: name, arms.TORCH: name}


FIGURES = (
    Figure(
        "pool start (first test), nursery warm",
        (arms.NONE, "start"),
        {arms.STOCK: "noop", arms.TORCH: "start"},
        at_most=0.1,
        times_less=(50, arms.TORCH),
    ),
    Figure(
        "the same, test file new to the nursery",
        (arms.NONE, "start, new file"),
        {arms.STOCK: "noop", arms.TORCH: "start"},
    ),
    Figure(
        "the same, nursery cold",
        (arms.NONE, "cold start"),
        {arms.STOCK: "noop", arms.TORCH: "start"},
    ),
    Figure(
        'one more no-op test, "none"',
        (arms.NONE, "noop"),
        _both("noop"),
        times_less=(1, arms.TORCH),
    ),
    Figure(
        "the same, state guard off",
        (arms.NONE, "noop, no guard"),
        _both("noop"),
    ),
    Figure(
        'one more no-op test, "process"',
        (arms.PROCESS, "noop"),
        {arms.STOCK: "noop"},
        times_less=(80, arms.STOCK),
    ),
    Figure(
        'one more with a group, "none"',
        (arms.NONE, "group"),
        _both("group"),
        times_less=(1, arms.TORCH),
    ),
    Figure('one more with a group, "group"', (arms.GROUP, "group"), {arms.STOCK: "group"}),
    Figure('one more with a group, "process"', (arms.PROCESS, "group"), {arms.STOCK: "group"}),
    Figure(
        "crash to the next test's start",
        (arms.NONE, "crash"),
        {arms.STOCK: "crash"},
        at_most=0.2,
    ),
    Figure(
        "whole run, a file of one test",
        (arms.NONE, "whole, first"),
        _both("whole"),
        times_less=(2, arms.STOCK),
    ),
    Figure(
        "the same, torch imported first",
        (arms.NONE, "whole"),
        _both("whole"),
        times_less=(2, arms.STOCK),
    ),
    Figure(
        "private memory of a worker",
        (arms.NONE, "memory"),
        _both("memory"),
        at_most=20e6,
        unit="B",
    ),
)

NOTE = (
    "one more with a group: it makes a group, reduces and destroys it; torch's own class keeps one "
    "group,\nand its test only reduces. A crash skips the rest of a class there."
)


COUNTED = (
    "groups made: by c10d, the default one and sub-groups; reused: a test was handed the default "
    "group\nthat an earlier test had made, instead of making one."
)


def measure_round(raw: Raw, number: int) -> None:
    """Run every arm once; stock's longest probes in the first round only."""
    for arm in ROUND:
        began = time.perf_counter()
        print(f"round {number}: probes on {arm} ...", end=" ", flush=True)
        for name, values in run_driver(arm, all_of_it=number == 1).items():
            raw[arm][name].append(values)
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
        for name, module in WHOLE_RUNS.get(arm, {}).items():
            print(f"round {number}: {module}.py on {arm} ...", end=" ", flush=True)
            seconds = run_module(arm, "unittest", f"benchmarks.probes.{module}")
            raw[arm][name].append([seconds])
            print(f"{seconds:.1f} s", flush=True)


def run_driver(arm: str, all_of_it: bool) -> dict[str, list[float]]:
    """The figures of one process of the driver."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file = Path(folder) / "figures.json"
        options = ["--all"] if all_of_it else []
        run_module(arm, "benchmarks.probes.driver", str(file), *options)
        figures: dict[str, list[float]] = json.loads(file.read_text())
        return figures


def count_groups(suites: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Run suites at level "none": a row each of what their tests made and were handed.

    Raises:
        RunError: one failed, or was not done in time.
    """
    rows = []
    for suite in suites:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            file = Path(folder) / "totals.json"
            name = f"benchmarks.suites.{suite}"
            run_module(arms.NONE, "benchmarks.counted", str(file), name)
            totals = json.loads(file.read_text())
        rows.append([f"{suite}.py", *(str(totals[name]) for name in TOTALS.values())])
        print(f"{suite}.py at {arms.NONE}: counted", flush=True)
    return ["file", *TOTALS], rows


def run_module(arm: str, *arguments: str) -> float:
    """Run ``python -m`` on an arm; seconds.

    Raises:
        RunError: it failed, or was not done in time.
    """
    ended = run_python("-m", *arguments, environ=arms.environment(arm), timeout=DRIVER_TIMEOUT)
    if ended.code != 0:
        what = f"not done after {DRIVER_TIMEOUT:.0f} s" if ended.code is None else "failed"
        raise RunError(f"{' '.join(arguments)} on {arm}: {what}\n{ended.output[-4000:]}")
    return ended.seconds


def table(raw: Raw) -> str:
    """All figures that were measured, with their targets."""
    header = ["figure", "stock", "torch's own", "ours", "ratio", "target", "met?"]
    rows = []
    for figure in FIGURES:
        arm, name = figure.ours
        theirs = {a: _rounds(raw, a, n) for a, n in figure.theirs.items()}
        ours = _rounds(raw, arm, name)
        cells = [_spread(theirs.get(a, []), figure.unit) for a in (arms.STOCK, arms.TORCH)]
        reference = theirs.get(figure.against)
        ratio = median(reference) / median(ours) if reference and ours else None
        rows.append(
            [
                figure.title,
                *cells,
                _spread(ours, figure.unit),
                _relation(ratio, figure.against),
                _target(figure),
                _met(figure, median(ours) if ours else None, ratio),
            ]
        )
    return tables.render(header, rows)


def _rounds(raw: Raw, arm: str, name: str) -> list[float]:
    return [median(values) for values in raw.get(arm, {}).get(name, []) if values]


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "-"
    scale, suffix = 1.0, "s"
    if unit == "B":
        scale, suffix = 1e6, "MB"
    elif median(values) < 1:
        scale, suffix = 1e-3, "ms"
    numbers = [value / scale for value in (median(values), min(values), max(values))]
    digits = 2 if numbers[0] < 10 else 1 if numbers[0] < 100 else 0
    middle, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{middle} {suffix} ({low}-{high})" if len(values) > 1 else f"{middle} {suffix}"


def _relation(ratio: float | None, arm: str) -> str:
    if ratio is None:
        return "-"
    times, word = (ratio, "less") if ratio >= 1 else (1 / ratio, "more")
    return f"{times:.1f}x {word} than {_NAMES[arm]}"


def _target(figure: Figure) -> str:
    parts = []
    if figure.at_most is not None:
        parts.append(f"at most {_spread([figure.at_most], figure.unit)}")
    if figure.times_less is not None:
        times, arm = figure.times_less
        name = _NAMES[arm]
        parts.append(f"{times:g}x less than {name}" if times > 1 else f"not above {name}")
    return ", ".join(parts) or "-"


def _met(figure: Figure, ours: float | None, ratio: float | None) -> str:
    checks = []
    if figure.at_most is not None:
        checks.append(None if ours is None else ours <= figure.at_most)
    if figure.times_less is not None:
        checks.append(None if ratio is None else ratio >= figure.times_less[0])
    if not checks or None in checks:
        return "-"
    return "yes" if all(checks) else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--groups",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also count the process groups that each suite makes and reuses (default: yes)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw figures here")
    parsed = parser.parse_args(arguments)
    if parsed.repeat < 1:
        parser.error("--repeat: give 1 or more")
    raw: Raw = defaultdict(lambda: defaultdict(list))
    status = 0
    counted = None
    try:
        for number in range(1, parsed.repeat + 1):
            measure_round(raw, number)
        if parsed.groups:
            counted = count_groups(SUITES)
    except KeyboardInterrupt:
        status = 130
        print("interrupted: what was measured so far follows")
    except RunError as error:
        status = 1
        print(f"\n{error}\nwhat was measured so far follows")
    if raw:
        print(f"\n{table(raw)}\n\n{NOTE}")
        if parsed.json is not None:
            parsed.json.write_text(json.dumps(raw, indent=1))
    if counted is not None:
        print(f"\n{tables.render(*counted)}\n\n{COUNTED}")
    return status


if __name__ == "__main__":
    sys.exit(main())
