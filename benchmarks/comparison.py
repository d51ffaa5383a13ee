"""One suite on one arm, run as a user runs it; and what the runs of all come to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks import arms, ordered
from benchmarks.processes import run_python

#: The suites of a quick run: three tests each, or fewer.
QUICK_SUITES = ("c10d", "dtensor", "device_mesh")

#: Every suite: a file each in benchmarks/suites.
SUITES = (
    *QUICK_SUITES,
    "dtensor_mesh",
    "dtensor_modules",
    "dtensor_ops",
    "dtensor_placements",
    "dtensor_random",
    "dtensor_tools",
    "dtensor_views",
    "tensor_parallel",
    "fsdp1",
    "fsdp1_wrapping",
    "wrap",
    "fsdp2",
    "fsdp2_state",
    "checkpoint",
    "checkpoint_training",
    "ddp",
    "ddp_companions",
)

#: Suites whose tests expect nothing that depends on there being four ranks.
ANY_WORLD_SIZE = ("c10d", "dtensor_views", "wrap")

#: Seconds for one run of a suite: stock takes 13 for each test on a loaded two-core machine, and
#: the longest suite has 41.
SUITE_TIMEOUT = 900.0

#: What a test that never came to an outcome is shown with.
NO_OUTCOME = "no outcome"

#: A test that is not meant for the arm: not a difference from stock.
LEFT_OUT = "left out"

#: A test that torch's own class skipped, as it does with whatever follows a failure.
NOT_RUN = "not run after a failure"

# Skips that are more than that, by how their reasons begin.
_REASONS = {arms.LEFT_OUT: LEFT_OUT, "Previous test failed": NOT_RUN}

# With -v: the test's name, then its outcome, with whatever its workers wrote between them.
# A parametrised test's name may hold more than an identifier may; Python 3.10 does not repeat it.
_TEST = re.compile(r"^(test\S*) \(([\w.]+?)(?:\.\1)?\)", re.MULTILINE)
_OUTCOME = re.compile(
    r"(?:\.\.\. |^)(ok|FAIL|ERROR|skipped|expected failure|unexpected success)(?:$| ['\"](.*))",
    re.MULTILINE,
)
_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_END = re.compile(r"^(?:={70}|-{70})$", re.MULTILINE)

#: Lines of a run's output that are shown where something was wrong with it.
_TAIL = 30


@dataclass(frozen=True)
class SuiteRun:
    """A run of one suite on one arm."""

    suite: str
    arm: str
    code: int | None
    seconds: float
    outcomes: dict[str, str]
    output: str

    @property
    def whole(self) -> bool:
        """Whether every test was run, so that its seconds can be compared."""
        return not {LEFT_OUT, NOT_RUN} & set(self.outcomes.values())

    def tail(self) -> str:
        """The end of what the run wrote."""
        return "\n".join(f"    {line}" for line in self.output.splitlines()[-_TAIL:])


def run_suite(
    suite: str,
    arm: str,
    order: str = ordered.FORWARDS,
    world_size: int = arms.WORLD_SIZE,
    accelerators: bool = False,
) -> SuiteRun:
    """Run ``python -m unittest`` on a suite, and note the outcome of each test."""
    runner = ("unittest", "-v")
    if order != ordered.FORWARDS:
        runner = ("benchmarks.ordered", f"--order={order}")
    environ = dict(arms.environment(arm, world_size))
    if not accelerators:
        # Else a suite takes them where there are enough for its ranks.
        environ["CUDA_VISIBLE_DEVICES"] = ""
    ended = run_python(
        *("-m", *runner, f"benchmarks.suites.{suite}"), environ=environ, timeout=SUITE_TIMEOUT
    )
    outcomes = read_outcomes(ended.output)
    return SuiteRun(suite, arm, ended.code, ended.seconds, outcomes, ended.output)


def read_outcomes(output: str) -> dict[str, str]:
    """Outcome by ``Class.test``, from what ``unittest -v`` wrote."""
    found: dict[str, str] = {}
    end = _END.search(output)
    tests = list(_TEST.finditer(output, 0, end.start() if end else len(output)))
    ends = [test.start() for test in tests[1:]] + [end.start() if end else len(output)]
    for test, stop in zip(tests, ends, strict=True):
        name, place = test.groups()
        test_class = place.rpartition(".")[2]
        outcomes = _OUTCOME.findall(output, test.end(), stop)
        found[f"{test_class}.{name}"] = _outcome(*outcomes[-1]) if outcomes else NO_OUTCOME
    return found


def _outcome(word: str, reason: str) -> str:
    if word == "skipped":
        return next((told for begin, told in _REASONS.items() if reason.startswith(begin)), word)
    return word


@dataclass
class Comparison:
    """The runs measured so far."""

    arms: Sequence[str]
    runs: list[SuiteRun] = field(default_factory=list)

    def seconds(self, suite: str, arm: str) -> float | None:
        """The median for a suite on an arm; None where it was not run, or not the whole of it."""
        all_of_it = [r.seconds for r in self.runs if (r.suite, r.arm) == (suite, arm) and r.whole]
        return median(all_of_it) if all_of_it else None

    def spread(self, suite: str, arm: str) -> tuple[float, float] | None:
        """The least and the greatest, where it was run more than once."""
        all_of_it = [r.seconds for r in self.runs if (r.suite, r.arm) == (suite, arm) and r.whole]
        return (min(all_of_it), max(all_of_it)) if len(all_of_it) > 1 else None

    def ratios(self, arm: str) -> dict[str, float]:
        """By suite, how many times less than on stock it took on an arm."""
        found = {}
        for suite in dict.fromkeys(run.suite for run in self.runs):
            stock, ours = self.seconds(suite, arms.STOCK), self.seconds(suite, arm)
            if stock and ours:
                found[suite] = stock / ours
        return found

    def seconds_left(self, plan: Sequence[tuple[str, str]]) -> float | None:
        """About how long the runs of a plan that are still to come take: as long as the same took
        before or else, for each arm, as the others took; None before anything is known."""
        means: dict[str, float] = {}
        for arm in self.arms:
            known = [run.seconds for run in self.runs if run.arm == arm]
            if known:
                means[arm] = sum(known) / len(known)
        left = [self.seconds(suite, arm) or means.get(arm) for suite, arm in plan]
        known_left = [seconds for seconds in left if seconds is not None]
        return sum(known_left) / len(known_left) * len(left) if known_left else None

    def problems(self) -> Iterator[str]:
        """Whatever failed, and whatever differs from stock."""
        expected: dict[str, dict[str, str]] = {}
        for run in self.runs:
            if run.arm == arms.STOCK:
                expected.setdefault(run.suite, run.outcomes)
        for run in self.runs:
            wrong = list(_wrong(run, expected.get(run.suite)))
            yield from wrong
            if wrong:
                yield run.tail()

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: a suite each, then the total of the suites that every arm has run."""
        others = [arm for arm in self.arms if arm != arms.STOCK]
        compared = len(others) < len(self.arms)
        header = ["file", "cases"] + ([f"{arms.STOCK} (s)"] if compared else [])
        for arm in others:
            header += [f"{arm} (s)"] + (["saved (s)", "improvement", "ratio"] if compared else [])
        rows, complete, cases = [], [], 0
        for suite in dict.fromkeys(run.suite for run in self.runs):
            count = max(len(run.outcomes) for run in self.runs if run.suite == suite)
            seconds = {arm: self.seconds(suite, arm) for arm in self.arms}
            spreads = {arm: self.spread(suite, arm) for arm in self.arms}
            rows.append([f"{suite}.py", str(count), *_cells(seconds, others, compared, spreads)])
            if None not in seconds.values():
                complete.append(seconds)
                cases += count
        total = {arm: sum(seconds[arm] or 0 for seconds in complete) for arm in self.arms}
        if complete:
            rows.append(["total", str(cases), *_cells(total, others, compared)])
        return header, rows


