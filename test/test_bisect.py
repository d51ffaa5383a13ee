"""``python -m torchcontinuous bisect``: the search in memory, and the command as users run it."""

import json
import math
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from test.suites import order
from torchcontinuous import __main__ as command
from torchcontinuous._bisect import minimise
from torchcontinuous._order import ordered

#: Seconds for one search in a small suite, on a loaded machine.
SEARCH_SECONDS = 120

#: Seconds in which an id is answered that needs no torch to be seen as bad.
ANSWER_SECONDS = 15

#: Two of ten tests leave something outside their own module that together fails the last.
SUITE = """
    import left

    class Test(Spawning):
        def test_0(self): print("noise")
        def test_1(self): left.BEHIND["1"] = os.getpid()
        def test_2(self): pass
        def test_3(self): pass
        def test_4(self): pass
        def test_5(self): pass
        def test_6(self): left.BEHIND["6"] = os.getpid()
        def test_7(self): pass
        def test_8(self): pass
        def test_9(self): self.assertNotEqual(sorted(left.BEHIND), ["1", "6"])
"""


class Asked:
    """A predicate that fails when all culprits are there, and counts how often it is asked."""

    def __init__(self, *culprits):
        self.culprits = set(culprits)
        self.subsets = []

    def __call__(self, subset):
        assert subset == sorted(subset)
        self.subsets.append(tuple(subset))
        return self.culprits <= set(subset)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 64, 285])
def test_one_culprit_anywhere(count):
    for culprit in range(count):
        fails = Asked(culprit)
        assert minimise(range(count), fails) == [culprit]
        assert len(fails.subsets) <= 2 * math.ceil(math.log2(count)) + 1


@pytest.mark.parametrize("culprits", [(0, 9), (4, 5), (1, 6), (0, 1, 8), tuple(range(10))])
def test_several_culprits(culprits):
    fails = Asked(*culprits)
    assert minimise(range(10), fails) == list(culprits)
    assert len(set(fails.subsets)) == len(fails.subsets)  # None is asked for twice,
    assert () not in fails.subsets  # nor what is known.
    assert tuple(range(10)) not in fails.subsets


def test_two_culprits_among_many_take_few_steps():
    fails = Asked(40, 200)
    assert minimise(range(285), fails) == [40, 200]
    assert len(fails.subsets) <= 4 * math.ceil(math.log2(285))


def test_a_test_that_cleans_up_is_left_out():
    # 2 undoes what 1 did, unless 3 comes as well; either answer has no test to spare.
    def fails(subset):
        return 1 in subset and (2 not in subset or 3 in subset)

    assert minimise(range(6), fails) == [1]


def test_nothing_and_equal_items():
    assert minimise([], lambda _: pytest.fail("asked")) == []
    assert minimise("aab", lambda s: s.count("a") == 2) == ["a", "a"]


def test_orders():
    assert ordered("abc", "forwards") == ["a", "b", "c"]
    assert ordered("abc", "reversed") == ["c", "b", "a"]
    shuffled = ordered(range(50), "shuffle:7")
    assert shuffled == ordered(range(50), "shuffle:7") != ordered(range(50), "shuffle:8")
    assert sorted(shuffled) == list(range(50))
    for bad in ("", "shuffle", "shuffle:", "backwards"):
        with pytest.raises(ValueError, match="is no order"):
            ordered("abc", bad)


def test_order_of_a_suite(monkeypatch):
    """Within each class; of the classes too where they are shuffled."""
    items = [SimpleNamespace(cls=cls, name=f"{cls}{i}") for cls in "ABCDE" for i in range(4)]

    def names(value):
        monkeypatch.setenv(order.VARIABLE, value)
        changed = list(items)
        order.pytest_collection_modifyitems(changed)
        return [item.name for item in changed]

    plain = [item.name for item in items]
    assert names("forwards") == plain
    assert names("reversed")[:5] == ["A3", "A2", "A1", "A0", "B3"]
    shuffled = names("shuffle:1")
    assert sorted(shuffled) == plain
    classes = [name[0] for name in shuffled[::4]]
    assert classes == ordered("ABCDE", "shuffle:1") != list("ABCDE")
    assert [name[0] for name in shuffled] == [cls for cls in classes for _ in range(4)]


