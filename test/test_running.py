"""Suites that are run with no edit, as a user runs them."""

import json
import shutil
from pathlib import Path

import pytest

from torchcontinuous import _running

UNEDITED = Path(__file__).parent / "data" / "unedited"
PLUGIN = ("-p", "torchcontinuous.pytest_plugin")

#: Of ``test_stock.py``: what stock gives, tried once.
STOCK = {
    "TestStock.test_fails": "failed",
    "TestStock.test_skips": "skipped",
    "TestStock.test_sum": "passed",
    "TestStock.test_worker": "passed",
    "TestDerived.test_expected": "expected failure",
    "TestDerived.test_fails": "failed",
    "TestDerived.test_skips": "skipped",
    "TestDerived.test_sum": "passed",
    "TestDerived.test_worker": "passed",
    "TestDTensor.test_replicate_size_2": "passed",
    "TestDTensor.test_replicate_size_4": "passed",
    "TestOwn.test_sum": "passed",
    "TestSimulated.test_mesh": "passed",
    "TestPlain.test_in_this_process": "passed",
}


@pytest.fixture
def unedited(suites):
    for file in UNEDITED.glob("*.py"):
        shutil.copy(file, suites.folder)
    return suites


def noted(file, separator="."):
    tests = json.loads(file.read_text())["tests"]
    return {".".join(name.split(separator)[-2:]): test["outcome"] for name, test in tests.items()}


def run(suites, *arguments, **environ):
    return suites.python("-m", "torchcontinuous", *arguments, **environ)


def test_unittest(unedited):
    file = unedited.folder / "outcomes.json"
    options = ("--outcomes", str(file), "--durations", "2", "--order", "shuffle=5")
    ran = run(unedited, *options, "-v", "test_stock")
    assert noted(file) == STOCK, ran.output[-5000:]
    assert ran.code == 1
    lines = [line for line in ran.output.splitlines() if line.startswith("torchcontinuous: ")]
    assert "14 tests in" in lines[0]
    assert "in order shuffle:5: 1 expected failure, 2 failed, 9 passed, 2 skipped" in lines[0]
    assert "workers in" in lines[1]
    assert "process groups made" in lines[1]
    assert len([line for line in ran.output.splitlines() if " s  test_stock." in line]) == 2
    unedited.assert_nothing_left()


def test_pytest(unedited):
    file = unedited.folder / "outcomes.json"
    ran = unedited.pytest(
        *PLUGIN, "--continuous", "--continuous-isolation=group", "--continuous-order=reverse",
        f"--continuous-outcomes={file}", "-v", "-rs", "test_stock.py",
    )  # fmt: skip
    assert noted(file, "::") == STOCK, ran.output[-5000:]
    assert ran.code == 1
    assert "torchcontinuous: 0" in ran.output
    assert "isolation group, order reversed" in ran.output
    order = [line for line in ran.output.splitlines() if "TestStock::test_" in line]
    assert [line.split("::")[2].split()[0] for line in order[:2]] == ["test_worker", "test_sum"]
    assert "14 tests in" in ran.output.partition("= torchcontinuous =")[2]
    assert "not here" in ran.output  # The skip's own reason.
    unedited.assert_nothing_left()


def test_a_copied_harness_beside_stock(unedited):
    ran = run(unedited, "--compare", "--base", "copied.CopiedTestCase", "test_copied")
    assert "3 outcomes the same, 0 not" in ran.output, ran.output[-5000:]
    assert ran.code == 1  # One test fails, on both.
    assert "3 tests run by" in ran.output
    unedited.assert_nothing_left()


def test_comparison_tells_of_a_difference(suites):
    suites.write(
        """
        class TestDiffers(unittest.TestCase):
            def test_it(self):
                self.assertNotIn("torchcontinuous._adoption", sys.modules)
        """,
        header="import sys, unittest\n",
    )
    ran = run(suites, "--compare", "test_it")
    assert "test_it.TestDiffers.test_it: stock passed, here failed" in ran.output
    assert ran.code == 1
    ran = suites.pytest(*PLUGIN, "--continuous-compare", "-q", "test_it.py")
    assert "test_it.py::TestDiffers::test_it: stock passed, here failed" in ran.output
    assert ran.code == 1


def test_bad_suites(suites):
    """One clear line each, and the runners' usual exit codes."""
    suites.write("import nosuch_module\n", "test_broken.py", header="")
    plain = "import unittest\nclass Test(unittest.TestCase):\n    def test(self): ...\n"
    suites.write("", "test_plain.py", header=plain)
    ran = run(suites, "test_missing", "test_broken", "test_plain")
    assert ran.code == 1
    assert "No module named 'test_missing'" in ran.output
    assert "No module named 'nosuch_module'" in ran.output
    assert "no class here derives from MultiProcessTestCase" in ran.output
    broken = suites.pytest(*PLUGIN, "--continuous", "test_broken.py", "test_plain.py")
    assert broken.code == 2
    assert "No module named 'nosuch_module'" in broken.output
    missing = suites.pytest(*PLUGIN, "--continuous", "test_missing.py")
    assert missing.code == 4
    assert "file or directory not found" in missing.output


def test_bad_bases(suites):
    ran = run(suites, "--base", "nosuch.Class", "test_plain")
    assert ran.code == 2
    assert "error: --base: 'nosuch.Class' is not valid" in ran.output.splitlines()[-1]
    ran = suites.pytest(*PLUGIN, "--continuous", "--continuous-base=unittest.TestCase")
    assert ran.code == 4
    assert "--continuous-base: 'unittest.TestCase' is not valid" in ran.output
    ran = suites.pytest(*PLUGIN, "--continuous-isolation=none")
    assert ran.code == 4
    assert "need --continuous" in ran.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--isolation", "most"], "invalid choice: 'most'"),
        (["--order", "up"], "'up' is no order"),
        (["--durations", "few"], "give a number of tests"),
    ],
)
def test_bad_options(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        _running.run(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_plugin_is_light(suites):
    """pytest loads it at every start."""
    code = "import sys, torchcontinuous.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert suites.python("-c", code).code == 0
