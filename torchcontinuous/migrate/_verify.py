"""Running a project's tests on stock, then migrated, until nothing differs.

``Verification`` decides what is run, compares, and raises or reverts classes; how a file is run and
where files are written is given to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchcontinuous import _order
from torchcontinuous.migrate._files import Text
from torchcontinuous.migrate._module import ClassDef
from torchcontinuous.migrate._plan import Migration, Plan, Verdict
from torchcontinuous.migrate._project import Project
from torchcontinuous.migrate._table import Table

STOCK, OURS = "stock", "migrated"

#: What stock says of every skip that was raised in a worker; here it keeps its own text.
_GENERIC = "Test skipped at subprocess level, look at subprocess log for skip reason"

#: The next level for a class that differs at one, and what it gives the class anew.
_ABOVE = {"none": "group", "group": "process"}
_FRESH = {"group": "fresh process groups", "process": "fresh processes"}

ClassKey = tuple[Path, str]


@dataclass(frozen=True)
class Case:
    """What became of a test.

    Attributes:
        text: the reason of a skip, the last line of a failure.
        leaked: it failed in used workers, and passed in fresh ones.
        classes: its class and what that derives from.
    """

    outcome: str
    text: str
    seconds: float
    leaked: bool = False
    classes: tuple[ClassKey, ...] = ()

    def equals(self, stock: Case) -> bool:
        """Whether it is what stock gave: the outcome, and of a skip the reason."""
        if self.outcome != stock.outcome:
            return False
        return self.outcome != "skipped" or self.text == stock.text or stock.text == _GENERIC


@dataclass(frozen=True)
class FileRun:
    """One run of a file.

    Attributes:
        problem: why it did not come to its end, if so.
    """

    cases: Mapping[str, Case]
    seconds: float
    problem: str | None = None


@dataclass
class Row:
    """A file in the report."""

    path: Path
    cases: int
    before: float
    after: float | None
    levels: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Difference:
    name: str
    owner: ClassKey | None
    text: str


Run = Callable[[Path, str, str], FileRun]
"""Runs a file: its path, the arm, the order."""


class Verification:
    """Finds the changes with which nothing differs.

    Args:
        originals: the texts of all files, as they were.
        run: runs one file.
        put: sees to it that the files given have these texts, and all others their original ones.
        runs: what has been run already; it is added to.
        levels: classes that have been raised; it is added to.
        reverted: classes that have been found to differ at every level; it is added to.
    """

    def __init__(
        self,
        originals: Mapping[Path, Text],
        table: Table,
        run: Run,
        put: Callable[[Mapping[Path, str]], None],
        seed: int = 0,
        runs: dict[str, FileRun] | None = None,
        levels: dict[ClassKey, str] | None = None,
        reverted: dict[ClassKey, str] | None = None,
    ) -> None:
        self._project = Project(list(originals), table, originals)
        self._originals = originals
        self._run = run
        self._put = put
        self._shuffle = f"shuffle:{seed}"
        self._runs = runs if runs is not None else {}
        self.levels = levels if levels is not None else {}
        self.reverted = reverted if reverted is not None else {}
        self._raised: dict[ClassKey, str] = {}
        self.plan = self._planned()
        self.files = list(self._files())

    def _planned(self) -> Plan:
        return Migration(self._project, self.levels, self.reverted).plan()

    def _files(self) -> Iterator[Path]:
        """Those with tests of classes that are migrated, or to be."""
        for path in self._originals:
            if any(
                verdict.found.module.path == path
                and verdict.level is not None
                and self._has_tests(verdict.found)
                for verdict in self.plan.verdicts
            ):
                yield path

    def _has_tests(self, found: ClassDef) -> bool:
        if any(one.tests for one in self._project.ancestry(found)):
            return True
        # Its tests may come from a class that is not the project's.
        derived = any(found in self._project.parents(v.found) for v in self.plan.verdicts)
        return not derived and len(found.bases) > 1

    # What is run

    def verify(self) -> list[Row]:
        """Run all there is to run; what is left in place is the last plan. A row for each file."""
        for path in self.files:
            for order in (_order.FORWARDS, _order.REVERSED):
                self._get(path, STOCK, order)
        while True:
            for path in self._migrated():
                for order in (_order.FORWARDS, _order.REVERSED, self._shuffle):
                    self._get(path, OURS, order)
            if not self._escalate():
                self._put(self.plan.texts)
                return [self._row(path) for path in self.files]
            self.plan = self._planned()

    def _migrated(self) -> list[Path]:
        return [path for path in self.files if self._is_migrated(path)]

    def _is_migrated(self, path: Path) -> bool:
        return any(verdict.level is not None for verdict in self._verdicts(path))

    def _verdicts(self, path: Path) -> list[Verdict]:
        return [v for v in self.plan.verdicts if v.found.module.path == path]

    def remaining(self) -> list[tuple[Path, str, str]]:
        """What is still to be run, as far as is known."""
        wanted = [
            (path, STOCK, order)
            for path in self.files
            for order in (_order.FORWARDS, _order.REVERSED)
        ] + [
            (path, OURS, order)
            for path in self._migrated()
            for order in (_order.FORWARDS, _order.REVERSED, self._shuffle)
        ]
        return [one for one in wanted if self.key(*one) not in self._runs]

    def _get(self, path: Path, arm: str, order: str) -> FileRun:
        key = self.key(path, arm, order)
        if key not in self._runs:
            self._put({} if arm == STOCK else self.plan.texts)
            self._runs[key] = self._run(path, arm, order)
        return self._runs[key]

    def key(self, path: Path, arm: str, order: str) -> str:
        """Names a run by what it depends on: the file, and those that its classes come from."""
        paths = {path} | {
            one.module.path
            for verdict in self._verdicts(path)
            for one in self._project.ancestry(verdict.found)
        }
        digest = hashlib.sha256()
        for one in sorted(paths):
            text = self._originals[one].text if one in self._originals else ""
            digest.update((self.plan.texts.get(one, text) if arm == OURS else text).encode())
        return f"{path}|{arm}|{order}|{digest.hexdigest()[:16]}"

    # What is compared

    def _flaky(self, path: Path) -> set[str]:
        """Tests that stock itself gives more than one outcome."""
        first = self._get(path, STOCK, _order.FORWARDS)
        others = [self._get(path, STOCK, _order.REVERSED)]
        again = self._runs.get(self.key(path, STOCK, self._shuffle))
        others += [again] if again is not None else []
        return {
            name
            for other in others
            for name in {*first.cases, *other.cases}
            if name not in first.cases
            or name not in other.cases
            or not other.cases[name].equals(first.cases[name])
        }

    def _differences(self, path: Path) -> list[_Difference]:
        stock = self._get(path, STOCK, _order.FORWARDS)
        flaky = self._flaky(path)
        found = {}
        for order in (_order.FORWARDS, _order.REVERSED, self._shuffle):
            ours = self._get(path, OURS, order)
            for name in {**stock.cases, **ours.cases}:
                before, after = stock.cases.get(name), ours.cases.get(name)
                text = _difference(before, after, ours.problem)
                if text is not None and name not in flaky and name not in found:
                    known = before or after
                    assert known is not None
                    owner = self._owner(known)
                    found[name] = _Difference(name, owner, f"{text} ({order})")
        return list(found.values())

    def _owner(self, case: Case) -> ClassKey | None:
        known = {(v.found.module.path, v.found.name) for v in self.plan.verdicts}
        return next((key for key in case.classes if key in known), None)

    # What follows

    def _escalate(self) -> bool:
        """Raise the classes that differ, or revert them; whether there were any."""
        changed = False
        for path in self._migrated():
            for difference in self._differences(path):
                owners = [difference.owner] if difference.owner else self._all(path)
                for owner in owners:
                    changed = self._escalate_class(path, owner, difference) or changed
        return changed

    def _all(self, path: Path) -> list[ClassKey]:
        return [(path, verdict.found.name) for verdict in self._verdicts(path)]

    def _escalate_class(self, path: Path, owner: ClassKey, difference: _Difference) -> bool:
        verdict = next(
            v for v in self.plan.verdicts if (v.found.module.path, v.found.name) == owner
        )
        note = f"{difference.name} {difference.text}"
        if verdict.level is None or owner in self.reverted:
            return False
        above = _ABOVE.get(verdict.level)
        if above is not None:
            if self.levels.get(owner) != above:
                self.levels[owner] = above
                self._raised[owner] = note
            return True
        # Once more on stock, before it is given up.
        self._get(path, STOCK, self._shuffle)
        if difference.name in self._flaky(path):
            return True
        self.reverted[owner] = note
        return True

    # What is told

    def _row(self, path: Path) -> Row:
        before = self._get(path, STOCK, _order.FORWARDS)
        verdicts = self._verdicts(path)
        levels = [verdict.level or "stock" for verdict in verdicts]
        isolated = [x for verdict in verdicts for x in verdict.judgement.test_levels.values()]
        row = Row(path, len(before.cases), before.seconds, None, sorted({*levels, *isolated}))
        if self._is_migrated(path):
            row.after = self._get(path, OURS, _order.FORWARDS).seconds
        for name in sorted(self._flaky(path)):
            row.notes.append(f"{name} is flaky on stock")
        for verdict in verdicts:
            for one in self._project.ancestry(verdict.found):
                key = (one.module.path, one.name)
                if key in self.levels and key not in self.reverted:
                    why = self._raised.get(key, "its tests differed")
                    row.notes.append(f"{one.name} needs {_FRESH[self.levels[key]]}: {why}")
                if key in self.reverted:
                    row.notes.append(f"{one.name} stays on stock: {self.reverted[key]}")
            if verdict.level is None and not row.notes:
                row.notes.append(f"{verdict.found.name} stays on stock: {verdict.refusals[0].text}")
        row.notes = list(dict.fromkeys(row.notes))
        return row


def _difference(before: Case | None, after: Case | None, problem: str | None) -> str | None:
    if after is None:
        return f"did not run: {problem or 'it is gone'}"
    if before is None:
        return "did not run on stock"
    if after.leaked:
        return "failed in used workers only"
    if after.equals(before):
        return None
    return f"was {_told(before)} on stock, is {_told(after)}"


def _told(case: Case) -> str:
    return f"{case.outcome} ({case.text})" if case.text else case.outcome


def totals(rows: Sequence[Row]) -> Row:
    """The sum of rows; files that stay on stock take as long as before."""
    after = sum(row.before if row.after is None else row.after for row in rows)
    return Row(Path("total"), sum(r.cases for r in rows), sum(r.before for r in rows), after, [])
