"""Telling of what tests left changed in their workers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence

from torchcontinuous import _settings
from torchcontinuous._counts import counts
from torchcontinuous._report import Leak, RankReport, name_ranks
from torchcontinuous.errors import StateLeakWarning

#: Changes that a leak warning lists, at most: the latest.
_SHOWN = 12

#: Tests and probes that were warned of already.
_warned: set[tuple[str, str]] = set()


def tell(test_id: str, reports: Iterable[RankReport]) -> None:
    """Warn of what a test left that cost its workers, once for each test and probe; list what was
    put back under ``TORCHCONTINUOUS_VERBOSE=1``."""
    changes: dict[Leak, list[int]] = {}
    spent: dict[str, list[int]] = {}
    for report in reports:
        for leak in report.leaks:
            changes.setdefault(leak, []).append(report.rank)
        if report.group is not None and report.group.spent:
            spent.setdefault(report.group.spent, []).append(report.rank)
    if changes:
        _tell_changes(test_id, changes)
    if spent and _settings.verbose():
        for why, ranks in spent.items():
            text = f"{test_id}, {name_ranks(ranks)}: the process group is not kept: {why}"
            print(f"torchcontinuous: {text}", file=sys.stderr)


def tell_late(found: Iterable[tuple[str, int, Leak]]) -> None:
    """The same for what was found after the reports: test ids, ranks and changes."""
    by_test: dict[str, dict[Leak, list[int]]] = {}
    for test_id, rank, leak in found:
        by_test.setdefault(test_id, {}).setdefault(leak, []).append(rank)
    for test_id, changes in by_test.items():
        _tell_changes(test_id, changes)


def _tell_changes(test_id: str, changes: Mapping[Leak, Sequence[int]]) -> None:
    counts.leaks += len({leak.probe for leak in changes})
    for leak, ranks in changes.items():
        text = f"{test_id}, {name_ranks(ranks)}: {_describe(leak)}"
        if leak.restored:
            if _settings.verbose():
                print(f"torchcontinuous: {text}; put back", file=sys.stderr)
        elif (test_id, leak.probe) not in _warned:
            _warned.add((test_id, leak.probe))
            text += ". The next test has new workers"
            warnings.warn(text, StateLeakWarning, stacklevel=6)


def describe(left_before: Sequence[tuple[str, int, Leak]]) -> str:
    """What earlier tests had changed, for the report on a test that failed after them."""
    changes: dict[tuple[str, Leak], list[int]] = {}
    for test_name, rank, leak in left_before:
        changes.setdefault((test_name, leak), []).append(rank)
    if not changes:
        return "The state guard saw no change by them. "
    lines = [
        f"{test_name} ({name_ranks(ranks)}): {_describe(leak)}"
        for (test_name, leak), ranks in list(changes.items())[-_SHOWN:]
    ]
    return f"The state guard saw, and put back: {'; '.join(lines)}. "


def _describe(leak: Leak) -> str:
    return f"{leak.probe}: {leak.what}: {leak.before} became {leak.after}"
