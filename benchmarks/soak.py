"""Run thousands of tests that pass, fail, leak, crash and hang, in one process, and watch it.

Every verdict has to be right, and what the run holds may not grow: memory, descriptors, threads,
processes and temporary files, looked at whenever a class has ended, in the last quarter against the
first. The exit status is 1 where one of that is not so. The seed is printed: it makes the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import tables
from benchmarks.probes.names import SOAK

#: How much more a figure may be in the last quarter: memory that allocators keep for later, and
#: what was under way when it was looked at.
_MAY_GROW_BY = {"memory": 0.1}

#: Seconds that a test may take: one that hangs costs it twice, as it runs again.
_TIMEOUT = 2

_KIND = re.compile(r"^test_\d+_(\w+)$")


@dataclass(frozen=True)
class Sample:
    """What the run held when a class had ended.

    Attributes:
        memory: bytes of this process and of all below it, a page that several share by parts.
        descriptors: open ones of this process.
        threads: of this process.
        processes: below this one.
        files: entries of the run's temporary folder.
    """

    memory: int
    descriptors: int
    threads: int
    processes: int
    files: int


def take_sample(folder: Path) -> Sample:
    me = psutil.Process()
    below = me.children(recursive=True)
    memory = 0
    for process in (me, *below):
        try:
            information = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        memory += getattr(information, "pss", information.uss)
    files = len(list(folder.iterdir()))
    return Sample(memory, me.num_fds(), me.num_threads(), len(below), files)


def growth(samples: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """By figure, its median in the first quarter and in the last."""
    quarter = max(1, len(samples) // 4)
    rows = [asdict(sample) for sample in samples]
    return [
        (
            name,
            median(row[name] for row in rows[:quarter]),
            median(row[name] for row in rows[-quarter:]),
        )
        for name in rows[0]
    ]


def grew(name: str, first: float, last: float) -> bool:
    """Whether a figure is higher at the end than it may be."""
    return last > first * (1 + _MAY_GROW_BY.get(name, 0.0))


class Result(unittest.TestResult):
    """Compares every outcome with what the test's kind says."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.count = 0
        self._outcome = ""
        self._detail = ""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome, self._detail = "passed", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._outcome = "skipped"

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._outcome, self._detail = "failed", str(err[1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if _KIND.match(test.id().rpartition(".")[2]) is None:
            self.wrong.append(f"{test.id()}: {err[1]}")  # Of a class, not of a test.
        self.addFailure(test, err)

    def stopTest(self, test: unittest.TestCase) -> None:
        from benchmarks.probes.soaked import KINDS

        found = _KIND.match(test.id().rpartition(".")[2])
        assert found is not None
        expected = KINDS[found[1]][1]
        self.count += 1
        if self._outcome != expected:
            what = f"{test.id()}: {self._outcome}, expected {expected}"
            self.wrong.append(f"{what}\n{self._detail[:2000]}".rstrip())
        super().stopTest(test)


def run(tests: int, classes: int, seed: int) -> tuple[Result, list[Sample]]:
    """Run the soak in this process, with a line now and then."""
    result, samples = Result(), []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        # torch reads it on import.
        os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(_TIMEOUT)
        os.environ[SOAK] = f"{seed},{tests},{classes}"
        # What tests write is not looked at here.
        with open(os.devnull, "w") as nowhere:
            output, sys.stdout = sys.stdout, nowhere
            errors, sys.stderr = sys.stderr, nowhere
            try:
                from benchmarks.probes import soaked

                began = time.monotonic()
                made = [c for n, c in sorted(vars(soaked).items()) if n.startswith("Soak")]
                for number, test_class in enumerate(made, 1):
                    suite = unittest.defaultTestLoader.loadTestsFromTestCase(test_class)
                    # A suite of suites: only so are the class's cleanups run at its end.
                    unittest.TestSuite([suite]).run(result)
                    samples.append(take_sample(Path(name)))
                    if number % max(1, len(made) // 20) == 0:
                        passed = time.monotonic() - began
                        print(
                            f"{result.count} tests, {number} classes, {passed:.0f} s, "
                            f"{len(result.wrong)} wrong",
                            file=output,
                            flush=True,
                        )
            finally:
                sys.stdout, sys.stderr = output, errors
                tempfile.tempdir = None
    return result, samples


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--tests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--classes", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="default: another each time")
    parsed = parser.parse_args(arguments)
    if not 4 <= parsed.classes <= parsed.tests:
        parser.error("--classes: give 4 or more, and no more than there are tests")
    seed = random.randrange(1 << 31) if parsed.seed is None else parsed.seed
    print(f"seed {seed}", flush=True)
    result, samples = run(parsed.tests, parsed.classes, seed)
    rows = growth(samples)
    header = ["after a class", "first quarter", "last quarter", "grew?"]
    cells = [[n, f"{a:.0f}", f"{b:.0f}", "yes" if grew(n, a, b) else "no"] for n, a, b in rows]
    print(f"\n{tables.render(header, cells)}\n")
    for wrong in result.wrong:
        print(wrong)
    print(f"{result.count} tests, {len(result.wrong)} verdicts wrong")
    failed = result.wrong or result.count != parsed.tests or any(grew(*row) for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
