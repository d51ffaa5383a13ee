"""Running suites as users run them: in a temporary folder, in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Seconds after which a suite that a test runs is killed, and the test fails.
SUITE_TIMEOUT = 240

#: Put into the environment of every suite: what it leaves running is found by it.
MARK = "TC_TEST_MARK"

HEADER = """
import os, sys, time, unittest, warnings
import torch
import torch.distributed as dist
from torchcontinuous import ContinuousMixin, MultiProcContinuousTest, isolated
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Spawning(MultiProcContinuousTest):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
"""


@dataclass
class Case:
    """One test of a suite that was run."""

    outcome: str
    message: str
    text: str
    stdout: str
    stderr: str
    seconds: float


@dataclass
class Run:
    """A suite that was run; its cases by test, and by class and test."""

    code: int
    output: str
    cases: dict[str, Case] = field(default_factory=dict)
    by_class: dict[tuple[str, str], Case] = field(default_factory=dict)

    def outcomes(self):
        return {name: case.outcome for name, case in self.cases.items()}


def marked_processes(mark):
    """Processes whose environment holds the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


class Suites:
    """Writes and runs suites."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mark = f"{os.getpid()}-{folder.name}-{time.monotonic()}"
        self.temp = folder / "tmp"
        self.temp.mkdir()

    def write(self, source, name="test_it.py", header=HEADER):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + textwrap.dedent(source))
        return path

    def environment(self, **extra):
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHCONTINUOUS_", "PYTEST_", "COV_"))
        }
        environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temp), MARK: self.mark}
        return environ | {name: str(value) for name, value in extra.items()}

    def start(self, *arguments, **environ):
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(**environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def python(self, *arguments, timeout=SUITE_TIMEOUT, **environ):
        """Run Python; its exit code and output."""
        process = self.start(*arguments, **environ)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"not done after {timeout} s:\n{output[-5000:]}")
        return Run(process.returncode, output)

    def unittest(self, *arguments, **environ):
        return self.python("-m", "unittest", *arguments, **environ)

    def pytest(self, *arguments, **environ):
        report = self.folder / "report.xml"
        options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        options += ["-o", "junit_logging=all", "-c", os.devnull, f"--rootdir={self.folder}"]
        run = self.python("-m", "pytest", *options, *arguments, **environ)
        if report.exists():
            for element in ElementTree.parse(report).iter("testcase"):
                name, cls = str(element.get("name")), str(element.get("classname"))
                case = run.by_class[cls.rpartition(".")[2], name] = _case(element)
                run.cases[name] = case
        return run

    def assert_nothing_left(self, within=2.0):
        """No process of ours, and no temporary file, a little after a run."""
        deadline = time.monotonic() + within
        while marked_processes(self.mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [(p.pid, p.cmdline()[:3]) for p in marked_processes(self.mark)]
        assert left == []
        foreign = ("torchinductor", "pytest")
        assert [p for p in self.temp.iterdir() if not p.name.startswith(foreign)] == []

    def clean_up(self):
        for process in marked_processes(self.mark):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


def _case(element):
    outcome, message, text = "passed", "", ""
    for child in element:
        if child.tag in ("failure", "error", "skipped"):
            outcome = {"failure": "failed"}.get(child.tag, child.tag)
            message, text = child.get("message") or "", child.text or ""
    streams = {c.tag: c.text or "" for c in element if c.tag.startswith("system-")}
    return Case(
        outcome,
        message,
        text,
        streams.get("system-out", ""),
        streams.get("system-err", ""),
        float(element.get("time", 0)),
    )


@pytest.fixture
def suites(tmp_path):
    """Suites in a temporary folder; whatever they leave running is killed afterwards."""
    suites = Suites(tmp_path)
    yield suites
    suites.clean_up()
