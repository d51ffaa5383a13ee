"""pytest's ``--continuous``: suites on reused workers with no edit to their files.

Loaded by pytest at every start, so that it imports nothing of torch's, or of this package's that is
not light, before the option asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from torchcontinuous import _order, _output, _settings, _summary
from torchcontinuous._counts import Counts, counts
from torchcontinuous._summary import Outcomes
from torchcontinuous._version import __version__
from torchcontinuous.errors import TorchContinuousError

#: Under which a pytest-xdist worker's totals travel.
_TOTALS = "torchcontinuous"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchcontinuous", "torch.distributed tests on reused workers")
    group.addoption(
        "--continuous",
        action="store_true",
        help="run classes that derive from torch's MultiProcessTestCase, or from its continuous "
        "class, on reused workers",
    )
    group.addoption(
        "--continuous-isolation",
        choices=_settings.LEVELS,
        help="what tests share, at most, for the whole run",
    )
    group.addoption(
        "--continuous-base",
        action="append",
        default=[],
        metavar="CLASS",
        help="a project's own copy of MultiProcessTestCase, as package.module.Class",
    )
    group.addoption(
        "--continuous-order",
        type=_order.checked_order,
        metavar="ORDER",
        help="of the tests of each class: forward, reverse, or shuffle[=SEED]",
    )
    group.addoption(
        "--continuous-compare",
        action="store_true",
        help="run on stock first, then on reused workers; print outcomes that differ, and both "
        "times",
    )
    group.addoption(
        "--continuous-outcomes",
        metavar="FILE",
        help="write each test's outcome to a file, as JSON",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.option.continuous_compare and not _is_xdist_worker(config):
        return _compare(config)
    return None


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.continuous_compare:
        return
    # Capturing is off here, and on while tests run.
    _output.terminal = os.dup(2)
    config.add_cleanup(_close_terminal)
    if option.continuous:
        if option.continuous_isolation:
            os.environ[_settings.ISOLATION] = option.continuous_isolation
        # pytest puts a project's folders there later, with the files that it collects.
        given = [str(config.rootpath), str(config.invocation_params.dir)]
        kept, sys.path[:] = list(sys.path), [*sys.path, *given]
        try:
            from torchcontinuous import _running

            _running.adopt(option.continuous_base)
        except TorchContinuousError as error:
            raise pytest.UsageError(str(error).replace("--base", "--continuous-base")) from error
        finally:
            sys.path[:] = kept
    elif option.continuous_base or option.continuous_isolation:
        raise pytest.UsageError("--continuous-base and --continuous-isolation need --continuous")
    if option.continuous or option.continuous_order or option.continuous_outcomes:
        config.pluginmanager.register(_Run(config), "torchcontinuous-run")


class _Run:
    """One run, or one pytest-xdist worker's part of it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes = Outcomes()
        self._began = time.monotonic()
        self._adopted = False

    def pytest_report_header(self) -> str | None:
        if not self._config.option.continuous:
            return None
        level = self._config.option.continuous_isolation or os.environ.get(_settings.ISOLATION)
        order = self._config.option.continuous_order
        asked = [f"isolation {level}" if level else "", f"order {order}" if order else ""]
        return ", ".join([f"torchcontinuous: {__version__}", *filter(None, asked)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self._config.option.continuous_order
        if order:
            items[:] = _order.ordered_by_class(items, order, lambda item: item.parent)
        self._adopted = any(
            hasattr(getattr(item, "cls", None), "_continuous_ticket") for item in items
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = ""
            if report.skipped and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].removeprefix("Skipped: ")
            outcome = "expected failure" if hasattr(report, "wasxfail") else report.outcome
            self._outcomes.note(report.nodeid, outcome, reason)

    def pytest_sessionfinish(self) -> None:
        self._outcomes.seconds = time.monotonic() - self._began
        if _is_xdist_worker(self._config):
            output = self._config.workeroutput  # type: ignore[attr-defined]
            output[_TOTALS] = {**vars(counts), "adopted": self._adopted}
        elif self._config.option.continuous_outcomes:
            self._outcomes.write(self._config.option.continuous_outcomes)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        totals = dict(getattr(node, "workeroutput", {}).get(_TOTALS, {}))
        self._adopted |= bool(totals.pop("adopted", False))
        for name, number in Counts(**totals).__dict__.items():
            setattr(counts, name, getattr(counts, name) + number)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._config.option.continuous:
            return
        self._outcomes.seconds = time.monotonic() - self._began
        terminalreporter.section("torchcontinuous")
        order = self._config.option.continuous_order
        for line in _summary.lines(self._outcomes, self._adopted, order):
            terminalreporter.line(line.replace("(--base)", "(--continuous-base)"))


def _close_terminal() -> None:
    copy, _output.terminal = _output.terminal, 2
    os.close(copy)


def _is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _compare(config: pytest.Config) -> int:
    """Run on stock, then on reused workers, each in a process of its own."""
    own = ("--continuous", "--continuous-compare")
    given = [str(a) for a in config.invocation_params.args if str(a) not in own]
    runs: list[Outcomes] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="torchcontinuous-compare-") as folder:
        for name in ("stock", "reused workers"):
            print(f"torchcontinuous: on {name}", flush=True)
            file = Path(folder) / f"{len(runs)}.json"
            arguments = [*given, "--continuous"] if runs else _without_ours(given)
            command = [sys.executable, "-m", "pytest", *arguments, f"--continuous-outcomes={file}"]
            status = subprocess.call(command, cwd=config.invocation_params.dir)
            runs.append(Outcomes.read(file))
    told, same = _summary.comparison(runs[0], runs[1])
    for line in told:
        print(f"torchcontinuous: {line}")
    return status if same else max(status, 1)


def _without_ours(given: list[str]) -> list[str]:
    """Arguments without those that only reused workers take, and their values."""
    ours = ("--continuous-isolation", "--continuous-base")
    kept: list[str] = []
    skip = False
    for argument in given:
        if skip:
            skip = False
        elif argument in ours:
            skip = True
        elif not argument.startswith(tuple(f"{name}=" for name in ours)):
            kept.append(argument)
    return kept
