"""Verification of a migration: what is run and compared, what follows, interrupts, the report."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from test.conftest import ROOT, marked_processes
from torchcontinuous.migrate import __main__ as command

pytest.importorskip("libcst")

from torchcontinuous.migrate import _files, _report, _session
from torchcontinuous.migrate._files import BadInputError
from torchcontinuous.migrate._session import Session, State
from torchcontinuous.migrate._table import Table
from torchcontinuous.migrate._verify import OURS, STOCK, Case, FileRun, Row, Verification

BASE = """\
from torch.testing._internal.common_distributed import MultiProcessTestCase


class Base(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""

TEST = """\
from base import Base


class {name}(Base):
    def test_one(self):
        pass

    def test_two(self):
        pass
"""


class Project:
    """Two files of tests on one base, in memory; runs whose outcomes are made up."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in (
            ("base.py", BASE),
            ("test_a.py", TEST.format(name="TestA")),
            ("test_b.py", TEST.format(name="TestB")),
        ):
            (folder / name).write_text(text)
        self.paths = [folder / name for name in ("base.py", "test_a.py", "test_b.py")]
        self.originals = {path: _files.read(path) for path in self.paths}
        self.texts = {}
        self.ran = []
        self.outcomes = {}
        self.problem = None

    def put(self, texts):
        self.texts = dict(texts)

    def text(self, path):
        return self.texts.get(path, self.originals[path].text)

    def says(self, name, level):
        return f'isolation = "{level}"' in self.text(self.folder / name)

    def run(self, path, arm, order):
        self.ran.append((path.name, arm, order))
        name = (
            path.stem.replace("test_", "Test").replace("Testa", "TestA").replace("Testb", "TestB")
        )
        cases = {}
        for test in ("test_one", "test_two"):
            outcome = self.outcomes.get(f"{name}.{test}", "passed")
            if callable(outcome):
                outcome = outcome(arm, order, self.says(path.name, "process"))
            if isinstance(outcome, str):
                outcome = Case(outcome, "", 1.0)
            classes = ((path, name), (self.paths[0], "Base"))
            cases[f"{name}.{test}"] = Case(
                outcome.outcome, outcome.text, 1.0, outcome.leaked, classes
            )
        if self.problem and arm == OURS:
            problem = self.problem(path, self.text(path))
            if problem:
                return FileRun({}, 1.0, problem)
        return FileRun(cases, 2.0)

    def verification(self, **state):
        return Verification(self.originals, Table(), self.run, self.put, **state)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


ORDERS = ("forwards", "reversed", "shuffle:0")


def test_where_nothing_differs_each_file_runs_twice_on_stock_and_in_three_orders(project):
    rows = project.verification().verify()
    files = ("test_a.py", "test_b.py")
    assert project.ran == [
        *((name, STOCK, order) for name in files for order in ORDERS[:2]),
        *((name, OURS, order) for name in files for order in ORDERS),
    ]
    assert [(row.cases, row.levels, row.notes) for row in rows] == [(2, ["none"], [])] * 2
    assert "MultiProcContinuousTest" in project.texts[project.paths[0]]


def test_a_class_that_differs_is_raised_and_its_file_alone_runs_again(project):
    project.outcomes["TestA.test_two"] = lambda arm, order, isolated: (
        "failed" if arm == OURS and order == "reversed" and not isolated else "passed"
    )
    rows = project.verification().verify()
    assert 'isolation = "process"' in project.texts[project.paths[1]]
    assert project.paths[2] not in project.texts
    assert rows[0].levels == ["process"]
    assert rows[0].notes == [
        "TestA needs fresh processes: TestA.test_two was passed on stock, is failed (reversed)"
    ]
    assert len(project.ran) == 4 + 6 + 3 + 3, "at level group, then at process"


def test_fresh_groups_are_tried_before_fresh_processes(project):
    for test in ("test_one", "test_two"):
        project.outcomes[f"TestA.{test}"] = lambda arm, order, isolated: (
            "failed" if arm == OURS and not project.says("test_a.py", "group") else "passed"
        )
    rows = project.verification().verify()
    assert rows[0].levels == ["group"]
    assert rows[0].notes == [
        "TestA needs fresh process groups: TestA.test_one was passed on stock, is failed (forwards)"
    ]
    assert len(project.ran) == 4 + 6 + 3


def test_a_leak_raises_though_the_outcome_is_equal(project):
    project.outcomes["TestB.test_one"] = lambda arm, order, isolated: Case(
        "passed", "", 1.0, leaked=arm == OURS and not isolated
    )
    rows = project.verification().verify()
    assert [row.levels for row in rows] == [["none"], ["process"]]


def test_what_differs_at_every_level_stays_on_stock_and_its_siblings_get_the_mixin(project):
    project.outcomes["TestA.test_one"] = lambda arm, order, isolated: (
        "failed" if arm == OURS else "passed"
    )
    rows = project.verification().verify()
    assert list(project.texts) == [project.paths[2]]
    assert "class TestB(ContinuousMixin, Base):" in project.texts[project.paths[2]]
    assert [row.levels for row in rows] == [["stock"], ["none"]]
    assert rows[0].after is None
    assert "TestA stays on stock" in rows[0].notes[0]
    assert ("test_a.py", STOCK, "shuffle:0") in project.ran, "once more before it is given up"


def test_flaky_on_stock_is_told_apart(project):
    project.outcomes["TestA.test_one"] = lambda arm, order, isolated: (
        "failed" if order == "reversed" else "passed"
    )
    rows = project.verification().verify()
    assert rows[0].notes == ["TestA.test_one is flaky on stock"]
    assert rows[0].levels == ["none"]


def test_flaky_on_stock_only_the_third_time(project):
    project.outcomes["TestA.test_one"] = lambda arm, order, isolated: (
        "failed" if arm == OURS or order == "shuffle:0" else "passed"
    )
    rows = project.verification().verify()
    assert "TestA.test_one is flaky on stock" in rows[0].notes
    assert rows[0].after is not None


@pytest.mark.parametrize(
    ("stock", "ours", "equal"),
    [
        ("No CUDA", "No CUDA", True),
        ("No CUDA", "No NCCL", False),
        ("Test skipped at subprocess level, look at subprocess log for skip reason", "why", True),
    ],
)
def test_reasons_of_skips_are_compared(stock, ours, equal):
    assert Case("skipped", ours, 1).equals(Case("skipped", stock, 1)) is equal
    assert not Case("passed", "", 1).equals(Case("skipped", stock, 1))


def test_a_run_that_does_not_end_differs(project):
    project.problem = lambda path, text: (
        "its process ended early" if path.name == "test_a.py" and "isolation" not in text else None
    )
    rows = project.verification().verify()
    assert rows[0].levels == ["group"]
    assert "did not run: its process ended early" in rows[0].notes[0]


# In place


@pytest.fixture
def session(project, monkeypatch):
    """What makes a session on the project, whose runs are made up."""

    def make(resume=False):
        session = Session(project.paths, Table(), "unittest", 0, 60, resume)

        def run(path, arm, order):
            project.texts = {p: p.read_text() for p in project.paths[:3]}
            made = project.run(path, arm, order)
            session.note(path, arm, order, made)
            return made

        session.verification._run = run
        return session

    return make


def contents(project):
    return [path.read_text() for path in project.paths]


def test_files_are_written_and_nothing_else_is_left(project, session):
    before = contents(project)
    session().verify()
    after = contents(project)
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    assert sorted(p.name for p in project.folder.iterdir()) == [p.name for p in project.paths]


@pytest.mark.parametrize("number", range(10))
def test_interrupted_anywhere_files_are_as_they_were_and_resume_goes_on(project, session, number):
    before = contents(project)
    run = project.run

    def interrupted(*arguments):
        if len(project.ran) == number:
            raise KeyboardInterrupt
        return run(*arguments)

    project.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        session().verify()
    assert contents(project) == before

    project.run = run
    with pytest.raises(BadInputError, match="--resume"):
        session()
    session(resume=True).verify()
    assert len(project.ran) == len(set(project.ran)) == 10, "nothing runs twice"
    assert "MultiProcContinuousTest" in project.paths[0].read_text()
    assert not _session.STATE.exists()


def test_killed_files_are_whole_and_resume_knows_the_originals(project, session):
    """As after SIGKILL: what is on disk is all that is left."""
    first = session()
    first._state.save()
    first._put(first.verification.plan.texts)
    assert "MultiProcContinuousTest" in project.paths[0].read_text()
    session(resume=True).verify()
    assert {arm for _, arm, _ in project.ran} == {STOCK, OURS}
    first = session()
    assert first.verification.files == [], "all is migrated"


def test_a_file_that_was_edited_meanwhile_is_not_overwritten(project, session):
    session()._state.save()
    project.paths[1].write_text("# mine\n")
    with pytest.raises(BadInputError, match="changed since"):
        session(resume=True)


def test_a_file_that_cannot_be_read_is_told_and_the_rest_goes_on(project, session):
    latin = project.folder / "latin.py"
    latin.write_bytes(b"# \xe9\n")
    project.paths.append(latin)
    made = session()
    assert [error.path for error in made.bad] == [latin]
    assert made.verify()


def test_resuming_without_a_state_or_a_whole_one_is_bad_input(project):
    with pytest.raises(BadInputError, match="nothing to resume"):
        State.load()
    _session.STATE.write_text("{")
    with pytest.raises(BadInputError, match="cannot be read"):
        State.load()


# What is told


def test_report(project):
    rows = [
        Row(project.paths[1], 10, 100.0, 4.0, ["none", "process"], ["a | b"]),
        Row(project.paths[2], 5, 50.0, None, ["stock"], ["TestB stays on stock"]),
    ]
    lines = [
        [cell.strip() for cell in line.split(" | ")] for line in _report.table(rows).splitlines()
    ]
    assert lines[2][:7] == ["| test_a.py", "10", "100.0", "4.0", "96 %", "25.0x", "none, process"]
    assert lines[3][:7] == ["| test_b.py", "5", "50.0", "-", "-", "-", "stock"]
    assert lines[4][:6] == ["| **total**", "15", "150.0", "54.0", "64 %", "2.8x"]
    assert "a \\| b" in _report.table(rows)
    _report.write(Path("out.json"), rows)
    assert json.loads(Path("out.json").read_text())["total"]["saved_seconds"] == 96.0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress(monkeypatch):
    """Written over on a terminal; a line a run elsewhere."""
    for out, expected in (
        (Terminal(), "\rtest_a.py: 3/9 tests; 0 s elapsed, about 1 min 5 s left"),
        (io.StringIO(), ""),
    ):
        monkeypatch.setattr(sys, "stdout", out)
        progress = _report.Progress()
        progress.running("test_a.py", 3, 9, 65.0)
        assert out.getvalue() == expected
        progress.ended("test_a.py: 9 passed")
        assert out.getvalue().removeprefix(expected).strip() == "test_a.py: 9 passed"


# The process that runs a file

PLAIN = """\
import unittest


class TestIt(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        self.fail("no")

    def test_c(self):
        self.skipTest("why")

    def test_d(self):
        with self.subTest(x=1):
            self.fail("sub")

    @unittest.expectedFailure
    def test_e(self):
        self.fail()
"""


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
@pytest.mark.parametrize("order", ["forwards", "reversed"])
def test_what_becomes_of_each_test_is_noted(tmp_path, runner, order):
    file = tmp_path / "test_it.py"
    file.write_text(PLAIN)
    notes = tmp_path / "notes"
    arguments = [f"--order={order}", f"--runner={runner}", f"--notes={notes}"]
    arguments += [f"--folder={tmp_path}", "--module=test_it", str(file)]
    code = "from torchcontinuous.migrate._run import main; main()"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        capture_output=True,
        timeout=60,
        check=True,
    )
    run = _session.read_notes(notes, 0, None)
    outcomes = [(name[-1], case.outcome) for name, case in run.cases.items()]
    expected = [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "skipped"),
        ("d", "failed"),
        ("e", "failed as expected"),
    ]
    assert outcomes == (expected if order == "forwards" else expected[::-1])
    assert run.cases["TestIt.test_c"].text == "why"
    assert run.cases["TestIt.test_a"].classes == ((file, "TestIt"),)
    assert run.problem is None


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("time.sleep(600)", "given up after 2 s"),
        ("os._exit(3)", "its process ended early, with exit code 3"),
    ],
)
def test_a_run_that_does_not_end(project, monkeypatch, capfd, statement, problem):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = project.folder / "test_late.py"
    text = PLAIN.replace('self.fail("no")', statement)
    file.write_text(f"import os, time\nprint('said')\n{text}")
    session = Session([file], Table(), "unittest", 0, 2.0, resume=False)
    run = session._run(file, STOCK, "forwards")
    assert run.problem == problem
    assert list(run.cases) == ["TestIt.test_a"], "what had ended is known"
    told = capfd.readouterr()
    assert problem in told.out
    assert "    said\n" in told.err, "the end of what it wrote is shown"


# All of it

DIST = """\
from torch.testing._internal.common_distributed import MultiProcessTestCase


class DistTest(MultiProcessTestCase):
    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""

TESTS = """\
import os
import signal
from pathlib import Path

import state
from common import DistTest


class TestPollutes(DistTest):
    def test_first(self):
        state.seen.append(self.rank)
        self.assertEqual(len(state.seen), 1)

    def test_second(self):
        state.seen.append(self.rank)
        self.assertEqual(len(state.seen), 1)


class TestDies(DistTest):
    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {self.test_killed.__wrapped__: -signal.SIGKILL}

    def test_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)


class TestFlaky(DistTest):
    def test_now_and_then(self):
        runs = Path("runs.txt")
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        self.assertEqual(len(runs.read_text()) % 2, 1)
"""


def test_end_to_end(suites):
    """A base of the project's; a class that pollutes, one that kills a worker, a flaky test."""
    for name, text in (("common", DIST), ("state", "seen = []\n"), ("test_it", TESTS)):
        suites.write(text, f"{name}.py", header="")
    arguments = ["-m", "torchcontinuous.migrate", "--verify", ".", "--report", "out.json"]
    run = suites.python(*arguments)
    assert run.code == 0, run.output
    (file,) = json.loads((suites.folder / "out.json").read_text())["files"]
    assert (file["cases"], file["levels"]) == (4, ["none", "process"])
    assert file["notes"][0] == "TestFlaky.test_now_and_then is flaky on stock"
    assert file["notes"][1].startswith("TestPollutes needs fresh processes: TestPollutes.test_")
    assert len(file["notes"]) == 2
    texts = {path.stem: path.read_text() for path in suites.folder.glob("*.py")}
    assert "class DistTest(MultiProcContinuousTest)" in texts["common"]
    assert 'class TestPollutes(DistTest):\n    isolation = "process"\n' in texts["test_it"]
    assert '    @isolated("process")\n    def test_killed' in texts["test_it"]
    assert marked_processes(suites.mark) == []


def test_interrupted_by_a_signal(suites):
    """Files are as they were, no process is left, and what had run is kept."""
    suites.write(DIST, "common.py", header="")
    sleeps = "import time\ntime.sleep(600)\n" + TESTS
    suites.write(sleeps, "test_a.py", header="")
    process = suites.start("-m", "torchcontinuous.migrate", "--verify", ".")
    deadline = time.monotonic() + 30
    while len(marked_processes(suites.mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED, output
    assert "--resume goes on" in output
    assert (suites.folder / "common.py").read_text() == DIST
    assert (suites.folder / _session.STATE).exists()
    suites.assert_nothing_left(within=15)
