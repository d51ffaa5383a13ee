"""Suites on torch's own bases, migrated by changing parent and import: stock's outcomes."""

import difflib
import json
from pathlib import Path

import pytest

import torchcontinuous
from test.conftest import Suites
from torchcontinuous import MissingTorchNameError, _torch_api, bases

DATA = Path(__file__).parent / "data" / "bases"

#: By the files' name, the base that they are about.
BASES = {
    "dtensor": "DTensorTestBase",
    "fsdp": "FSDPTest",
    "sharded_tensor": "ShardedTensorTestBase",
    "distributed": "DistributedTestBase",
    "rpc": "SpawnHelper",
    "continuous": "MultiProcContinuousTest",
    "dtensor_continuous": "DTensorContinuousTestBase",
    "fsdp_continuous": "FSDPTestContinuous",
}

#: Classes that stock skips for want of devices, and that ask for the CPU, where ours runs them.
ON_CPU = ("TestFSDP.", "TestFSDPContinuous.")

#: What these come to there; the rest of them passes.
NOT_PASSED = {"test_needs_two_devices": "skipped", "test_skips": "skipped", "test_fails": "failed"}


def outcomes(file):
    tests = json.loads(file.read_text())["tests"]
    return {name.partition(".")[2]: test["outcome"] for name, test in tests.items()}


#: torch's own continuous class makes an error of a skip that is raised in a worker, and leaves out
#: what follows.
OWN = ("TestContinuous.", "TestDTensorContinuous.")


def expected(name):
    """Stock's outcomes (``stock_NAME.json``: recorded by ``python -m torchcontinuous --stock``)."""
    file = DATA / f"stock_{name}.json"
    found = outcomes(file)
    left_out = [
        test.partition(".")[2]
        for test, told in json.loads(file.read_text())["tests"].items()
        if told["reason"].startswith("Previous test failed")
    ]
    for test in found:
        if test.startswith(OWN):
            assert (test in left_out) <= (found[test] == "skipped")
            if test in left_out:
                found[test] = "passed"
            elif test.endswith("test_skips"):
                assert found[test] == "failed"
                found[test] = "skipped"
        if test.startswith(ON_CPU):
            assert found[test] == "skipped"
            found[test] = NOT_PASSED.get(test.rpartition(".")[2], "passed")
    return found


