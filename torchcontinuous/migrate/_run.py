"""The process that runs one file's tests in an order and notes what becomes of each:
``python -m torchcontinuous.migrate._run``. It knows neither stock nor us, and needs no extra."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchcontinuous._order import checked_order, ordered_by_class
from torchcontinuous.errors import StateLeakWarning

#: What a leak warning says where a test failed in used workers and passed in fresh ones.
_LEAKED = "state leaked into it"

#: Modules whose classes say nothing about a test's own.
_FOREIGN = ("torch.", "torchcontinuous.", "unittest.", "builtins", "abc", "typing", "expecttest")


class Notes:
    """What is noted, a line of JSON each, as it happens: a run may end at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._started = 0.0
        self.leaked = False

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def planned(self, number: int) -> None:
        self.write(planned=number)

    def start(self) -> None:
        self._started, self.leaked = time.monotonic(), False

    def end(self, name: str, cls: Any, outcome: str, text: str) -> None:
        self.write(
            id=name,
            classes=list(_lineage(cls)),
            outcome=outcome,
            text=text,
            seconds=time.monotonic() - self._started,
            leaked=self.leaked,
        )

    def warned(self, message: Any) -> None:
        if isinstance(message, StateLeakWarning) and _LEAKED in str(message):
            self.leaked = True


def _lineage(cls: Any) -> Iterator[list[str]]:
    """A class and what it derives from, by file and name."""
    for one in getattr(cls, "__mro__", ()):
        module = one.__module__
        if not f"{module}.".startswith(_FOREIGN):
            file = getattr(sys.modules.get(module), "__file__", None)
            if file:
                yield [str(Path(file).resolve()), one.__qualname__]


class _Result(unittest.TextTestResult):
    notes: Notes

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._outcome: tuple[str, str] | None = None
        self.notes.start()

    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        if self._outcome is not None:  # Not if it was interrupted.
            self.notes.end(_name(test), type(test), *self._outcome)

    def _note(self, test: Any, outcome: str, text: str = "") -> None:
        if isinstance(test, unittest.TestCase):
            self._outcome = (outcome, text)
        else:  # setUpModule, setUpClass: it stands for the tests that do not run.
            self.notes.start()
            self.notes.end(str(test), None, outcome, text)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", _last_line(err[1]))

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", _last_line(err[1]))

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._outcome = ("failed", _last_line(err[1]))

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._note(test, "failed as expected")

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._note(test, "passed unexpectedly")


def _name(test: Any) -> str:
    return f"{type(test).__qualname__}.{test._testMethodName}"


def _last_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _flat(suite: Any) -> Iterator[Any]:
    for test in suite:
        if isinstance(test, unittest.BaseTestSuite):
            yield from _flat(test)
        else:
            yield test


def run_unittest(module: str, order: str, notes: Notes) -> None:
    """As ``python -m unittest`` does."""
    suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
    tests = ordered_by_class(_flat(suite), order, type)
    notes.planned(len(tests))
    _Result.notes = notes
    show = warnings.showwarning

    def note(message: Any, *arguments: Any, **keywords: Any) -> None:
        notes.warned(message)
        show(message, *arguments, **keywords)

    warnings.showwarning = note
    warnings.simplefilter("always", StateLeakWarning)
    # Without warnings of its own: the runner would put its filters before this one.
    result: Any = _Result
    runner = unittest.TextTestRunner(verbosity=2, resultclass=result, warnings="ignored below")
    runner.warnings = None
    runner.run(unittest.TestSuite(tests))


class _Plugin:
    def __init__(self, order: str, notes: Notes) -> None:
        self._order, self._notes = order, notes
        self._reports: list[Any] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = ordered_by_class(items, self._order, lambda item: getattr(item, "cls", None))
        self._notes.planned(len(items))

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self._notes.warned(warning_message.message)

    def pytest_runtest_logstart(self) -> None:
        self._notes.start()
        self._reports = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    def pytest_runtest_protocol(self, item: Any) -> None:
        self._item = item

    def pytest_runtest_logfinish(self) -> None:
        outcome, text = "passed", ""
        for report in self._reports:
            if report.failed:
                outcome, text = "failed", str(report.longrepr).strip().splitlines()[-1]
            elif report.skipped and outcome == "passed":
                xfail = hasattr(report, "wasxfail")
                outcome = "failed as expected" if xfail else "skipped"
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
                text = reason.removeprefix("Skipped: ")
        name = self._item.nodeid.partition("::")[2].replace("::", ".")
        self._notes.end(name, getattr(self._item, "cls", None), outcome, text)


def run_pytest(path: Path, order: str, notes: Notes) -> None:
    """As ``python -m pytest`` does."""
    import pytest

    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-W", "always", "-q", str(path)]
    pytest.main(options, plugins=[_Plugin(order, notes)])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", type=checked_order, required=True)
    parser.add_argument("--runner", choices=("unittest", "pytest"), required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--folder", required=True, help="from which the file is imported")
    parser.add_argument("--module", required=True)
    parser.add_argument("path", type=Path)
    given = parser.parse_args()
    notes = Notes(given.notes)
    sys.argv = [str(given.path)]
    started = time.monotonic()
    try:
        if given.runner == "pytest":
            run_pytest(given.path, given.order, notes)
        else:
            if given.folder not in sys.path:
                sys.path.insert(0, given.folder)
            run_unittest(given.module, given.order, notes)
    except unittest.SkipTest as error:  # The whole module.
        notes.write(id="(module)", classes=[], outcome="skipped", text=str(error), seconds=0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        skipped = isinstance(error, SystemExit) and not error.code
        notes.write(
            id="(module)",
            classes=[],
            outcome="skipped" if skipped else "failed",
            text=_last_line(error),
            seconds=0,
        )
    notes.write(ended=time.monotonic() - started)


if __name__ == "__main__":
    main()
