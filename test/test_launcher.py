"""Nurseries, templates and spawned workers: real ones, one rank or two."""

import os
import signal
import time

import psutil
import pytest

from torchcontinuous import _launcher
from torchcontinuous._generation import Job
from torchcontinuous._launcher import Launcher
from torchcontinuous._messages import ClassReference
from torchcontinuous._pool import Codes, Pool
from torchcontinuous.errors import StartError

MODULE = """
import os, sys
import torch
AT_IMPORT = os.environ.get("TC_AT_IMPORT")
{extra}
class Case:
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **keywords):
        getattr(cls, test_name)()
    @staticmethod
    def test_pass(): pass
    @staticmethod
    def test_say():
        import json, torch._inductor.config
        from torch.testing._internal import common_distributed as stock
        print(json.dumps(dict(
            pid=os.getpid(), parent=os.getppid(), at_import=AT_IMPORT,
            threads=torch.get_num_threads(), timeout=stock.TIMEOUT_DEFAULT,
            fx=torch._inductor.config.max_autotune,
            devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )))
    @staticmethod
    def test_multiply():
        (torch.rand(600, 600) @ torch.rand(600, 600)).sum().item()
        x = torch.rand(600, 600, requires_grad=True)
        (x @ x).sum().backward()
"""

NAMES = ("OMP_NUM_THREADS", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "TORCHINDUCTOR_MAX_AUTOTUNE",
         "CUDA_VISIBLE_DEVICES", "TC_AT_IMPORT", "TORCHCONTINUOUS_START_METHOD")  # fmt: skip


@pytest.fixture(scope="module")
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write(tmp_path):
    def write(extra="", name="tc_module"):
        file = tmp_path / f"{name}.py"
        file.write_text(MODULE.format(extra=extra))
        return ClassReference(name, str(file), "Case")

    return write


@pytest.fixture
def run(launcher):
    pools = []

    def run(reference, test="test_say", world_size=1, pool=None, starter=launcher):
        if pool is None:
            pool = Pool(starter)
            pools.append(pool)
        ticket = pool.dispatch(Job(reference, test, "file", world_size))
        pool.collect(ticket, 60, Codes())
        assert [r.exit_code for r in ticket.reports] == [0] * world_size, ticket
        ticket.pool = pool
        return ticket

    yield run
    for pool in pools:
        pool.close()


def said(ticket):
    import json

    return json.loads(ticket.output[0][0])


def test_one_template_for_a_module(launcher, write, run):
    reference = write()
    first, second = said(run(reference)), said(run(reference))
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"]
    other = said(run(write(name="tc_other")))
    assert other["parent"] != first["parent"]
    assert len(launcher._nurseries) == 1


@pytest.mark.parametrize(
    ("name", "value", "key", "expected", "nurseries"),
    [
        ("OMP_NUM_THREADS", "1", "threads", 1, 2),
        ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "77", "timeout", 77, 2),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1", "fx", True, 2),
        ("CUDA_VISIBLE_DEVICES", "", "devices", "", 2),
        ("TC_AT_IMPORT", "seen", "at_import", "seen", 1),
    ],
)
def test_variables_read_on_import(write, run, monkeypatch, name, value, key, expected, nurseries):
    """Each gives a nursery, or a template, of its own; and the first is found again."""
    launcher = Launcher()
    try:
        reference = write()
        before = run(reference, starter=launcher)
        assert said(before)[key] != expected
        monkeypatch.setenv(name, value)
        # In the same pool: its used workers no longer fit.
        assert said(run(reference, pool=before.pool))[key] == expected
        assert len(launcher._nurseries) == nurseries
        monkeypatch.delenv(name)
        again = said(run(reference, pool=before.pool))
        assert again[key] != expected
        assert again["parent"] == said_parent(before)
        assert len(launcher._nurseries) == nurseries
        before.pool.close()
    finally:
        launcher.close()


def said_parent(ticket):
    return said(ticket)["parent"]


def test_variables_that_tests_renew_cost_nothing(launcher, write, run, monkeypatch):
    reference = write()
    first = run(reference)
    for number in range(3):
        monkeypatch.setenv("TEMP_DIR", f"/tmp/{number}")
        assert said(run(reference, pool=first.pool))["pid"] == said(first)["pid"]


def test_first_use_variables_need_new_workers_only(launcher, write, run, monkeypatch):
    reference = write()
    first = run(reference)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    second = said(run(reference, pool=first.pool))
    assert second["pid"] != said(first)["pid"]
    assert second["parent"] == said(first)["parent"]


