"""The benchmarks' suites run on reused workers, and the figures' arithmetic is right."""

import argparse
import json
import subprocess
import sys
import unittest

import pytest

import benchmarks.__main__
from benchmarks import (
    accelerator,
    arms,
    comparison,
    ordered,
    overhead,
    plots,
    published,
    results,
    soak,
    sweeps,
    tables,
)
from benchmarks.comparison import (
    ANY_WORLD_SIZE,
    QUICK_SUITES,
    SUITES,
    Comparison,
    SuiteRun,
    read_outcomes,
)
from benchmarks.probes import soaked
from benchmarks.processes import ROOT


@pytest.mark.parametrize("arm", [arms.NONE, arms.PROCESS])
def test_suites(suites, arm):
    """DTensor's native caches hold Python objects: a worker must not crash at its end for it."""
    environ = {k: v for k, v in arms.environment(arm).items() if k not in suites.environment()}
    for suite in QUICK_SUITES:
        run = suites.unittest("-v", f"benchmarks.suites.{suite}", **environ)
        assert run.code == 0, run.output
        assert "Fatal Python error" not in run.output
        assert "Ran 0 tests" not in run.output
    suites.assert_nothing_left()


def test_arms_choose_the_base(monkeypatch):
    class Stock:
        pass

    monkeypatch.setenv(arms.VARIABLE, arms.STOCK)
    assert arms.on_arm(Stock) is Stock
    assert arms.environment(arms.PROCESS)["TORCHCONTINUOUS_ISOLATION"] == "process"
    assert "TORCHCONTINUOUS_ISOLATION" not in arms.environment(arms.NONE)
    assert arms.environment(arms.NONE)[arms.VARIABLE] == arms.NONE


def test_torch_arm(monkeypatch):
    class MultiProcessTestCase(unittest.TestCase):
        pass

    for arm, left_out in ((arms.NONE, False), (arms.TORCH, True)):
        monkeypatch.setenv(arms.VARIABLE, arm)
        marked = arms.not_on_torch("it says why")(type("Test", (unittest.TestCase,), {}))
        assert getattr(marked, "__unittest_skip__", False) is left_out
    base = arms.on_arm(MultiProcessTestCase)
    assert base.__unittest_skip_why__.startswith(arms.LEFT_OUT)
    assert not hasattr(MultiProcessTestCase, "__unittest_skip__")


def test_torch_arm_has_a_class_of_its_own():
    """In a process of its own: torch's DTensor helpers are not for pytest's."""
    code = (
        "from benchmarks.suites.dtensor import PlacementTest as t;"
        "print([c.__name__ for c in t.__mro__[1:3]], t.world_size)"
    )
    environ = arms.environment(arms.TORCH)
    told = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert told == "['DTensorTestBase', 'DTensorContinuousTestBase'] 4\n"


TORCH_OUTPUT = """\
test_a (m.Test.test_a) ... skipped 'left out on torch: reason'
test_b (m.Test.test_b) ... FAIL
test_c (m.Test.test_c) ... skipped "Previous test failed, skipping m.Test.test_c"
test_d (m.Test.test_d) ... skipped 'on stock too'

======================================================================
"""


def test_skips_on_torch_arm():
    """What is left out there is no difference; what its failure took along is."""
    ours = read_outcomes(TORCH_OUTPUT)
    assert list(ours.values()) == [comparison.LEFT_OUT, "FAIL", comparison.NOT_RUN, "skipped"]
    stock = dict.fromkeys(ours, "ok") | {"Test.test_d": "skipped"}
    runs = [
        SuiteRun("s", arms.STOCK, 0, 9.0, stock, ""),
        SuiteRun("s", arms.TORCH, 0, 3.0, ours, ""),
    ]
    compared = Comparison([arms.STOCK, arms.TORCH], runs)
    problems = list(compared.problems())
    assert "s.Test.test_c: not run after a failure on torch, ok on stock" in problems
    assert not [p for p in problems if "test_a" in p or "test_d" in p]
    assert compared.seconds("s", arms.STOCK) == 9.0
    assert compared.seconds("s", arms.TORCH) is None


