"""The crash matrix: moment by manner by rank, each with stock's verdict, and the next test right.

The suite is ``suites/crash.py``; what stock gives was tried once and is kept as data.
"""

import json
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STOCK = json.loads((HERE / "data" / "crash_matrix_stock.json").read_text())["tests"]
MOMENTS = ("Starting", "Before", "Collective", "After", "Between", "Teardown")

#: Seconds that a test of the suite may take; its time-outs cost this twice (they are run again).
TEST_TIMEOUT = 2
#: Seconds that one moment's 36 cases may take on a loaded machine.
MOMENT_TIMEOUT = 400


@pytest.mark.parametrize("moment", MOMENTS)
def test_moment(suites, moment):
    expected = {}
    for name, outcome in STOCK.items():
        test_class, _, test = name.partition(".")
        if test_class == f"Test{moment}":
            expected[f"{test}_1"] = outcome
            expected[f"{test}_2"] = "passed"
    assert len(expected) == 72
    suites.write((HERE / "suites" / "crash.py").read_text(), "crash.py", header="")
    began = time.monotonic()
    run = suites.pytest(
        "crash.py",
        f"-kTest{moment}",
        "--tb=short",
        "-rN",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=TEST_TIMEOUT,
    )
    assert time.monotonic() - began < MOMENT_TIMEOUT
    found = run.outcomes()
    assert {n: o for n, o in found.items() if expected.get(n) != o} == {}
    assert found.keys() == expected.keys()
    suites.assert_nothing_left()