@pytest.mark.parametrize(
    "extra",
    [
        "(torch.rand(900, 900) @ torch.rand(900, 900)).sum()",
        "x = torch.rand(600, 600, requires_grad=True); (x @ x).sum().backward()",
        "import threading; t = threading.Event(); "
        "threading.Thread(target=t.wait, daemon=True).start()",
        "import faulthandler; faulthandler.dump_traceback_later(3600)",
        "import atexit, shutil; atexit.register(shutil.rmtree, '/nonexistent', True)",
        "import tempfile; folder = tempfile.TemporaryDirectory()",
    ],
    ids=["matmul", "backward", "thread", "faulthandler", "atexit", "tempdir"],
)
def test_a_module_that_makes_forking_unsafe_still_works(launcher, write, run, extra):
    reference = write(extra, name="tc_unsafe")
    ticket = run(reference, "test_multiply", world_size=2)
    run(reference, "test_multiply", world_size=2, pool=ticket.pool)
    assert any(reference.file in key for key in launcher._unsafe)


def test_a_module_that_raises_is_the_tests_failure(launcher, write):
    pool = Pool(launcher)
    reference = write("raise ImportError('not today')", name="tc_raising")
    ticket = pool.dispatch(Job(reference, "test_pass", "file", 2))
    pool.collect(ticket, 60, Codes())
    assert [r.exit_code for r in ticket.reports] == [1, 1]
    assert ticket.reports[0].failure.message == "not today"
    pool.close()


def test_a_nursery_that_died_is_started_again(write, run):
    launcher = Launcher()
    try:
        reference = write()
        run(reference, starter=launcher)
        (nursery,) = launcher._nurseries
        os.kill(nursery.pid, signal.SIGKILL)
        run(write(name="tc_second"), starter=launcher)
        assert launcher._nurseries[0].pid != nursery.pid
    finally:
        launcher.close()


def test_a_template_that_died_takes_its_generation_along(launcher, write, run):
    reference = write()
    first = run(reference, world_size=2)
    os.kill(said(first)["parent"], signal.SIGKILL)
    time.sleep(0.2)
    second = run(reference, world_size=2, pool=first.pool)
    assert second.ran_before == ()
    assert said(second)["parent"] != said(first)["parent"]


def test_preloads(write, run, monkeypatch, tmp_path, caplog):
    (tmp_path / "tc_good.py").write_text("import os; PID = os.getpid()")
    (tmp_path / "tc_bad.py").write_text("1 / 0")
    (tmp_path / "tc_threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n"
    )
    monkeypatch.setenv("TORCHCONTINUOUS_PRELOAD", "tc_bad,tc_threads,tc_good")
    monkeypatch.syspath_prepend(tmp_path)
    launcher = Launcher()
    try:
        with caplog.at_level("DEBUG", logger="torchcontinuous"):
            run(write("import tc_good; assert tc_good.PID != os.getpid()"), starter=launcher)
        assert "preload tc_bad left out: ZeroDivisionError" in caplog.text
        assert "preload tc_threads left out: it made forking unsafe" in caplog.text
        assert "tc_good" not in caplog.text
    finally:
        launcher.close()


def test_a_nursery_that_cannot_start_says_why_at_once(write, monkeypatch):
    launcher = Launcher()
    monkeypatch.setattr("torchcontinuous._torch_api.STOCK_MODULE", "torch.no_such_module")
    monkeypatch.setattr(
        "torchcontinuous._nursery.command_line",
        lambda *_: [__import__("sys").executable, "-c", "raise SystemExit('cannot do it')"],
    )
    pool = Pool(launcher)
    began = time.monotonic()
    with pytest.raises(StartError, match="cannot do it"):
        pool.dispatch(Job(write(), "test_pass", "file", 1))
    assert time.monotonic() - began < 10
    pool.close()
    launcher.close()


def test_spawn(write, run, monkeypatch):
    monkeypatch.setenv("TORCHCONTINUOUS_START_METHOD", "spawn")
    reference = write()
    first = run(reference, world_size=2)
    assert said(first)["parent"] == os.getpid()
    assert run(reference, world_size=2, pool=first.pool).pids == first.pids
    monkeypatch.setenv("TC_AT_IMPORT", "seen")
    second = run(reference, world_size=2, pool=first.pool)
    assert second.pids != first.pids
    assert said(second)["at_import"] == "seen"


def test_closing_ends_every_process(write, run):
    launcher = Launcher()
    before = set(psutil.Process().children())
    ticket = run(write(), world_size=2, starter=launcher)
    (nursery,) = launcher._nurseries
    ours = psutil.Process(nursery.pid).children(recursive=True)
    assert len(ours) == 3  # A template and two workers.
    ticket.pool.close()
    launcher.close()
    psutil.wait_procs(ours, timeout=3)
    assert not any(p.is_running() and p.status() != "zombie" for p in ours)
    assert set(psutil.Process().children()) <= before


def test_nothing_starts_in_a_worker(monkeypatch):
    monkeypatch.setattr("torchcontinuous._nursery.active", True)
    assert not _launcher.may_start()
    with pytest.raises(StartError, match="inside a worker"):
        _launcher.launcher()