def _wrong(run: SuiteRun, stock: dict[str, str] | None) -> Iterator[str]:
    for name in sorted(run.outcomes.keys() | (stock or {}).keys()):
        outcome = run.outcomes.get(name, NO_OUTCOME)
        expected = stock.get(name, NO_OUTCOME) if stock is not None else outcome
        if outcome == LEFT_OUT:
            continue
        if outcome != expected:
            yield f"{run.suite}.{name}: {outcome} on {run.arm}, {expected} on {arms.STOCK}"
        elif outcome in ("FAIL", "ERROR", NO_OUTCOME, NOT_RUN, "unexpected success"):
            yield f"{run.suite}.{name}: {outcome} on {run.arm}"
    if run.code is None:
        yield f"{run.suite} on {run.arm}: not done after {SUITE_TIMEOUT:.0f} s"
    elif run.code != 0:
        yield f"{run.suite} on {run.arm}: exit status {run.code}"
    elif not run.outcomes:
        yield f"{run.suite} on {run.arm}: it ran no test"
    ran = _RAN.findall(run.output)
    if ran and int(ran[-1]) != len(run.outcomes):
        yield f"{run.suite} on {run.arm}: {ran[-1]} tests ran, {len(run.outcomes)} were understood"


def _cells(
    seconds: Mapping[str, float | None],
    others: Sequence[str],
    compared: bool,
    spreads: Mapping[str, tuple[float, float] | None] | None = None,
) -> list[str]:
    def cell(arm: str) -> str:
        around = (spreads or {}).get(arm)
        return _number(seconds.get(arm)) + (f" ({around[0]:.1f}-{around[1]:.1f})" if around else "")

    stock = seconds.get(arms.STOCK)
    cells = [cell(arms.STOCK)] if compared else []
    for arm in others:
        ours = seconds[arm]
        cells.append(cell(arm))
        if compared and stock and ours:
            saved = stock - ours
            cells += [_number(saved), f"{saved / stock:.1%}", f"{stock / ours:.1f}x"]
        elif compared:
            cells += ["", "", ""]
    return cells


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
