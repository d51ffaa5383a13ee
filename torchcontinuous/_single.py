"""Run one test on this rank, as a stock worker would, and report on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import socket
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torchcontinuous import _torch_api
from torchcontinuous._messages import ClassReference
from torchcontinuous._report import TEST_ERROR_EXIT_CODE, Ending, Failure, Leak, RankReport

#: Where an exception notes the sub-tests that it ended.
_SUBTESTS = "_torchcontinuous_subtests"

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def load_class(reference: ClassReference) -> Any:
    """Import a test class by its module's name or, where that is not importable, its file."""
    found: Any = load_module(reference)
    for name in reference.qualname.split("."):
        found = getattr(found, name)
    return found


def load_module(reference: ClassReference) -> types.ModuleType:
    """Import a test module. pytest's ``importlib`` mode gives names that no path leads to."""
    module = sys.modules.get(reference.module)
    if module is not None:
        return module
    if reference.before_import is not None:
        owner, function, arguments = reference.before_import
        getattr(importlib.import_module(owner), function)(arguments)
    try:
        spec = importlib.util.find_spec(reference.module)
    except (ImportError, ValueError):
        spec = None
    origin = None if spec is None else spec.origin
    if reference.file is None or (origin is not None and _same_file(origin, reference.file)):
        return importlib.import_module(reference.module)
    return _load_file(reference.module, reference.file)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _load_file(name: str, file: str) -> types.ModuleType:
    """Import ``file`` under ``name``, and packages for the parts before its last dot."""
    package, _, _ = name.rpartition(".")
    folder = os.path.dirname(os.path.abspath(file))
    while package:
        if package not in sys.modules:
            _load_package(package, folder)
        package, folder = package.rpartition(".")[0], os.path.dirname(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _load_package(name: str, folder: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        module = types.ModuleType(name)
        module.__path__ = [folder]
        sys.modules[name] = module


class TestPipe:
    """The connection that stock's ``_run`` is given, its other end open and drained.

    Draining starts with the first ``send``: most tests send nothing, and a thread costs more than
    the rest of the pipe.
    """

    __test__ = False  # Not a test class, whatever pytest thinks of the name.

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.pid = os.getpid()
        self._drainer: threading.Thread | None = None
        if sys.platform == "win32":
            self._own, self.connection = Pipe()
            self._start_draining()
            return
        own, theirs = socket.socketpair()
        self._own = Connection(own.detach())
        self.connection = _DrainedConnection(theirs.detach())
        self.connection.before_send = self._start_draining

    def _start_draining(self) -> None:
        if self._drainer is None:
            self._drainer = threading.Thread(target=self._drain, daemon=True)
            self._drainer.start()

    def _drain(self) -> None:
        try:
            while True:
                self.messages.append(self._own.recv_bytes())
        except (EOFError, OSError):
            return

    def finish(self) -> tuple[bytes, ...]:
        """Close; what was sent, in order and as it was sent: it is for the parent to unpickle."""
        with contextlib.suppress(OSError):
            self.connection.close()
        if self._drainer is not None:
            if sys.platform != "win32":
                # A child of the test may hold the other end: what was sent is read, then it ends.
                with contextlib.suppress(OSError):
                    with socket.socket(fileno=os.dup(self._own.fileno())) as view:
                        view.shutdown(socket.SHUT_RD)
            self._drainer.join(timeout=5)
        with contextlib.suppress(OSError):
            self._own.close()
        return tuple(self.messages)


class _DrainedConnection(Connection):  # type: ignore[type-arg]
    """A real Connection that says when it is about to be written to."""

    before_send: Callable[[], None]

    def send(self, obj: Any) -> None:
        self.before_send()
        super().send(obj)

    def send_bytes(self, *arguments: Any, **keywords: Any) -> None:
        self.before_send()
        super().send_bytes(*arguments, **keywords)


def run_stock_style(
    load: Callable[[], Any],
    rank: int,
    test_name: str,
    file_name: str,
    keywords: Mapping[str, Any],
) -> RankReport:
    """Call the class's own ``_run`` as stock does, and report how its process would have ended.

    Args:
        load: brings the worker into its context and returns the test class; what it raises ends
            the test as it would have ended a stock worker that was starting.
    """
    pipe = TestPipe()
    # No function in between: torch formats the whole stack three times when it seeds a test.
    try:
        cls = load()
        cls._run(rank, test_name, file_name, pipe.connection, **_accepted(cls._run, keywords))
    except BaseException as error:
        return _report_on(rank, pipe, error)
    return _report_on(rank, pipe, None)


def run_class_style(
    load: Callable[[], Any],
    rank: int,
    test_name: str,
    file_name: str,
    meet: Callable[[], bool],
) -> RankReport:
    """Run a test of a class whose process group ``load`` has made, if it was not there yet.

    Args:
        meet: waits for every rank's body to end; False if one will not.
    """
    pipe = TestPipe()
    try:
        test = load()(test_name)
        test.rank = rank
        test.file_name = file_name
        if getattr(test, "setup_in_workers", False):
            body = getattr(test, test_name)
            setattr(test, test_name, functools.partial(_run_with_fixtures, test, body, meet))
        test.run_test(test_name, pipe.connection)
    except BaseException as error:
        return _report_on(rank, pipe, error)
    return _report_on(rank, pipe, None)


def _run_with_fixtures(test: Any, body: Callable[[], Any], meet: Callable[[], bool]) -> None:
    """A test's body between its ``setUp`` and ``tearDown``, which may hold collectives: so the
    latter waits for all bodies, and is left out if one failed. Cleanups come last."""
    ending: unittest.SkipTest | SystemExit | None = None
    try:
        test.setUp()
        try:
            body()
        except unittest.SkipTest as skip:
            ending = skip
        except SystemExit as exit:
            if _exit_code(exit)[0] not in {0, *_torch_api.test_skips()}:
                raise
            ending = exit
        if meet():
            test.tearDown()
    finally:
        test.doCleanups()
    if ending is not None:
        raise ending


def _accepted(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that ``function`` takes: copies of stock's ``_run`` may lack ``**kwargs``."""
    names, any_name = _keyword_names(getattr(function, "__func__", function))
    return {name: value for name, value in keywords.items() if any_name or name in names}


@functools.lru_cache(maxsize=64)
def _keyword_names(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY)
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _report_on(rank: int, pipe: TestPipe, ended_by: BaseException | None) -> RankReport:
    exit_code, raised = _exit_code(ended_by)
    if os.getpid() != pipe.pid:
        # A fork that the test made: its end is its own, and no report of the rank's.
        raise SystemExit(exit_code)
    messages = pipe.finish()
    failure = skip_reason = used_up = None
    if exit_code in _torch_api.test_skips():
        skip_reason = str(raised) if isinstance(raised, unittest.SkipTest) else None
    elif exit_code != 0:
        used_up = "its test failed"
        if raised is not None:
            failure = describe(raised)
        elif exit_code == TEST_ERROR_EXIT_CODE and messages:
            text = _text(messages[-1])
            failure = Failure("Exception", text.strip().rpartition("\n")[2], text, False)
    if used_up is None and _torch_api.started_rpc():
        used_up = "its test started an RPC agent"
    return RankReport(
        rank, Ending.REPORTED, exit_code, failure, skip_reason, messages, used_up=used_up
    )


def _text(message: bytes) -> str:
    """The traceback that stock's run_test sends."""
    try:
        return str(pickle.loads(message))
    except Exception as error:
        return f"(a message that cannot be unpickled: {error})"


def _exit_code(error: BaseException | None) -> tuple[int, BaseException | None]:
    """The exit code of a process that ``error`` ends, and the exception of the test's own."""
    if not isinstance(error, SystemExit):
        return (0 if error is None else 1), error
    # Stock's run_test turns what the test raised into an exit code while handling it.
    raised = error.__context__
    if error.code is None:
        return 0, raised
    if isinstance(error.code, int):
        # An exit status has eight bits.
        return error.code & 0xFF, raised
    print(error.code, file=sys.stderr)
    return 1, raised


def note_subtest(error: BaseException, message: object, parameters: Mapping[str, Any]) -> None:
    """Note on an exception which sub-test it ended (the innermost is noted first)."""
    words = [] if message is None else [f"[{message}]"]
    if parameters or not words:
        words.append(f"({', '.join(f'{name}={value!r}' for name, value in parameters.items())})")
    with contextlib.suppress(AttributeError):  # An exception with slots.
        noted = getattr(error, _SUBTESTS, ())
        setattr(error, _SUBTESTS, (" ".join(words), *noted))


def describe(error: BaseException) -> Failure:
    """An exception as text, with the test's own lines only."""
    shown = traceback.TracebackException.from_exception(error)
    hidden = set(_hidden_frames(error))
    for exception in _chain(shown):
        kept = [f for f in exception.stack if (f.filename, f.lineno) not in hidden]
        if kept:
            exception.stack = traceback.StackSummary.from_list(kept)
    text = "".join(shown.format())
    subtests = getattr(error, _SUBTESTS, ())
    if subtests:
        text += f"in sub-test {' '.join(subtests)}\n"
    last = "".join(shown.format_exception_only()).strip()
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    message = last.removeprefix(name).removeprefix(": ")
    return Failure(name, message.partition("\n")[0], text, isinstance(error, AssertionError))


def _chain(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    seen: set[int] = set()
    pending: list[traceback.TracebackException | None] = [shown]
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        yield exception
        pending += [exception.__cause__, exception.__context__]
        pending += getattr(exception, "exceptions", None) or []


def _hidden_frames(error: BaseException) -> Iterator[tuple[str, int]]:
    """The frames of harnesses: those that lead to the test's own, and those of assertions."""
    stock = _torch_api.stock_test_case()
    files = {stock.run_test.__code__.co_filename, stock.assertEqual.__code__.co_filename}
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        pending += [exception.__cause__, exception.__context__]
        held: list[tuple[str, int]] = []
        for frame, line in traceback.walk_tb(exception.__traceback__):
            code = frame.f_code
            place = (code.co_filename, line)
            ours = code.co_filename.startswith(_PACKAGE) or code is stock.assertEqual.__code__
            if ours or "__unittest" in frame.f_globals:
                yield place
            elif code.co_filename in files:
                held.append(place)
            else:
                # These led here. Below the test's last frame they may be what failed.
                yield from held
                held.clear()


def refuse(rank: int, used_up: str) -> RankReport:
    """The report on a test that was not run, since an earlier one left the worker unfit for it."""
    text = f"the worker could not be brought back to its state: {used_up}"
    failure = Failure("torchcontinuous.StateLeakError", text, f"{text}\n", False)
    return RankReport(
        rank,
        Ending.REPORTED,
        TEST_ERROR_EXIT_CODE,
        failure,
        used_up="it refused the test",
        refused=True,
    )


def fail_for_leaks(report: RankReport, leaks: Sequence[Leak]) -> RankReport:
    """A test that passed, made a failure by what its class does not let it leave changed."""
    if report.exit_code != 0:
        return report
    lines = [f"{leak.probe}: {leak.what}: {leak.before} became {leak.after}" for leak in leaks]
    text = "the test left changed what its class guards:\n" + "\n".join(lines) + "\n"
    failure = Failure("torchcontinuous.StateLeakError", lines[0], text, True)
    return dataclasses.replace(
        report, exit_code=TEST_ERROR_EXIT_CODE, failure=failure, used_up="its test failed"
    )