@pytest.mark.parametrize("name", BASES)
def test_stock_outcomes(name, suites):
    file = suites.folder / "outcomes.json"
    suites.write("", f"continuous_{name}.py", header=(DATA / f"continuous_{name}.py").read_text())
    run = suites.python("-m", "torchcontinuous", f"--outcomes={file}", f"continuous_{name}")
    assert len(expected(name)) >= 10
    assert outcomes(file) == expected(name), run.output[-5000:]
    assert "StateLeakWarning" not in run.output
    suites.assert_nothing_left()


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_only_parent_and_import_differ(name, base):
    """The base's name is the same, so that only its import is another."""
    stock, ours = (
        (DATA / f"{kind}_{name}.py").read_text().splitlines() for kind in ("stock", "continuous")
    )
    changed = [
        line
        for line in difflib.unified_diff(stock, ours, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    added = [line[1:].strip() for line in changed if line[0] == "+"]
    assert f"from torchcontinuous import {base}" in added
    words = ("from ", "import ", ")", "")
    names = {line[1:].strip(" ,") for line in changed}
    rest = [n for n in names if not n.startswith(words[:3]) and n and not n.isidentifier()]
    assert rest == []


def test_every_base_has_its_suites():
    mixins = {"MultiProcContinuousTest"}
    assert set(BASES.values()) - mixins == set(bases._BASES)


def test_a_base_that_this_torch_lacks(monkeypatch):
    """Its name says so; the others work."""
    module = "torch.testing._internal.common_fsdp"
    monkeypatch.setitem(_torch_api._TEST_BASES, "FSDPTest", f"{module}_of_another_torch")
    monkeypatch.delitem(vars(bases), "FSDPTest", raising=False)
    with pytest.raises(MissingTorchNameError, match=r"another_torch\.FSDPTest"):
        torchcontinuous.FSDPTest
    assert torchcontinuous.DTensorTestBase.__name__ == "DTensorTestBase"


#: What torch's own continuous class gets wrong, as written for it: only the import is another.
FAULTS = """
class Base(MultiProcContinuousTest):
    world_size = 2
    noted = os.environ["NOTED"]

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def note(self, what):
        with open(f"{self.noted}-{type(self).__name__}", "a") as file:
            print(self._testMethodName, self.rank, what, file=file)

class TestFailure(Base):
    def test_1_fails(self): self.assertEqual(self.rank, 5)
    def test_2(self): dist.barrier()
    def test_3(self): dist.barrier()

class TestConcrete(Base):
    def test_1(self): self.note(f"{os.getpid()} {dist.get_world_size()}")

class TestDerived(TestConcrete):
    world_size = 3
    def test_2(self): self.note(f"{os.getpid()} {dist.get_world_size()}")

class TestSkips(Base):
    def test_1_raised(self): raise unittest.SkipTest("its own reason")
    def test_2_exited(self): sys.exit(75)
    def test_3_first_rank_only(self):
        if self.rank == 0:
            raise unittest.SkipTest("rank 0 skips")
        self.fail("rank 1 fails")
    def test_4_after_it(self): dist.barrier()

class TestCrash(Base):
    def test_1_crashes(self):
        if self.rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()
    def test_2_hangs(self):
        if self.rank == 1:
            time.sleep(600)
        dist.barrier()
    def test_3(self): dist.barrier()

class TestFixtures(Base):
    setup_in_workers = True
    def setUp(self):
        super().setUp()
        self.note("setUp")
    def tearDown(self):
        self.note("tearDown")
        super().tearDown()
    def test_1(self): self.note("body")
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """One run of all of them."""
    suites = Suites(tmp_path_factory.mktemp("faults"))
    suites.write(FAULTS)
    noted = str(suites.folder / "noted")
    limit = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
    run = suites.pytest("test_it.py", **{"NOTED": noted, limit: 5})
    yield suites, run
    suites.clean_up()


def of_class(run, name):
    """Outcomes by test, of one class of the run."""
    return {test: case.outcome for (cls, test), case in run.by_class.items() if cls == name}


def notes_of(suites, name):
    return [line.split() for line in (suites.folder / f"noted-{name}").read_text().splitlines()]


def test_what_follows_a_failure_runs(faults):
    found = of_class(faults[1], "TestFailure")
    assert found == {"test_1_fails": "failed", "test_2": "passed", "test_3": "passed"}


def test_a_subclass_of_a_test_class_has_a_pool_of_its_own(faults):
    suites, run = faults
    assert set(of_class(run, "TestDerived").values()) == {"passed"}
    concrete, derived = notes_of(suites, "TestConcrete"), notes_of(suites, "TestDerived")
    assert [len(concrete), len(derived)] == [2, 6]
    assert {line[3] for line in concrete} == {"2"}
    assert {line[3] for line in derived} == {"3"}
    assert not {line[2] for line in concrete} & {line[2] for line in derived}


def test_a_skip_is_a_skip(faults):
    found = of_class(faults[1], "TestSkips")
    assert found["test_1_raised"] == found["test_2_exited"] == "skipped"
    assert "its own reason" in faults[1].by_class["TestSkips", "test_1_raised"].message


def test_no_result_of_rank_1_is_left_over_when_rank_0_skips(faults):
    """A failure on another rank is one, and is not taken for the next test's."""
    found = of_class(faults[1], "TestSkips")
    assert found["test_3_first_rank_only"] == "failed"
    assert "rank 1 fails" in faults[1].by_class["TestSkips", "test_3_first_rank_only"].text
    assert found["test_4_after_it"] == "passed"


def test_a_crash_is_seen_at_once(faults):
    case = faults[1].by_class["TestCrash", "test_1_crashes"]
    assert case.outcome in ("failed", "error")
    assert "SIGKILL" in case.text
    assert "timed out" not in case.text


def test_nothing_joins_without_limit(faults):
    case = faults[1].by_class["TestCrash", "test_2_hangs"]
    assert case.outcome in ("failed", "error")
    assert "timed out" in case.text
    assert faults[1].by_class["TestCrash", "test_3"].outcome == "passed"
    faults[0].assert_nothing_left()


def test_fixtures_in_workers_where_asked_for(faults):
    found = {}
    for _, rank, what in notes_of(faults[0], "TestFixtures"):
        found.setdefault(rank, []).append(what)
    whole = ["setUp", "body", "tearDown"]
    assert found == {"-1": ["setUp", "tearDown"], "0": whole, "1": whole}
