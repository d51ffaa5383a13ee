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

from benchmarks import arms, ordered, plots, published, results, sweeps, tables
from benchmarks.comparison import (
    ANY_WORLD_SIZE,
    LEFT_OUT,
    QUICK_SUITES,
    SUITES,
    Comparison,
    run_suite,
)


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
        help="default: all of them, less torch (its own continuous class) with --quick",
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
        help="write results.json (every raw time) and results.md there, as runs end, and plots "
        "at the end",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=arms.WORLD_SIZE,
        metavar="N",
        help=f"ranks of each suite (default: %(default)s); another number runs those suites whose "
        f"tests do not depend on it: {', '.join(ANY_WORLD_SIZE)}",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: suites that choose by themselves take GPUs, where there is one for each rank "
        "(default: cpu, which hides them)",
    )
    parser.add_argument(
        "--sweeps",
        action=argparse.BooleanOptionalAction,
        help="also measure cost by number of tests, and cost and memory by number of ranks "
        "(default: unless --quick, --suite or --world-size is given)",
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
    if parsed.world_size < 2:
        parser.error("--world-size: give 2 or more")
    if parsed.device == "cuda":
        import torch

        if torch.cuda.device_count() < parsed.world_size:
            parser.error(
                f"--device cuda: {parsed.world_size} ranks need as many GPUs, and torch sees "
                f"{torch.cuda.device_count()}"
            )
    fitting: Sequence[str] = SUITES
    if parsed.world_size != arms.WORLD_SIZE:
        fitting = ANY_WORLD_SIZE
        unfit = [suite for suite in parsed.suite or () if suite not in fitting]
        if unfit:
            parser.error(f"--world-size: written for {arms.WORLD_SIZE} ranks: {', '.join(unfit)}")
    if parsed.sweeps is None:
        whole = parsed.suite is None and fitting is SUITES
        parsed.sweeps = whole and not parsed.quick
    if parsed.quick:
        parsed.repeat = 1
    if parsed.arms is None:
        parsed.arms = [arm for arm in arms.ALL_ARMS if not (parsed.quick and arm == arms.TORCH)]
    quick = parsed.quick and fitting is SUITES
    parsed.suite = parsed.suite or (QUICK_SUITES if quick else fitting)
    return parsed


def measure(
    comparison: Comparison,
    suites: Sequence[str],
    repeat: int,
    order: str,
    note: Callable[[], None],
    world_size: int = arms.WORLD_SIZE,
    accelerators: bool = False,
) -> None:
    """Run everything, the arms in turn, with a line for each run; ``note`` is called after each."""
    plan = [(s, a) for _ in range(repeat) for s in suites for a in comparison.arms]
    for number, (suite, arm) in enumerate(plan, 1):
        left = comparison.seconds_left(plan[number - 1 :])
        about = f", about {left / 60:.1f} min left" if left is not None else ""
        print(f"[{number}/{len(plan)}{about}] {suite}.py on {arm} ...", end=" ", flush=True)
        run = run_suite(suite, arm, order, world_size, accelerators)
        comparison.runs.append(run)
        outcomes = list(run.outcomes.values())
        left_out = f", {outcomes.count(LEFT_OUT)} {LEFT_OUT}" if LEFT_OUT in outcomes else ""
        passed = f"{outcomes.count('ok')} of {len(outcomes)} passed"
        print(f"{passed}{left_out}, {run.seconds:.1f} s", flush=True)
        note()


def sweep(
    points: list[sweeps.Point], of_arms: Sequence[str], repeat: int, note: Callable[[], None]
) -> list[str]:
    """Run the sweeps, with a line for each file; what went wrong."""
    problems = []
    jobs = list(sweeps.plan(of_arms)) * repeat
    for number, job in enumerate(jobs, 1):
        tests = "1 test" if job.count == 1 else f"{job.count} tests"
        print(f"[sweep {number}/{len(jobs)}] {tests} on {job.world_size} ranks", end=" ")
        print(f"on {job.arm} ...", end=" ", flush=True)
        try:
            point = sweeps.measure(job)
        except sweeps.SweepError as error:
            print("failed", flush=True)
            problems.append(str(error))
            continue
        points.append(point)
        print(f"{point.seconds:.1f} s", flush=True)
        note()
    return problems


def report(comparison: Comparison, points: Sequence[sweeps.Point] = ()) -> int:
    """Print the tables and whatever is wrong; how much is."""
    if comparison.runs:
        print(f"\n{tables.render(*comparison.table())}\n")
    ratios = comparison.ratios(arms.NONE)
    if any(ratios.keys() & set(one.comparable) for one in published.PUBLISHED):
        print(f"{published.NOTE}\n\n{published.table(ratios, all_of_them=False)}\n")
    if points:
        print(f"{sweeps.report(points)}\n")
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
    points: list[sweeps.Point] = []
    failed: list[str] = []
    interrupted = False
    if parsed.out is not None and (lacking := plots.missing()):
        print(lacking)
    began = time.monotonic()

    def note() -> None:
        if parsed.out is not None:
            results.write(parsed.out, comparison, points, arguments or sys.argv[1:])

    try:
        note()
        measure(
            comparison,
            parsed.suite,
            parsed.repeat,
            parsed.order,
            note,
            parsed.world_size,
            parsed.device != "cpu",
        )
        if parsed.sweeps:
            failed = sweep(points, comparison.arms, parsed.repeat, note)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured so far follows")
    problems = report(comparison, points) + len(failed)
    for problem in failed:
        print(problem)
    if parsed.out is not None and not plots.missing():
        drawn = plots.draw(parsed.out, comparison, points)
        results.write(parsed.out, comparison, points, arguments or sys.argv[1:], drawn)
    print(f"{len(comparison.runs) + len(points)} runs in {time.monotonic() - began:.0f} s")
    if interrupted:
        return 130
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
