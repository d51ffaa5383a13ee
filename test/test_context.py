"""What a worker takes over from the parent, and which variables an import looked up."""

import os
import sys

import pytest

from torchcontinuous import _context


@pytest.fixture
def context(tmp_path, monkeypatch):
    """This process's context; put back afterwards."""
    before = _context.capture_context()
    monkeypatch.chdir(tmp_path)
    yield
    _context.apply_context(before)
    os.environ.pop("TORCH_SHOW_CPP_STACKTRACES", None)


def test_round_trip(context, tmp_path):
    os.environ["TC_KEPT"] = "1"
    os.umask(0o027)
    sys.path.append("/tc/path")
    sys.argv.append("--tc")
    taken = _context.capture_context()
    path, argv = sys.path, sys.argv
    os.environ["TC_KEPT"] = "2"
    os.environ["TC_NEW"] = "x"
    os.umask(0o022)
    os.chdir("/")
    sys.path.remove("/tc/path")
    sys.argv.append("more")
    _context.apply_context(taken)
    assert os.environ["TC_KEPT"] == "1"
    assert "TC_NEW" not in os.environ
    assert os.getcwd() == str(tmp_path)
    assert os.umask(0o027) == 0o027
    assert sys.path is path
    assert sys.path[-1] == "/tc/path"
    assert sys.argv is argv
    assert sys.argv[-1] == "--tc"


def test_only_differences_are_applied(context, monkeypatch):
    taken = _context.capture_context()
    _context.apply_context(taken)
    with monkeypatch.context() as patch:
        patch.setattr(type(os.environ), "__setitem__", None)  # Anything applied would fail.
        _context.apply_context(taken)


def test_reads_are_noted(monkeypatch):
    monkeypatch.setenv("TC_A", "a")
    monkeypatch.delenv("TC_B", raising=False)
    monkeypatch.delenv("TC_SET", raising=False)
    monkeypatch.setenv("TC_UNREAD", "u")
    with _context.noted_reads() as reads:
        assert os.environ["TC_A"] == "a"
        assert os.getenv("TC_B") is None
        os.environ["TC_SET"] = "by the import"
        # Handing everything on is not looking anything up.
        assert os.environ.copy()["TC_UNREAD"] == dict(os.environ)["TC_UNREAD"]
    assert reads["TC_A"] == ("a", "a")
    assert reads["TC_B"] == (None, None)
    assert reads["TC_SET"] == (None, "by the import")
    assert "TC_UNREAD" not in reads
    with _context.noted_reads() as reads:
        os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")  # A fork server's own.
    assert reads == {}


def test_going_through_all_variables_depends_on_all(monkeypatch):
    monkeypatch.setenv("TC_A", "a")
    ways = (
        lambda: {k: v for k, v in os.environ.items() if k.startswith("TC_")},
        lambda: [k for k in os.environ if k.startswith("TC_")],
        lambda: next(iter(os.environ)),
    )
    for way in ways:
        with _context.noted_reads() as reads:
            way()
        now = dict(os.environ)
        assert _context.fits(reads, now)
        assert _context.fits(reads, {**now, "PYTEST_CURRENT_TEST": "another"})
        assert not _context.fits(reads, {**now, "TC_A": "b"})
        assert not _context.fits(reads, {**now, "TC_NEW": "b"})
        del now["TC_A"]
        assert not _context.fits(reads, now)
    with _context.noted_reads(going_through_counts=False) as reads:
        for way in ways:
            way()
    assert reads == {}
    os.environ.pop("TC_SET")
    assert type(os.environ).__name__ == "_Environ"


@pytest.mark.parametrize("ask", [lambda: "TC_X" in os.environ, lambda: os.environ.get("TC_X")])
def test_each_way_of_asking_is_noted(ask):
    with _context.noted_reads() as reads:
        ask()
    assert "TC_X" in reads


def test_fits():
    reads = {"A": ("1", "1"), "SET": (None, "made")}
    assert _context.fits(reads, {"A": "1", "OTHER": "x"})
    assert _context.fits(reads, {"A": "1", "SET": "made"})
    assert not _context.fits(reads, {"A": "2"})
    assert not _context.fits(reads, {"A": "1", "SET": "other"})
    assert not _context.fits(reads, {})


def test_preparation_can_be_sent():
    import pickle

    data = pickle.loads(pickle.dumps(_context.capture_preparation()))
    assert data["sys_argv"] == sys.argv
