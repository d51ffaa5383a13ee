"""Check reuse on an accelerator, beside stock: one device is enough.

Run from a checkout; nothing has to be installed besides torch, psutil and numpy. Without an
accelerator it says so, and its exit status is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import arms, tables
from benchmarks.comparison import Comparison, SuiteRun, run_suite
from benchmarks.probes.base import NOTES

#: By how much less memory may be free after a class than before the test that held some: drivers
#: keep a context's worth for a moment.
SLACK_BYTES = 1 << 30

SUITE = "accelerator"

#: torch's own testing modules import expecttest, which nothing here uses: this stands for it on a
#: machine that lacks it and has no network.
_EXPECTTEST = "import unittest\n\nclass TestCase(unittest.TestCase):\n    pass\n"


def check_memory(notes: Sequence[str], arm: str) -> list[str]:
    """What the workers' notes say of memory and of the nursery: what is wrong with it."""
    found = {note["event"]: note["value"] for note in map(json.loads, notes)}
    problems = [
        f"{arm}: nothing was noted of {what!r}"
        for what in ("free before", "free after", *(["untouched"] if arm != arms.STOCK else []))
        if what not in found
    ]
    if not problems:
        missing = found["free before"] - found["free after"]
        free = found["free before"] / 1e9
        print(f"{arm}: {free:.2f} GB free before, {missing / 1e9:.2f} GB less after")
        if missing > SLACK_BYTES:
            problems.append(f"{arm}: a class that ended still holds {missing / 1e9:.2f} GB")
    return problems


def run_arm(arm: str, folder: Path) -> tuple[SuiteRun, list[str]]:
    """Run the suite on one arm; the run, and what is wrong with its notes."""
    notes = folder / f"{arm}.jsonl"
    notes.touch()
    os.environ[NOTES] = str(notes)
    run = run_suite(SUITE, arm)
    return run, check_memory(notes.read_text().splitlines(), arm)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--repeat", type=int, default=2, metavar="N", help="runs of each arm (default: %(default)s)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.repeat < 1:
        parser.error("--repeat: give 1 or more")
    import torch

    kind = torch.accelerator.current_accelerator()
    devices = torch.accelerator.device_count()
    if kind is None or devices == 0:
        print("There is no accelerator here that this torch can use: nothing to check.")
        return 0
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {devices} of {kind.type}")
    comparison = Comparison([arms.STOCK, arms.NONE, arms.PROCESS])
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="accelerator-") as name:
        folder = Path(name)
        if importlib.util.find_spec("expecttest") is None:
            (folder / "expecttest.py").write_text(_EXPECTTEST)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        for _ in range(parsed.repeat):
            for arm in comparison.arms:
                run, wrong = run_arm(arm, folder)
                comparison.runs.append(run)
                problems += wrong
                print(f"{arm}: {len(run.outcomes)} tests, {run.seconds:.1f} s", flush=True)
    problems += comparison.problems()
    print(f"\n{tables.render(*comparison.table())}\n")
    for problem in problems:
        print(problem)
    if not problems:
        print("The nursery touched no device, memory was given back, and outcomes are stock's.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
