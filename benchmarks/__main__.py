"""Run suites of DTensor, tensor-parallel and c10d tests on stock and on reused workers: one table.

Each file runs on each arm as a user runs it, ``python -m unittest`` in a process of its own, the
arms in turn. The exit status is 1 if a test fails, or comes out otherwise than on stock.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import arms, ordered, results, tables
from benchmarks.comparison import LEFT_OUT, QUICK_SUITES, SUITES, Comparison, run_suite


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--quick", action="store_true", help="small suites, each arm once: about two minutes"
    )
    amount.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each (default: %(default)s)"
    )
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="only this one (may be given again)"
    )
    parser.add_argument(
        "--arms",
        choices=arms.ALL_ARMS,
        nargs="+",
        default=arms.SUITE_ARMS,
        help=f"default: {' '.join(arms.SUITE_ARMS)}",
    )
    parser.add_argument(
        "--order",
        type=ordered.order,
        default=ordered.FORWARDS,
        help="of each suite's tests, on every arm: forwards (default), reversed or shuffle:SEED",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json (every raw time) and results.md there, as runs end",
    )
    parsed = parser.parse_args(arguments)
    if parsed.out is not None:
        try:
            parsed.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=parsed.out):
                pass
        except OSError as error:
            parser.error(f"--out: {parsed.out} cannot be written to: {error}")
    if parsed.repeat < 1:
        parser.error("--repeat: give 1 or more")
    if parsed.quick:
        parsed.repeat = 1
    parsed.suite = parsed.suite or (QUICK_SUITES if parsed.quick else SUITES)
    return parsed


def measure(
    comparison: Comparison,
    suites: Sequence[str],
    repeat: int,
    order: str,
    note: Callable[[], None],
) -> None:
    """Run everything, the arms in turn, with a line for each run; ``note`` is called after each."""
    plan = [(s, a) for _ in range(repeat) for s in suites for a in comparison.arms]
    for number, (suite, arm) in enumerate(plan, 1):
        left = comparison.seconds_left(plan[number - 1 :])
        about = f", about {left / 60:.1f} min left" if left is not None else ""
        print(f"[{number}/{len(plan)}{about}] {suite}.py on {arm} ...", end=" ", flush=True)
        run = run_suite(suite, arm, order)
        comparison.runs.append(run)
        outcomes = list(run.outcomes.values())
        left_out = f", {outcomes.count(LEFT_OUT)} {LEFT_OUT}" if LEFT_OUT in outcomes else ""
        passed = f"{outcomes.count('ok')} of {len(outcomes)} passed"
        print(f"{passed}{left_out}, {run.seconds:.1f} s", flush=True)
        note()


def report(comparison: Comparison) -> int:
    """Print the table and whatever is wrong; how much is."""
    if comparison.runs:
        print(f"\n{tables.render(*comparison.table())}\n")
    problems = list(comparison.problems())
    for problem in problems:
        print(problem)
    if comparison.runs and not problems:
        compared = {arms.STOCK} < {run.arm for run in comparison.runs}
        print(f"No test failed{', and every outcome is that of stock' if compared else ''}.")
    return len(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parsed = parse(arguments)
    comparison = Comparison(list(dict.fromkeys(parsed.arms)))
    interrupted = False
    began = time.monotonic()

    def note() -> None:
        if parsed.out is not None:
            results.write(parsed.out, comparison, arguments or sys.argv[1:])

    try:
        note()
        measure(comparison, parsed.suite, parsed.repeat, parsed.order, note)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured so far follows")
    problems = report(comparison)
    print(f"{len(comparison.runs)} runs in {time.monotonic() - began:.0f} s")
    if interrupted:
        return 130
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
