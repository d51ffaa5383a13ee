"""How the cost grows: with the number of tests in a file, and with the number of ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks import arms, tables
from benchmarks.probes import names
from benchmarks.processes import run_python

#: Tests in a file. Stock's thousand would take hours.
TESTS = (1, 10, 100, 1000)
_STOCK_TESTS = (1, 10)

WORLD_SIZES = (2, 4, 8, 16)

#: Tests whose median stands for a world size: stock's all start their processes, the others' first
#: alone does and is left out.
_STOCK_REPEATS = 2
_REPEATS = 20

#: Seconds for one file: stock's ten tests take 80, sixteen ranks several times that.
TIMEOUT = 900.0

#: Kinds of sweep.
BY_TESTS = "tests"
BY_WORLD_SIZE = "world size"


@dataclass(frozen=True)
class Job:
    """One file to be run: ``count`` tests on ``world_size`` ranks."""

    kind: str
    arm: str
    world_size: int
    count: int

    @property
    def x(self) -> int:
        """Where its figures stand on the plot."""
        return self.count if self.kind == BY_TESTS else self.world_size


@dataclass(frozen=True)
class Point:
    """What came of a job.

    Attributes:
        seconds: of the whole file.
        tests: seconds of each test, in order.
        memory: bytes that ranks, and what keeps them, held in a test; None if not measured.
    """

    job: Job
    seconds: float
    tests: tuple[float, ...]
    memory: int | None

    @property
    def test_seconds(self) -> float:
        """The median of its tests but the first, which may have had to start the workers."""
        rest = self.tests if self.job.arm == arms.STOCK else self.tests[1:]
        return median(rest or self.tests)


class SweepError(Exception):
    """A file of a sweep failed, or was not done in time."""


def plan(of_arms: Iterable[str]) -> Iterator[Job]:
    """What is to be run, the arms in turn."""
    of_arms = list(of_arms)
    for count in TESTS:
        for arm in of_arms:
            if arm != arms.STOCK or count in _STOCK_TESTS:
                yield Job(BY_TESTS, arm, arms.WORLD_SIZE, count)
    for world_size in WORLD_SIZES:
        for arm in of_arms:
            count = _STOCK_REPEATS if arm == arms.STOCK else _REPEATS
            yield Job(BY_WORLD_SIZE, arm, world_size, count)


def measure(job: Job) -> Point:
    """Run one file.

    Raises:
        SweepError: a test failed, or it was not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        seconds_file, memory_file = Path(folder, "seconds.json"), Path(folder, "memory")
        environ = dict(arms.environment(job.arm, job.world_size))
        environ[names.TESTS] = str(job.count)
        if job.kind == BY_WORLD_SIZE:
            environ |= {names.GROUPS: "1", names.MEMORY: str(memory_file)}
        ended = run_python(
            *("-m", "benchmarks.probes.timed", str(seconds_file)), environ=environ, timeout=TIMEOUT
        )
        if ended.code != 0:
            what = f"not done after {TIMEOUT:.0f} s" if ended.code is None else "failed"
            raise SweepError(
                f"{job.count} tests on {job.world_size} ranks on {job.arm}: {what}\n"
                f"{ended.output[-2000:]}"
            )
        found: dict[str, float] = json.loads(seconds_file.read_text())
        tests = tuple(found[name] for name in sorted(found) if name != "test_memory")
        memory = int(memory_file.read_text()) if memory_file.exists() else None
    return Point(job, ended.seconds, tests, memory)


def curve(points: Sequence[Point], kind: str, arm: str, what: str) -> dict[int, float]:
    """By number of tests or of ranks, the median of an attribute of an arm's points."""
    found: dict[int, list[float]] = {}
    for point in points:
        value = getattr(point, what)
        if (point.job.kind, point.job.arm) == (kind, arm) and value is not None:
            found.setdefault(point.job.x, []).append(value)
    return {x: median(values) for x, values in sorted(found.items())}


def report(points: Sequence[Point]) -> str:
    """Tables of the sweeps: seconds of files by number of tests, seconds of a test and megabytes
    by number of ranks; and whether the last tests of a long file take longer than the first."""
    shown = list(dict.fromkeys(point.job.arm for point in points))
    parts = []
    for title, kind, what, unit, digits in (
        ("tests in a file: its seconds", BY_TESTS, "seconds", 1.0, 1),
        ("ranks: ms for one more test with a group", BY_WORLD_SIZE, "test_seconds", 1e-3, 1),
        ("ranks: MB held in a test", BY_WORLD_SIZE, "memory", 1e6, 0),
    ):
        curves = {arm: curve(points, kind, arm, what) for arm in shown}
        xs = sorted({x for of_arm in curves.values() for x in of_arm})
        rows = [
            [
                str(x),
                *(f"{c[x] / unit:.{digits}f}" if x in c else "" for c in curves.values()),
            ]
            for x in xs
        ]
        if rows:
            parts.append(tables.render([title, *shown], rows))
    for point in points:
        if len(point.tests) >= 1000:
            first, last = median(point.tests[1:101]), median(point.tests[-100:])
            parts.append(
                f"{point.job.arm}, {len(point.tests)} tests: the first hundred took "
                f"{first * 1e3:.2f} ms each, the last hundred {last * 1e3:.2f}."
            )
    return "\n\n".join(parts)
