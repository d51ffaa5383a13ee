"""The benchmarks' suites run on reused workers, and the figures' arithmetic is right."""

import pytest

import benchmarks.__main__
from benchmarks import arms, overhead, tables
from benchmarks.comparison import SUITES


@pytest.mark.parametrize("arm", [arms.NONE, arms.PROCESS])
def test_suites(suites, arm):
    """DTensor's native caches hold Python objects: a worker must not crash at its end for it."""
    environ = {k: v for k, v in arms.environment(arm).items() if k not in suites.environment()}
    for suite in SUITES:
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
    for command in (["--repeat", "0"], ["--suite", "nothing"]):
        with pytest.raises(SystemExit) as caught:
            benchmarks.__main__.main(command)
        assert caught.value.code == 2
