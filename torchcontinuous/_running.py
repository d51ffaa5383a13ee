"""``python -m torchcontinuous``: unittest's command, with a suite's classes on reused workers."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchcontinuous import _order, _settings, _summary
from torchcontinuous._summary import Outcomes
from torchcontinuous.errors import TorchContinuousError

PROGRAM = "python -m torchcontinuous"

#: The exit status for arguments that cannot be understood, as argparse's and unittest's.
MISUSED = 2


def parser() -> argparse.ArgumentParser:
    """What this command takes besides unittest's arguments."""
    options = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] [all arguments of python -m unittest]\n"
        f"       {PROGRAM} bisect TEST",
        description="Runs tests as python -m unittest does, with no edit to their files: classes "
        "that derive from torch's MultiProcessTestCase, or from its continuous class, run on "
        "reused workers. 'bisect --help' tells of the search for the origin of a leak.",
        epilog="What else is given goes to unittest: names of modules, classes and tests, "
        "discover, -v, -f, -b, -k and the rest (python -m unittest --help).",
        allow_abbrev=False,
        add_help=False,
    )
    options.add_argument("-h", "--help", action="store_true", help="show this help and unittest's")
    options.add_argument(
        "--isolation", choices=_settings.LEVELS, help="what tests share, at most, for the whole run"
    )
    options.add_argument(
        "--order",
        type=_order.checked_order,
        help="of the tests of each class: forward, reverse, or shuffle[=SEED], which also shuffles "
        "classes",
    )
    options.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="CLASS",
        help="a project's own copy of MultiProcessTestCase, as package.module.Class",
    )
    options.add_argument(
        "--compare",
        action="store_true",
        help="run on stock first, then on reused workers; print outcomes that differ, and both "
        "times",
    )
    options.add_argument("--stock", action="store_true", help="run on stock, as the files stand")
    options.add_argument(
        "--durations", type=_number, default=0, metavar="N", help="show the N slowest tests"
    )
    options.add_argument(
        "--outcomes", metavar="FILE", help="write each test's outcome to a file, as JSON"
    )
    return options


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"give a number of tests, not {text!r}")
    return int(text)


def run(arguments: Sequence[str]) -> int:
    """Run tests; the exit status, which is unittest's own."""
    options, rest = parser().parse_known_args(arguments)
    if options.help:
        parser().print_help()
        print("\nunittest's own arguments:\n")
        rest = ["--help"]
    elif options.compare:
        return _compare(arguments)
    if options.isolation:
        os.environ[_settings.ISOLATION] = options.isolation
    sys.argv[:] = [PROGRAM, *rest]
    try:
        if not options.stock and not options.help:
            adopt(options.base)
    except TorchContinuousError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return MISUSED
    outcomes = Outcomes()
    runner = _runner(outcomes, options.order)
    try:
        unittest.main(module=None, argv=sys.argv, testRunner=runner)
        status = 0  # Not reached: main exits.
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    if not runner.ran:
        return status
    if options.outcomes:
        outcomes.write(options.outcomes)
    for line in outcomes.slowest(options.durations):
        print(line, file=sys.stderr)
    if not options.stock:
        for line in _summary.lines(outcomes, runner.adopted, options.order):
            print(f"torchcontinuous: {line}", file=sys.stderr)
    return status


def adopt(names: Sequence[str]) -> None:
    """Have classes that are made from here on run on reused workers."""
    from torchcontinuous import _launcher

    if _launcher.may_start():
        # It imports torch beside this process, which is about to do the same.
        _launcher.launcher().start_early()
    from torchcontinuous import _adoption

    _adoption.adopt(names)


def _compare(arguments: Sequence[str]) -> int:
    """Run on stock, then on reused workers, each in a process of its own."""
    given = [argument for argument in arguments if argument != "--compare"]
    runs: list[Outcomes] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="torchcontinuous-compare-") as folder:
        for name, more in (("stock", ["--stock"]), ("reused workers", [])):
            print(f"torchcontinuous: on {name}", file=sys.stderr, flush=True)
            file = Path(folder) / f"{len(runs)}.json"
            command = [sys.executable, "-m", "torchcontinuous", *more, f"--outcomes={file}", *given]
            status = subprocess.call(command)
            runs.append(Outcomes.read(file))
    told, same = _summary.comparison(*runs)
    for line in told:
        print(f"torchcontinuous: {line}", file=sys.stderr)
    return status if same else max(status, 1)


class _Result(unittest.TextTestResult):
    """Notes each test's outcome and time besides."""

    outcomes: Outcomes

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: Any) -> None:
        self.outcomes.durations[test.id()] = time.monotonic() - self._began
        super().stopTest(test)

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.outcomes.note(test.id(), _summary.PASSED)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self.outcomes.note(test.id(), _summary.FAILED)

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.outcomes.note(test.id(), _summary.FAILED)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcomes.note(test.id(), _summary.FAILED)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcomes.note(test.id(), _summary.SKIPPED, reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self.outcomes.note(test.id(), "expected failure")

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.outcomes.note(test.id(), "unexpected success")


def _runner(noted: Outcomes, order: str | None) -> Any:
    """A class of runners, as ``unittest.main`` takes it; it says afterwards whether it ran."""

    class Result(_Result):
        outcomes = noted

    class Runner(unittest.TextTestRunner):
        resultclass: Any = Result
        ran = False
        adopted = False

        def run(self, test: Any) -> Any:
            tests = list(_flat(test))
            Runner.ran = True
            Runner.adopted = any(hasattr(type(t), "_continuous_ticket") for t in tests)
            if order is not None:
                test = unittest.TestSuite(_order.ordered_by_class(tests, order, type))
            began = time.monotonic()
            try:
                return super().run(test)
            finally:
                noted.seconds = time.monotonic() - began

    return Runner


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for test in suite if isinstance(suite, unittest.BaseTestSuite) else [suite]:
        if isinstance(test, unittest.BaseTestSuite):
            yield from _flat(test)
        else:
            yield test
