"""Run the suites in torch's wheel on reused workers, and compare with what stock gives.

``python -m test.conformance [--suite distributed|rpc] [--isolation none|group|process]
[--order reversed|shuffle:SEED] [--runner unittest|pytest]`` runs each suite at each level in each
order (about ten minutes in all on two idle cores, for one order), prints every outcome that is not
stock's, and exits with 1 if there is one. ``--runner`` runs the suites as they stand, by the
commands that need no edit; else their classes have the mixin. What stock gives is data, and holds
in any order: ``test/data/``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from test.suites.order import VARIABLE
from torchcontinuous._order import ORDERS, checked_order
from torchcontinuous._summary import Outcomes

HERE = Path(__file__).parent
SUITES = {
    "distributed": ("distributed_gloo", "distributed_test_gloo_ws3.json"),
    "rpc": ("rpc_tensorpipe", "rpc_tensorpipe.json"),
}
LEVELS = ("none", "group", "process")

#: How a suite is run: with the mixin in its file, or as it stands.
MIXIN, UNITTEST, PYTEST = "mixin", "unittest", "pytest"

#: Seconds after which a whole suite is given up.
SUITE_TIMEOUT = 1800


def outcomes(report: Path) -> dict[str, str]:
    """Outcome by ``Class.test``, from a JUnit report."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "passed"
        if "skipped" in children:
            outcome = "skipped"
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        found[name] = outcome
    return found


def short(test_id: str) -> str:
    """``Class.test`` of an id of unittest's."""
    return ".".join(test_id.rsplit(".", 2)[-2:])


def run(
    suite: str,
    level: str,
    folder: Path,
    select: str = "",
    order: str = "forwards",
    runner: str = MIXIN,
) -> tuple[dict[str, str], float]:
    """Run one suite at one level in one order; outcomes and seconds."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / "temp" / name).mkdir(parents=True, exist_ok=True)
    report = folder / f"{suite}-{level}"
    environ = {
        **os.environ,
        "BACKEND": "gloo",
        "WORLD_SIZE": "3",
        "INIT_METHOD": "env://",
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": str(folder / "temp"),
        "TORCHCONTINUOUS_ISOLATION": level,
        VARIABLE: order,
        "PYTHONPATH": str(HERE.parent),
    }
    if suite == "rpc":
        del environ["WORLD_SIZE"]
    name = SUITES[suite][0] if runner == MIXIN else f"{SUITES[suite][0]}_stock"
    if runner == UNITTEST:
        command = [sys.executable, "-m", "torchcontinuous", f"--outcomes={report}"]
        command += [f"--order={order}", *(["-k", select] if select else []), f"test.suites.{name}"]
    else:
        command = [sys.executable, "-m", "pytest", "-q", str(HERE / "suites" / f"{name}.py")]
        command += [f"--junitxml={report}", "-p", "test.suites.order", "-p", "no:cacheprovider"]
        command += ["--tb=short", "--no-header", "-rN", "--show-capture=no"]
        command += ["-k", select] if select else []
        command += ["-p", "torchcontinuous.pytest_plugin"]
        command += ["--continuous"] if runner == PYTEST else []
    began = time.monotonic()
    subprocess.run(
        command, env=environ, cwd=HERE.parent, timeout=SUITE_TIMEOUT, stdout=sys.stderr, check=False
    )
    seconds = time.monotonic() - began
    if runner == UNITTEST:
        noted = Outcomes.read(report).found
        return {short(test): outcome for test, (outcome, _) in noted.items()}, seconds
    return outcomes(report), seconds


def compare(
    suite: str, level: str, select: str = "", order: str = "forwards", runner: str = MIXIN
) -> int:
    """Run, print what differs from stock, return how much does."""
    stock = json.loads((HERE / "data" / SUITES[suite][1]).read_text())["tests"]
    with tempfile.TemporaryDirectory() as folder:
        ours, seconds = run(suite, level, Path(folder), select, order, runner)
    expected = {name: stock[name] for name in ours if name in stock} if select else stock
    names = sorted(expected.keys() | ours.keys())
    wrong = [n for n in names if expected.get(n) != ours.get(n)]
    for name in wrong:
        print(f"  {name}: stock {expected.get(name)}, here {ours.get(name)}")
    same = len(names) - len(wrong)
    how = "" if runner == MIXIN else f" as it stands by {runner}"
    print(
        f"{suite}{how} at level {level!r}, {order}: {same} of {len(names)} outcomes as stock's, "
        f"{seconds:.0f} s"
    )
    sys.stdout.flush()
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--isolation", choices=LEVELS, action="append")
    parser.add_argument("--order", type=checked_order, action="append", help=ORDERS)
    parser.add_argument("-k", dest="select", default="", help="pytest's -k: only some tests")
    parser.add_argument("--runner", choices=(UNITTEST, PYTEST), default=MIXIN)
    arguments = parser.parse_args()
    wrong = sum(
        compare(suite, level, arguments.select, order, arguments.runner)
        for suite in arguments.suite or SUITES
        for level in arguments.isolation or LEVELS
        for order in arguments.order or ["forwards"]
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
