"""What the command does, once its options are read."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchcontinuous.migrate import _files, _report
from torchcontinuous.migrate._files import BadInputError
from torchcontinuous.migrate._judge import LEVELS
from torchcontinuous.migrate._plan import Migration, Plan, Verdict
from torchcontinuous.migrate._project import Project
from torchcontinuous.migrate._reversal import Reversal
from torchcontinuous.migrate._session import Session
from torchcontinuous.migrate._table import Table

DONE, FOUND, MISUSED = 0, 1, 2

_NEEDS = {"group": "with fresh process groups", "process": "in fresh processes"}

LEVEL_TEXTS = {
    "none": "shares workers",
    "group": "shares workers, with fresh process groups",
    "process": "needs fresh processes",
    None: "cannot be migrated",
}


def run(given: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    paths, bad = _files.python_files(given.paths)
    table = Table(given.base)
    if given.verify:
        return _verify(given, paths, bad, table)
    project = Project(paths, table)
    plan = Reversal(project).plan() if given.revert else Migration(project).plan()
    _tell([*bad, *plan.bad])
    is_bad = bool(bad or plan.bad)
    if not given.write:
        for path, text in sorted(plan.texts.items()):
            print(diff(path, _files.read(path).text, text), end="")
    else:
        is_bad = not write(plan.texts) or is_bad
    for line in judgement_lines(plan.verdicts):
        print(line)
    print(_summary(plan, given.write))
    if is_bad:
        return MISUSED
    if given.check:
        return FOUND if plan.texts else DONE
    return FOUND if any(verdict.level is None for verdict in plan.verdicts) else DONE


def _verify(
    given: argparse.Namespace, paths: list[Path], bad: list[BadInputError], table: Table
) -> int:
    try:
        session = Session(
            paths, table, given.runner, given.seed, given.timeout, resume=given.resume
        )
    except BadInputError as error:
        print(f"{error}", file=sys.stderr)
        return MISUSED
    verification = session.verification
    bad = [*bad, *session.bad, *verification.plan.bad]
    _tell(bad)
    try:
        rows = session.verify()
    except KeyboardInterrupt:
        print("\ninterrupted: all files are as they were; --resume goes on", file=sys.stderr)
        raise
    plan = verification.plan
    for line in judgement_lines(plan.verdicts):
        print(line)
    print(_report.table(rows), end="")
    for path in given.report:
        _report.write(path, rows)
    print(_summary(plan, True))
    if bad:
        return MISUSED
    return FOUND if any(verdict.level is None for verdict in plan.verdicts) else DONE


def _tell(bad: Iterable[BadInputError]) -> None:
    """A line each, once."""
    for line in dict.fromkeys(map(str, bad)):
        print(line, file=sys.stderr)


def write(texts: dict[Path, str]) -> bool:
    """Write all files, or none; whether that was done."""
    try:
        _files.write_all({p: _files.read(p).encode(text) for p, text in texts.items()})
    except BadInputError as error:
        print(f"{error}; nothing was written", file=sys.stderr)
        return False
    return True


def diff(path: Path, before: str, after: str) -> str:
    """A unified diff."""
    name = _files.shown(path)
    lines = difflib.unified_diff(
        _lines(before), _lines(after), f"a/{name.lstrip('/')}", f"b/{name.lstrip('/')}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").splitlines(keepends=True)


def judgement_lines(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """One line a class, and under it the reasons."""
    for verdict in verdicts:
        found = verdict.found
        where = f"{_files.shown(found.module.path)}:{found.line}"
        yield f"{where}: {found.name}: {LEVEL_TEXTS[verdict.level]}{_exceptions(verdict)}"
        for sign in verdict.refusals if verdict.level is None else verdict.signs:
            needs = "" if sign.level == "none" else f" -> {sign.level!r}"
            yield f"    {sign}{needs}"


def _exceptions(verdict: Verdict) -> str:
    """The tests that need more than their class."""
    if verdict.level is None:
        return ""
    levels = verdict.judgement.test_levels.values()
    counts = [(level, sum(1 for one in levels if one == level)) for level in LEVELS]
    parts = [f"{number} of its tests {_NEEDS[level]}" for level, number in counts if number]
    return f"; {', '.join(parts)}" if parts else ""


def _summary(plan: Plan, written: bool) -> str:
    files = f"{len(plan.texts)} file{'s' * (len(plan.texts) != 1)}"
    classes = f"{len(plan.verdicts)} class{'es' * (len(plan.verdicts) != 1)}"
    refused = sum(1 for verdict in plan.verdicts if verdict.level is None)
    done = "changed" if written else "to change"
    return f"{classes}, {refused} of them cannot be migrated; {files} {done}"