def test_arguments(capsys):
    assert command.main(["--help"]) == 0
    assert "bisect" in capsys.readouterr().out
    for bad in (["bisect"], ["bisect", "--orde", "reversed", "a"], ["bisect", "--order", "x", "a"],
                ["bisect", "a", "--order", "reversed", "--from", "b"]):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            command.main(bad)
        assert caught.value.code == 2


def bisect(suites, *arguments, timeout=SEARCH_SECONDS, **environ):
    return suites.python("-m", "torchcontinuous", "bisect", *arguments, timeout=timeout, **environ)


#: Several searches in one interpreter: each costs an import of torch otherwise.
SEVERAL = """
import json, sys
from torchcontinuous.__main__ import main
sys.path.insert(0, "")
for arguments in json.loads(sys.argv.pop()):
    print("exit status", main(["bisect", *arguments]), flush=True)
"""


def bisect_each(suites, expected, code):
    """Search with each key of ``expected``; the output of each, which holds what is expected."""
    run = suites.python(
        "-c", SEVERAL, json.dumps(list(expected)), timeout=SEARCH_SECONDS
    )  # fmt: skip
    assert run.code == 0, run.output
    outputs = re.split(r"(?<=exit status \d)\n", run.output)[:-1]
    for (arguments, answers), output in zip(expected.items(), outputs, strict=True):
        for answer in (*answers, f"exit status {code}"):
            assert answer in output, arguments
        assert "Traceback" not in output
        assert "To reproduce" not in output


@pytest.fixture
def suite(suites):
    (suites.folder / "left.py").write_text("BEHIND = {}\n")
    suites.write(SUITE)
    return suites


