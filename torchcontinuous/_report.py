"""What one rank reports of a test, and how the ranks' reports become one verdict.

The rules are stock's (``MultiProcessTestCase._check_return_codes``): an exit code 10 of any rank
is an error, then a rank without an exit code is a time-out, then rank 0's code decides. What stock
passes over (another rank that died, ranks that disagree on skipping) is noted beside the verdict.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torchcontinuous import _hang

#: Stock's exit code of a process whose test raised (``MultiProcessTestCase.TEST_ERROR_EXIT_CODE``).
TEST_ERROR_EXIT_CODE = 10


@dataclass(frozen=True)
class Failure:
    """An exception of a test, as text: exceptions themselves never cross a process."""

    type_name: str
    message: str
    traceback: str
    is_assertion: bool


class Ending(Enum):
    """How a rank's part in a test ended."""

    REPORTED = "reported"
    DIED = "died"
    KILLED = "killed because a peer failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class RankReport:
    """One rank's part in one test.

    ``exit_code`` is what stock's process would have ended with; None while it has not.
    ``pipe`` holds what the test sent, pickled, through the pipe that stock hands to ``_run``.
    ``used_up`` says why the worker must not run another test, or is None.
    ``stack`` is the Python stack of a rank that had not ended, if it could still answer; ``silent``
    the seconds since it last wrote or reported something.
    ``group`` is how the process group that outlives tests came out of it, ``leaks`` what the test
    left changed; both only where the worker may run another test.
    ``refused``: the test was not run, since an earlier one has used the worker up.
    """

    rank: int
    ending: Ending
    exit_code: int | None
    failure: Failure | None = None
    skip_reason: str | None = None
    pipe: tuple[bytes, ...] = ()
    used_up: str | None = None
    stack: str = ""
    silent: float | None = None
    group: GroupState | None = None
    leaks: tuple[Leak, ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class Leak:
    """A change to the process that a test left behind.

    ``probe`` names what found it, ``what`` the state; ``before`` and ``after`` are short texts.
    ``restored`` is False where only new workers can undo it.
    """

    probe: str
    what: str
    before: str
    after: str
    restored: bool


@dataclass(frozen=True)
class GroupState:
    """How a rank's kept process group came out of a test.

    ``numbers`` have to be equal on all ranks for the group to serve another test; ``spent`` says
    why it must not, or is None; ``used`` is whether the test was handed it or gave it back.
    ``made`` and ``reused`` count the groups, of all kinds, that the test made on this rank, and the
    default groups that it was handed.
    """

    numbers: tuple[int, ...]
    spent: str | None = None
    used: bool = False
    made: int = 0
    reused: int = 0


class Outcome(Enum):
    """A test's outcome; FAILED is unittest's failure, ERROR its error."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """The ranks' reports merged; ``ranks`` failed, ``notes`` is what stock passes over."""

    outcome: Outcome
    text: str = ""
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def describe_exit(code: int) -> str:
    """An exit code in words: ``exit code 3``, ``SIGSEGV (exit code -11)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"{signal.Signals(-code).name} (exit code {code})"
    except ValueError:
        return f"signal {-code} (exit code {code})"


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def merge(
    reports: Sequence[RankReport],
    *,
    skips: Mapping[int, str],
    expected: int = 0,
    unchecked: bool = False,
    every_rank_counts: bool = False,
    elapsed: float = 0.0,
) -> Verdict:
    """Merge the ranks' reports, ordered by rank, into one verdict by stock's rules.

    Args:
        skips: skip exit codes and their reasons (torch's ``TEST_SKIPS``).
        expected: rank 0's declared exit code (``special_return_code_checks``).
        unchecked: the test declared that no code counts (``skip_return_code_checks``).
        every_rank_counts: any rank's death is a failure (class style), not only rank 0's.
        elapsed: seconds since the test was joined.
    """
    if not reports:
        return Verdict(Outcome.PASSED)
    if any(r.exit_code == TEST_ERROR_EXIT_CODE or r.ending is Ending.TIMED_OUT for r in reports):
        return _failed(reports, skips, elapsed, every_rank_counts)
    if unchecked:
        return Verdict(Outcome.PASSED)
    first = reports[0]
    if first.exit_code is not None and first.exit_code in skips:
        reason = first.skip_reason or skips[first.exit_code]
        return Verdict(Outcome.SKIPPED, reason, notes=_disagreements(reports, skips))
    if first.exit_code != expected:
        wanted = f"Expected exit code {expected} but got {first.exit_code} for rank 0"
        return _failed(reports, skips, elapsed, every_rank_counts, wanted)
    if expected != 0:
        return Verdict(Outcome.PASSED)
    if every_rank_counts and any(
        r.ending is Ending.DIED or r.exit_code not in {0, *skips} for r in reports
    ):
        return _failed(reports, skips, elapsed, every_rank_counts)
    return Verdict(Outcome.PASSED, notes=_disagreements(reports, skips))


def _disagreements(reports: Sequence[RankReport], skips: Mapping[int, str]) -> tuple[str, ...]:
    """What stock does not look at, since rank 0's exit code alone decides."""
    notes = []
    skipped = [r.rank for r in reports if r.exit_code in skips]
    others = [r.rank for r in reports if r.exit_code not in skips]
    if skipped and others:
        notes.append(f"{name_ranks(skipped)} skipped, {name_ranks(others)} did not")
    for report in reports[1:]:
        if report.exit_code not in (0, None) and report.exit_code not in skips:
            notes.append(f"{_what_happened(report)}, unseen by stock, which asks rank 0 only")
    return tuple(notes)


def _what_happened(report: RankReport) -> str:
    """One line on a rank that did not end well."""
    who = f"rank {report.rank}"
    if report.ending is Ending.KILLED:
        place = _hang.place_of(report.stack)
        where = f", when it {str(place).replace('at ', 'was at ', 1)}" if place is not None else ""
        return f"{who} was killed only because a peer failed{where}"
    if report.exit_code is None:
        return f"{who} did not answer"
    if report.failure is not None:
        return f"{who} raised {report.failure.type_name}: {report.failure.message}"
    if report.ending is Ending.DIED:
        return f"{who} died with {describe_exit(report.exit_code)}"
    return f"{who} ended with {describe_exit(report.exit_code)}"


def _failed(
    reports: Sequence[RankReport],
    skips: Mapping[int, str],
    elapsed: float,
    deaths_count: bool,
    wanted: str = "",
) -> Verdict:
    """The verdict on a test that failed, and its text."""
    fine = {0, *skips}
    failing = [
        r
        for r in reports
        if r.ending is Ending.TIMED_OUT
        or (r.ending is not Ending.KILLED and r.exit_code not in fine)
        or (deaths_count and r.ending is Ending.DIED)
    ] or [reports[0]]
    ranks = tuple(r.rank for r in failing)
    parts = [f"failed on {name_ranks(ranks)} of {len(reports)}"]
    if wanted:
        parts.append(wanted)
    if any(report.ending is Ending.TIMED_OUT for report in reports):
        parts.append(_where(reports, skips))
    for group in _alike([r for r in failing if r.failure is not None]):
        parts.append(_traceback_part(group))
    for report in reports:
        if report.ending is Ending.TIMED_OUT:
            # Stock's own sentence: suites look for it.
            sentence = f"Process {report.rank} terminated or timed out after {elapsed} seconds"
            parts.append(f"{sentence}\n{_stack_part(report)}")
        elif report.ending is Ending.KILLED and report.stack:
            parts.append(f"{_what_happened(report)}\n{_stack_part(report)}")
        elif report.failure is None and (report.exit_code != 0 or report in failing):
            parts.append(_what_happened(report))
    assertion = all(r.failure is not None and r.failure.is_assertion for r in failing)
    outcome = Outcome.FAILED if assertion else Outcome.ERROR
    return Verdict(outcome, "\n\n".join(part.rstrip() for part in parts) + "\n", ranks)


def _stack_part(report: RankReport) -> str:
    stack = report.stack and _hang.own_part(report.stack)
    stack = stack or "(no Python stack: the rank did not answer)"
    silent = "" if report.silent is None else f", {report.silent:.1f} s after it was last heard of"
    return f"rank {report.rank} was at{silent}:\n{stack}"


def describe_running(
    title: str, reports: Sequence[RankReport], skips: Mapping[int, str], elapsed: float
) -> str:
    """A page on a test that still runs; ranks that do, have the ending TIMED_OUT."""
    parts = [f"{title} has run for {elapsed:.1f} s.", _where(reports, skips)]
    parts += [_stack_part(r) for r in reports if r.ending is Ending.TIMED_OUT]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _where(reports: Sequence[RankReport], skips: Mapping[int, str]) -> str:
    """Who waits where at a time-out, and who is missing there."""
    alike: dict[str, list[int]] = {}
    for report in reports:
        alike.setdefault(_whereabouts(report, skips), []).append(report.rank)
    groups = sorted(alike.items(), key=lambda item: item[1])
    return _hang.describe([(name_ranks(ranks), what) for what, ranks in groups])


def _whereabouts(report: RankReport, skips: Mapping[int, str]) -> str:
    if report.ending is Ending.TIMED_OUT:
        if not report.stack:
            return "did not answer (stopped, or in native code)"
        place = _hang.place_of(report.stack)
        return str(place) if place is not None else "outside the test's own lines"
    if report.ending is Ending.REPORTED and report.exit_code in {0, *skips}:
        return "had finished the test"
    return _what_happened(report).removeprefix(f"rank {report.rank} ")


def _alike(reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Group reports that carry the same failure, in order of their first rank."""
    groups: dict[Failure | None, list[RankReport]] = {}
    for report in reports:
        groups.setdefault(report.failure, []).append(report)
    return list(groups.values())


def _traceback_part(group: Sequence[RankReport]) -> str:
    first = group[0]
    failure = first.failure
    assert failure is not None
    code = first.exit_code
    # Stock's own sentence, for the first of the ranks that failed alike.
    sentence = f"Process {first.rank} exited with error code {code} and exception:"
    ranks = name_ranks([r.rank for r in group])
    return f"{ranks}: {failure.type_name}\n{sentence}\n{failure.traceback}"