class SampleA(unittest.TestCase):
    __test__ = False

    def test_1(self):
        pass

    test_2 = test_3 = test_4 = test_1


class SampleB(SampleA):
    pass


def load(order):
    samples = [f"{__name__}.SampleA", f"{__name__}.SampleB"]
    loaded = ordered.OrderedLoader(order).loadTestsFromNames(samples)
    return [test.id().removeprefix(f"{__name__}.Sample") for test in loaded]


NAMES_OUTPUT = """\
test_dim_-1 (m.Test.test_dim_-1) ... ok
test_shard_S(1) (m.Test.test_shard_S(1)) ... FAIL
test_older (m.Test)
Its first line of text. ... ok

----------------------------------------------------------------------
Ran 4 tests in 1.0s
"""


def test_no_test_is_lost():
    outcomes = read_outcomes(NAMES_OUTPUT)
    expected = {"test_dim_-1": "ok", "test_shard_S(1)": "FAIL", "test_older": "ok"}
    assert outcomes == {f"Test.{name}": outcome for name, outcome in expected.items()}
    compared = Comparison([arms.NONE], [SuiteRun("s", arms.NONE, 0, 1.0, outcomes, NAMES_OUTPUT)])
    assert "s on none: 4 tests ran, 3 were understood" in list(compared.problems())


def test_orders():
    forwards = load(ordered.FORWARDS)
    assert forwards == [f"{c}.test_{n}" for c in "AB" for n in (1, 2, 3, 4)]
    assert load(ordered.REVERSED) == [f"{c}.test_{n}" for c in "AB" for n in (4, 3, 2, 1)]
    shuffles = [load(f"shuffle:{seed}") for seed in range(8)]
    assert shuffles[3] == load("shuffle:3")
    for shuffled in shuffles:
        assert sorted(shuffled) == forwards
        assert len({test[0] for test in shuffled[:4]}) == 1, "classes stay together"
    assert {shuffled[0][0] for shuffled in shuffles} == {"A", "B"}


def test_order_is_checked():
    assert ordered.order("shuffle:12") == "shuffle:12"
    for text in ("backwards", "shuffle", "shuffle:", "shuffle:x"):
        with pytest.raises(argparse.ArgumentTypeError):
            ordered.order(text)


def test_options():
    parsed = benchmarks.__main__.parse(["--quick"])
    assert (parsed.suite, parsed.repeat) == (QUICK_SUITES, 1)
    assert parsed.arms == [arms.STOCK, arms.NONE, arms.GROUP, arms.PROCESS]
    assert not parsed.sweeps
    parsed = benchmarks.__main__.parse([])
    assert (parsed.suite, parsed.sweeps) == (SUITES, True)
    assert parsed.arms == list(arms.ALL_ARMS)
    parsed = benchmarks.__main__.parse(["--world-size", "2"])
    assert (parsed.suite, parsed.sweeps) == (ANY_WORLD_SIZE, False)
    chosen = ["--suite", "tensor_parallel", "--arms", "torch", "--order", "reversed"]
    parsed = benchmarks.__main__.parse(chosen)
    assert (parsed.suite, parsed.arms, parsed.order) == (["tensor_parallel"], ["torch"], "reversed")


def test_every_suite_is_listed():
    files = {path.stem for path in (ROOT / "benchmarks" / "suites").glob("[!_]*.py")}
    assert files == {*SUITES, accelerator.SUITE}


def test_figures():
    raw = {
        arms.STOCK: {"noop": [[8.0, 8.2, 8.4], [8.0]]},
        arms.TORCH: {"noop": [[0.003]]},
        arms.NONE: {"noop": [[0.001], [0.002], [0.003]]},
    }
    lines = {line.split("|")[1].strip(): line for line in overhead.table(raw).splitlines()}
    line = lines['one more no-op test, "none"']
    assert "2.00 ms (1.00-3.00)" in line
    assert "1.5x less than torch's own" in line
    assert line.rstrip("| ").endswith("yes")
    assert lines["private memory of a worker"].count(" - ") >= 3


def test_tables():
    text = tables.render(["a", "b"], [["x", "1"], ["longer", "22"]])
    assert len({len(line) for line in text.splitlines()}) == 1