def reproduce(suites, output, **environ):
    """Run the command line that a search printed, in a shell, from the same folder."""
    line = re.search(r"To reproduce:\n  (.*)\n", output).group(1)
    return subprocess.run(
        line, shell=True, cwd=suites.folder, env=suites.environment(**environ),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SEARCH_SECONDS,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "runner"), [("test_it.Test.", "unittest"), ("test_it.py::Test::", "pytest")]
)
def test_two_tests_that_leak_together(suite, prefix, runner):
    """They are found, and the line printed fails in the same way; the user's level is no bar."""
    environ = {"TORCHCONTINUOUS_ISOLATION": "process", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    run = bisect(suite, prefix + "test_9", **environ)
    assert run.code == 0, run.output
    assert "on its own: passes\n" in run.output
    assert "after 9 tests: fails" in run.output
    assert "fails after 2 tests of 9" in run.output
    assert "noise" not in run.output
    assert "Traceback" not in run.output
    again = reproduce(suite, run.output, **environ)
    assert f"-m {runner} {prefix}test_1 {prefix}test_6 {prefix}test_9\n" in run.output
    assert again.returncode == 1
    assert "test_9 failed in used workers and passed in fresh ones" in again.stdout
    suite.assert_nothing_left()


def test_tests_that_come_later(suite):
    """In the loader's order they come after the test; in the run that failed, before."""
    suite.write(SUITE.replace("test_9", "test_00"))
    run = bisect(suite, "test_it.Test.test_00", "-v")
    assert run.code == 0, run.output
    assert "also those that come later" in run.output
    assert "test_it.Test.test_1 test_it.Test.test_6 test_it.Test.test_00\n" in run.output
    assert "noise" in run.output  # Asked for.
    run = bisect(suite, "test_it.Test.test_00", "--order", "reversed")
    assert "test_it.Test.test_6 test_it.Test.test_1 test_it.Test.test_00\n" in run.output
    given = ["test_6", "test_it.Test.test_2", "test_it.py::Test::test_1"]
    run = bisect(suite, "test_it.Test.test_00", "--from", *given)
    assert run.code == 0, run.output
    assert "fails after 2 tests of 3" in run.output
    assert "test_it.Test.test_6 test_it.Test.test_1 test_it.Test.test_00\n" in run.output
    suite.assert_nothing_left()


def test_nothing_to_find(suites):
    """A test that fails anyway, one that nothing fails, one that another's leak hides."""
    suites.write(
        """
        class Test(Spawning):
            def test_1(self): sys.modules["left"] = None
            def test_2(self): self.assertNotIn("left", sys.modules)
            def test_3(self): pass
            def test_4(self): self.fail("always")
            def test_5(self): self.skipTest("always")
            @isolated("process")
            def test_6(self): pass

        class Alone(Spawning):
            def test_1(self): pass

        class Fresh(Spawning):
            isolation = "process"
            def test_1(self): pass
            def test_2(self): pass

        class Broken(Spawning):
            @classmethod
            def setUpClass(cls): raise ValueError("broken")
            def test_1(self): pass
        """
    )
    expected = {
        "Test.test_3": ["not seen to fail", "leaked into test_2", "bisect test_it.Test.test_2"],
        "Test.test_4": ["fails on its own: nothing leaked", "unittest test_it.Test.test_4"],
        "Test.test_5": ["skipped on its own"],
        "Test.test_6": ["runs at level 'process'"],
        "Alone.test_1": ["only test of its class"],
        "Fresh.test_2": ["runs at level 'process'"],
        "Broken.test_1": ["class could not be set up"],
    }
    bisect_each(suites, {(f"test_it.{test}",): a for test, a in expected.items()}, 1)
    suites.assert_nothing_left()


def test_a_set_that_fails_only_once(suites):
    """A step fails, and nothing after it: what was found is shown for what it is."""
    suites.write(
        """
        FLAG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "failed")

        class Test(Spawning):
            def test_1(self): sys.modules["left"] = None
            def test_2(self):
                if "left" in sys.modules and not os.path.exists(FLAG):
                    time.sleep(0.2)  # Both ranks have looked.
                    open(FLAG, "w").close()
                    self.fail("this once")
        """
    )
    run = bisect(suites, "test_it.Test.test_2")
    assert run.code == 1, run.output
    assert "fails after 1 test of 1" in run.output
    assert "it did not fail the last time" in run.output


def test_bad_ids(suite):
    suite.write(
        """
        class Plain(unittest.TestCase):
            def test_1(self): pass

        class Other(Spawning):
            def test_1(self): pass
        """,
        "test_other.py",
    )
    (suite.folder / "test_broken.py").write_text("import sys; sys.exit(3)\n")
    test = "test_it.Test.test_9"
    expected = {
        ("nowhere.Test.test_1",): "No module named 'nowhere'",
        ("test_it.Test.test_none",): "has no attribute 'test_none'",
        ("test_it.py::Test::test_none",): "has no attribute 'test_none'",
        ("gone.py::Test::test_1",): "there is no file gone.py",
        ("test_it.Test",): "give the id of one test",
        ("test_it.Test.setUp",): "setUp is not a test",
        ("test_other.Plain.test_1",): "share no workers",
        ("test_broken.Test.test_1",): "SystemExit: 3",
        (test, "--from", "test_none"): "No module named 'test_none'",
        (test, "--from", "test_other.Other.test_1"): "not of the same class",
        (test, "--from", "test_9"): "the test itself",
    }
    bisect_each(suite, {arguments: [answer] for arguments, answer in expected.items()}, 2)
    run = bisect(suite, "nowhere.Test.test_1", timeout=ANSWER_SECONDS)
    assert run.code == 2
    assert run.output.count("\n") == 1
    run = bisect(suite, test, timeout=ANSWER_SECONDS, TORCHCONTINUOUS_START_TIMEOUT="soon")
    assert run.code == 2
    assert "TORCHCONTINUOUS_START_TIMEOUT" in run.output
    suite.assert_nothing_left()


def test_control_c(suites):
    """While a worker runs a test: the smallest set so far is printed, and nothing is left."""
    suites.write(
        """
        ASLEEP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "asleep")

        class Test(Spawning):
            steps = 0

            @classmethod
            def setUpClass(cls):
                super().setUpClass()
                cls.steps += 1
                if cls.steps == 3:
                    os.environ["TC_SLOW"] = "1"  # Carried into the workers.

            def test_1(self):
                if "TC_SLOW" in os.environ:
                    open(ASLEEP, "w").close()
                    time.sleep(600)

            test_2 = test_3 = test_1

            def test_4(self): sys.modules["left"] = None
            def test_5(self):
                if "left" in sys.modules: self.test_1()
            def test_6(self): self.assertNotIn("left", sys.modules)
        """
    )
    process = suites.start("-m", "torchcontinuous", "bisect", "test_it.Test.test_6")
    deadline = time.monotonic() + SEARCH_SECONDS
    try:
        while not (suites.folder / "asleep").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "Interrupted. The smallest set so far:\n  test_it.Test.test_1\n" in output
    assert "-m unittest test_it.Test.test_1" in output
    assert "Traceback" not in output
    suites.assert_nothing_left()
