"""One test on one rank, in this process: exit codes, failures as text, the pipe."""

import os
import pickle
import sys
import threading

import pytest

from torchcontinuous import _single
from torchcontinuous._messages import ClassReference
from torchcontinuous._report import Ending


class Fake:
    """As much of a stock class as ``_run`` needs."""

    body = staticmethod(lambda pipe: None)

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **keywords):
        cls.body(pipe)


def run(body, keywords=None):
    cls = type("Case", (Fake,), {"body": staticmethod(body)})
    return _single.run_stock_style(lambda: cls, 3, "test_x", "file", keywords or {"fake_pg": False})


def raises(error):
    def body(pipe):
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit(256 + 3), 3),
        (SystemExit("text"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_codes(error, code):
    report = run(raises(error))
    assert report.rank == 3
    assert report.ending is Ending.REPORTED
    assert report.exit_code == code
    assert (report.used_up is None) == (code == 0)


def test_what_load_raises_ends_the_test():
    report = _single.run_stock_style(lambda: 1 / 0, 0, "t", "f", {})
    assert report.exit_code == 1
    assert report.failure.type_name == "ZeroDivisionError"


def test_skip_is_a_skip_only_by_its_code():
    import unittest

    def skip(pipe):
        try:
            raise unittest.SkipTest("why")
        except unittest.SkipTest:
            sys.exit(86)

    report = run(skip)
    assert (report.exit_code, report.skip_reason, report.failure) == (86, "why", None)
    assert report.used_up is None
    report = run(raises(unittest.SkipTest("outside run_test")))
    assert (report.exit_code, report.skip_reason) == (1, None)
    assert report.failure.type_name == "unittest.case.SkipTest"


def test_300_kb_through_the_pipe():
    def body(pipe):
        pipe.send("x" * 300_000)
        pipe.send({"any": "object"})
        pipe.send("last")

    report = run(body)
    assert [len(m) > 200_000 for m in report.pipe] == [True, False, False]
    assert pickle.loads(report.pipe[-1]) == "last"


def test_traceback_of_the_pipe_serves_where_there_is_no_exception():
    def body(pipe):
        pipe.send("Traceback ...\nValueError: told")
        sys.exit(10)

    assert run(body).failure.traceback == "Traceback ...\nValueError: told"


def test_a_child_that_holds_the_pipe_does_not_hold_the_report_up():
    copies = []

    def body(pipe):
        copies.append(os.dup(pipe.fileno()))
        pipe.send("sent")

    report = run(body)
    os.close(copies[0])
    assert [pickle.loads(m) for m in report.pipe] == ["sent"]


def test_no_thread_and_no_descriptor_stays():
    run(lambda pipe: pipe.send("x"))
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run(lambda pipe: pipe.send("x"))
        run(lambda pipe: None)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_keywords_go_only_where_they_are_taken():
    seen = {}

    class Plain:
        @classmethod
        def _run(cls, rank, test_name, file_name, parent_pipe):
            seen["plain"] = (rank, test_name, file_name)

    class Named:
        @classmethod
        def _run(cls, rank, test_name, file_name, pipe, fake_pg=None):
            seen["named"] = fake_pg

    for cls in (Plain, Named):
        report = _single.run_stock_style(lambda: cls, 1, "t", "f", {"fake_pg": True})  # noqa: B023
        assert report.exit_code == 0, report
    assert seen == {"plain": (1, "t", "f"), "named": True}


def caught(function):
    try:
        function()
    except BaseException as error:
        return _single.describe(error)


def test_description():
    failure = caught(lambda: {}["key"])
    assert (failure.type_name, failure.message) == ("KeyError", "'key'")
    assert not failure.is_assertion
    assert "in <lambda>" in failure.traceback
    assert caught(lambda: pytest.fail("x")).message == "x"


def test_description_of_difficult_exceptions():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    class Unpicklable(AssertionError):
        def __reduce__(self):
            raise TypeError

    def recurse():
        recurse()

    def chained():
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise ValueError("second") from error

    def raise_(error):
        raise error

    assert "Unprintable" in caught(lambda: raise_(Unprintable())).traceback
    assert caught(lambda: raise_(Unpicklable())).is_assertion
    recursion = caught(recurse)
    assert recursion.type_name == "RecursionError"
    assert len(recursion.traceback) < 10_000
    assert "ZeroDivisionError" in caught(chained).traceback
    cyclic = ValueError("a")
    cyclic.__context__ = cyclic
    assert "ValueError: a" in caught(lambda: raise_(cyclic)).traceback


def test_classes_are_found_by_name_or_by_file(tmp_path, monkeypatch):
    (tmp_path / "pkg").mkdir()
    file = tmp_path / "pkg" / "tc_by_file.py"
    file.write_text("class Outer:\n    class Inner: pass\n")
    reference = ClassReference("tc_pkg.tc_by_file", str(file), "Outer.Inner")
    try:
        cls = _single.load_class(reference)
        assert (cls.__module__, cls.__qualname__) == ("tc_pkg.tc_by_file", "Outer.Inner")
        assert _single.load_class(reference) is cls
    finally:
        for name in ("tc_pkg", "tc_pkg.tc_by_file"):
            sys.modules.pop(name, None)
    # A module of that name elsewhere is not the one.
    other = tmp_path / "tc_like.py"
    other.write_text("WHO = 'on the path'\n")
    mine = tmp_path / "pkg" / "tc_like.py"
    mine.write_text("WHO = 'mine'\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = _single.load_module(ClassReference("tc_like", str(mine), ""))
        assert module.WHO == "mine"
    finally:
        sys.modules.pop("tc_like", None)


def test_an_import_that_fails_leaves_no_module(tmp_path):
    file = tmp_path / "tc_broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        _single.load_module(ClassReference("tc_broken", str(file), ""))
    assert "tc_broken" not in sys.modules