def test_bad_options_are_told():
    for command in (
        ["--out", f"{__file__}/folder"],
        ["--repeat", "0"],
        ["--suite", "nothing"],
        ["--order", "up"],
        ["--world-size", "1"],
        ["--world-size", "2", "--suite", "ddp"],
        ["--device", "cuda", "--world-size", "1000"],
        ["--device", "tpu"],
    ):
        with pytest.raises(SystemExit) as caught:
            benchmarks.__main__.main(command)
        assert caught.value.code == 2


def test_accelerator_without_one(monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    assert accelerator.main([]) == 0
    assert "no accelerator here" in capsys.readouterr().out


def test_accelerator_looks_at_memory_and_nursery():
    def notes(after, *more):
        pairs = [("free before", 10e9), ("free after", after), *more]
        return [f'{{"event": "{event}", "rank": 0, "value": {value}}}' for event, value in pairs]

    untouched = ("untouched", 7.0)
    assert accelerator.check_memory(notes(9.9e9, untouched), arms.NONE) == []
    assert accelerator.check_memory(notes(9.9e9), arms.STOCK) == []
    assert "untouched" in accelerator.check_memory(notes(9.9e9), arms.NONE)[0]
    assert "still holds 3.00 GB" in accelerator.check_memory(notes(7e9), arms.STOCK)[0]


def test_results_are_written(tmp_path):
    runs = [
        SuiteRun("wrap", arm, 0, seconds, {"T.test": "ok"}, "")
        for arm, seconds in (
            (arms.STOCK, 90.0), (arms.NONE, 2.0), (arms.STOCK, 110.0), (arms.NONE, 3.0),
        )
    ]  # fmt: skip
    compared = Comparison([arms.STOCK, arms.NONE], runs)
    assert compared.ratios(arms.NONE) == {"wrap": 40.0}
    results.write(tmp_path / "new" / "folder", compared, POINTS, ["--suite", "wrap"])
    data = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert [run["seconds"] for run in data["runs"]] == [90.0, 2.0, 110.0, 3.0]
    assert data["machine"]["cores"] >= 1
    assert [point["job"]["world_size"] for point in data["sweeps"]] == [4, 4, 16]
    assert data["command"] == "python -m benchmarks --suite wrap"
    text = (tmp_path / "new" / "folder" / "results.md").read_text()
    assert "100.0 (90.0-110.0)" in text
    assert "| test_wrap.py" in text
    assert "1000 tests: the first hundred took 2.00 ms each, the last hundred 3.00" in text
    assert "wrap 40.0x" in text
    assert "only ratios can be compared" in " ".join(text.split())


POINTS = [
    sweeps.Point(sweeps.Job(sweeps.BY_TESTS, arms.NONE, 4, 1), 4.0, (0.1,), None),
    sweeps.Point(
        sweeps.Job(sweeps.BY_TESTS, arms.NONE, 4, 1000),
        6.0,
        (0.1, *[0.002] * 500, *[0.003] * 499),
        None,
    ),
    sweeps.Point(
        sweeps.Job(sweeps.BY_WORLD_SIZE, arms.NONE, 16, 3), 5.0, (0.2, 0.01, 0.03), 300_000_000
    ),
]


def test_sweeps():
    jobs = list(sweeps.plan([arms.STOCK, arms.NONE]))
    assert max(job.count for job in jobs if job.arm == arms.STOCK) == 10
    assert {job.world_size for job in jobs if job.kind == sweeps.BY_WORLD_SIZE} == {2, 4, 8, 16}
    assert sweeps.curve(POINTS, sweeps.BY_TESTS, arms.NONE, "seconds") == {1: 4.0, 1000: 6.0}
    assert sweeps.curve(POINTS, sweeps.BY_WORLD_SIZE, arms.NONE, "test_seconds") == {16: 0.02}
    text = sweeps.report(POINTS)
    assert [cell.strip() for cell in text.splitlines()[-3].split("|")[1:-1]] == ["16", "300"]


@pytest.mark.parametrize("kind", [sweeps.BY_TESTS, sweeps.BY_WORLD_SIZE])
def test_a_sweep_measures(kind, suites):
    count = 3
    point = sweeps.measure(sweeps.Job(kind, arms.NONE, 2, count))
    assert len(point.tests) == count
    assert 0 < sum(point.tests) < point.seconds
    if kind == sweeps.BY_WORLD_SIZE:
        assert 1e6 < point.memory < 5e9
    suites.assert_nothing_left()


def test_a_sweep_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(sweeps, "TIMEOUT", 0.01)
    with pytest.raises(sweeps.SweepError, match="3 tests on 2 ranks on none: not done"):
        sweeps.measure(sweeps.Job(sweeps.BY_TESTS, arms.NONE, 2, 3))


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    run = SuiteRun("wrap", arms.NONE, 0, 2.0, {"T.test": "ok"}, "")
    for points, names in ((POINTS, ["suites", "tests", "world_size", "memory"]), ([], ["suites"])):
        folder = tmp_path / str(len(points))
        folder.mkdir()
        assert plots.draw(folder, Comparison([arms.NONE], [run]), points) == names
        files = sorted(f"{name}.{suffix}" for name in names for suffix in plots.FORMATS)
        assert sorted(file.name for file in folder.iterdir()) == files
        assert all(file.stat().st_size > 1000 for file in folder.iterdir())
    drawn = (tmp_path / "3" / "suites.svg").read_bytes()
    plots.draw(tmp_path / "3", Comparison([arms.NONE], [run]), POINTS)
    assert (tmp_path / "3" / "suites.svg").read_bytes() == drawn


def test_a_soak_is_made_from_its_seed():
    def names(seed):
        made = soaked.make(seed, 100, 7)
        assert len(made) == 7
        return [f"{c}.{t}" for c in made for t in vars(made[c]) if t.startswith("test_")]

    assert len(names(1)) == 100
    assert names(1) == names(1) != names(2)


def test_what_grew_in_a_soak_is_found():
    def sample(**more):
        return soak.Sample(**{**dict.fromkeys(vars(flat), 100), **more})

    flat = soak.Sample(100, 100, 100, 100, 100)
    for more, found in (
        ({}, []), ({"memory": 109}, []), ({"memory": 112}, ["memory"]),
        ({"descriptors": 101}, ["descriptors"]), ({"files": 101, "threads": 99}, ["files"]),
    ):  # fmt: skip
        rows = soak.growth([*[flat] * 6, sample(**more), sample(**more)])
        assert [row[0] for row in rows if soak.grew(*row)] == found


def test_a_wrong_verdict_of_a_soak_is_found():
    class Soak(unittest.TestCase):
        def test_0000_noop(self):
            self.fail("not as expected")

        def test_0001_fail(self):
            self.fail("as expected")

        def test_0002_skip(self):
            pass

    result = soak.Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(Soak).run(result)
    assert [wrong.partition(": ")[2] for wrong in result.wrong] == [
        "failed, expected passed\nnot as expected",
        "passed, expected skipped",
    ]
    assert result.count == 3


def test_soak(suites):
    run = suites.python("-m", "benchmarks.soak", "--tests=40", "--classes=4", "--seed=3")
    assert run.code == 0, run.output
    assert "40 tests, 0 verdicts wrong" in run.output
    suites.assert_nothing_left()


def test_published_figures():
    ratios = {one.what: round(one.ratio, 1) for one in published.PUBLISHED}
    assert ratios["core DTensor"] == 12.7
    assert ratios["FSDP, freezing weights"] == 31.4
    assert all(set(one.comparable) <= set(SUITES) for one in published.PUBLISHED)
    assert published.table({"wrap": 40.0}, all_of_them=False).count("\n") == 2
    assert published.table({"wrap": 40.0}).count("\n") == len(published.PUBLISHED) + 1


def test_estimate():
    compared = Comparison([arms.STOCK, arms.NONE])
    assert compared.seconds_left([("a", arms.STOCK)]) is None
    compared.runs.append(SuiteRun("a", arms.STOCK, 0, 60.0, {"T.t": "ok"}, ""))
    compared.runs.append(SuiteRun("a", arms.NONE, 0, 2.0, {"T.t": "ok"}, ""))
    assert compared.seconds_left([("b", arms.STOCK), ("b", arms.NONE), ("a", arms.NONE)]) == 64.0
