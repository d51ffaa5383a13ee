"""Which earlier tests of its class make a test fail in used workers: a search by halving.

``minimise`` is the search, and knows nothing of tests; ``Steps`` runs one of its steps, on workers
of its own, and ``bisect`` is the command around them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torchcontinuous import _settings
from torchcontinuous._order import ordered
from torchcontinuous._registry import pools
from torchcontinuous.errors import StateLeakError, TorchContinuousError

T = TypeVar("T")

#: Exit statuses, besides argparse's own 2 for what cannot be understood.
FOUND, NOT_FOUND, MISUSED, INTERRUPTED = 0, 1, 2, 130


class BadTestIdError(TorchContinuousError, ValueError):
    """A test id that leads to no test that could be searched for."""


# The search


def minimise(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """The items of a failing sequence that it takes to fail, in their order.

    None of those returned can be left out. Ever smaller pieces are left out, and stay out where
    the rest still fails; no subset is tried twice, and neither the whole nor nothing is tried.

    Args:
        items: what is known to fail, as a whole.
        fails: whether a subset does; how often it is asked grows with the logarithm of the
            number of items, for each item returned.
    """
    kept = tuple(range(len(items)))
    tried: dict[tuple[int, ...], bool] = {}
    size = len(kept)
    while len(kept) > 1:
        size = -(-min(size, len(kept)) // 2)
        before, start = kept, 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if rest and rest not in tried:
                tried[rest] = fails([items[position] for position in rest])
            if tried.get(rest):
                kept = rest
            else:
                start += size
        if size == 1 and kept == before:
            break
    return [items[position] for position in kept]


# Test ids


@dataclass(frozen=True)
class Target:
    """The test that is searched for.

    Attributes:
        cls: its class.
        method: its name there.
        prefix: what an id of this class begins with, as the user wrote it.
    """

    cls: Any
    method: str
    prefix: str

    @property
    def methods(self) -> list[str]:
        """The tests of its class, in the order in which they run."""
        return list(unittest.defaultTestLoader.getTestCaseNames(self.cls))

    def id_of(self, method: str) -> str:
        """The id of a test of the same class."""
        return self.prefix + method

    def command(self, before: Sequence[str], settings: Mapping[str, str]) -> str:
        """The command line that runs it after other tests of its class."""
        runner = "pytest" if self.prefix.endswith("::") else "unittest"
        python = "python" if shutil.which("python") == sys.executable else sys.executable
        ids = [self.id_of(method) for method in (*before, self.method)]
        assignments = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        return " ".join([*assignments, shlex.join([python, "-m", runner, *ids])])


def find(test_id: str) -> Target:
    """Import what an id of unittest's or pytest's names.

    Raises:
        BadTestIdError: it names no test, or one whose class shares no workers.
    """
    separator = "::" if "::" in test_id else "."
    prefix, _, method = test_id.rpartition(separator)
    name = _from_pytest(test_id) if separator == "::" else test_id
    loader = unittest.TestLoader()
    try:
        tests = list(_flat(loader.loadTestsFromName(name)))
    except (Exception, SystemExit) as error:
        raise BadTestIdError(f"{test_id}: {type(error).__name__}: {error}") from error
    if loader.errors:
        reason = str(loader.errors[0]).strip().splitlines()[-1]
        raise BadTestIdError(f"{test_id}: {reason}")
    # Only now, so that the test module is the first to import torch (the nursery does so beside).
    from torchcontinuous.testcase import ContinuousMixin

    if len(tests) != 1 or tests[0].id().rpartition(".")[2] != method:
        raise BadTestIdError(f"{test_id}: give the id of one test, {_form(separator)}")
    target = Target(type(tests[0]), method, prefix + separator)
    if not issubclass(target.cls, ContinuousMixin):
        raise BadTestIdError(
            f"{test_id}: its class derives from neither MultiProcContinuousTest nor "
            "ContinuousMixin, so that its tests share no workers"
        )
    if method not in target.methods:
        raise BadTestIdError(f"{test_id}: {method} is not a test")
    return target


def _form(separator: str) -> str:
    if separator == "::":
        return "path/to/test_file.py::Class::test_name"
    return "package.module.Class.test_name"


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for test in suite if isinstance(suite, unittest.BaseTestSuite) else [suite]:
        if isinstance(test, unittest.BaseTestSuite):
            yield from _flat(test)
        else:
            yield test


def _from_pytest(test_id: str) -> str:
    """unittest's name for a test, once its file can be imported as pytest would import it."""
    path, *names = test_id.split("::")
    file = Path(path).absolute()
    if not file.is_file():
        raise BadTestIdError(f"{test_id}: there is no file {path}")
    folder, modules = file.parent, [file.stem]
    while (folder / "__init__.py").exists():
        modules.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return ".".join([*modules, *names])


# Running


class Outcome(Enum):
    """What became of a test in a step."""

    LEAK = "fails, and passes in fresh workers"
    PASSED = "passes"
    FAILED = "fails"
    SKIPPED = "is skipped"
    NOT_RUN = "did not run"


class _Outcomes(unittest.TextTestResult):
    """Notes what became of each test, by its id."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.noted: dict[str, Outcome] = {}

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.noted.setdefault(test.id(), Outcome.PASSED)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        leak = issubclass(err[0], StateLeakError)
        self.noted[test.id()] = Outcome.LEAK if leak else Outcome.FAILED

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self.noted[test.id()] = Outcome.FAILED

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.noted[test.id()] = Outcome.FAILED

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.noted.setdefault(test.id(), Outcome.SKIPPED)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self.noted[test.id()] = Outcome.PASSED

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self.noted[test.id()] = Outcome.FAILED


class Steps:
    """Runs a test after others of its class, on workers of their own each time, and says so.

    Attributes:
        smallest: the fewest tests after which it was seen to fail, or None.
        leaked_first: a test before it that failed through a leak in the last step, or None.
    """

    def __init__(self, target: Target, verbose: bool = False) -> None:
        self._target = target
        self._verbose = verbose
        self.smallest: list[str] | None = None
        self.leaked_first: str | None = None

    def outcome(self, before: Sequence[str]) -> Outcome:
        """What becomes of the test after those before it."""
        cls = self._target.cls
        tests = [cls(method) for method in (*before, self._target.method)]
        try:
            with contextlib.ExitStack() as stack:
                if not self._verbose:
                    nowhere = open(os.devnull, "w", errors="replace")  # noqa: SIM115
                    for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                        stack.enter_context(redirect(stack.enter_context(nowhere)))
                runner = unittest.TextTestRunner(verbosity=2, resultclass=_Outcomes)
                result: Any = runner.run(unittest.TestSuite(tests))
        finally:
            # Ended with its class already, unless the step was interrupted.
            pools.close(cls)
            pools.reset_level(cls)
        noted: dict[str, Outcome] = result.noted
        outcome = noted.get(tests[-1].id(), Outcome.NOT_RUN)
        leaks = (t._testMethodName for t in tests[:-1] if noted.get(t.id()) is Outcome.LEAK)
        self.leaked_first = next(leaks, None)
        if outcome is Outcome.LEAK and (self.smallest is None or len(before) < len(self.smallest)):
            self.smallest = list(before)
        say(f"  {f'after {counted(before)}' if before else 'on its own'}: {outcome.value}")
        return outcome

    def fails(self, before: Sequence[str]) -> bool:
        """Whether what these tests left makes it fail."""
        return self.outcome(before) is Outcome.LEAK


def say(text: str) -> None:
    """Print a line of progress at once, also into a pipe."""
    print(text, flush=True)


def counted(tests: Sequence[str]) -> str:
    """How many tests, in words."""
    return "1 test" if len(tests) == 1 else f"{len(tests)} tests"


# The command


def bisect(
    test_id: str,
    earlier: Sequence[str] = (),
    order: str = "forwards",
    verbose: bool = False,
) -> int:
    """Search for the tests that make one fail, and print them; the exit status.

    Args:
        test_id: the test, in unittest's form or pytest's.
        earlier: the tests, by id or name, that ran before it; those of its class if none.
        order: in which the class's tests ran.
        verbose: whether what the steps print is shown.

    Raises:
        BadTestIdError: an id names no test, or the order none that is known.
        ConfigurationError: an environment variable of this package has an invalid value.
    """
    settings = {_settings.STRICT: "1"}
    if os.environ.get(_settings.ISOLATION):
        settings[_settings.ISOLATION] = "none"
    os.environ.update(settings)
    _settings.check()
    target = find(test_id)
    given = [_method(target, name) for name in dict.fromkeys(earlier)]
    if target.cls(target.method)._continuous_isolation() == "process":
        say(
            f"{test_id} runs at level 'process' (set on its class, or with @isolated): it never "
            "meets used workers, and nothing can leak into it"
        )
        return NOT_FOUND
    steps = Steps(target, verbose)
    try:
        return _search(target, steps, given, order, settings)
    except KeyboardInterrupt:
        if steps.smallest is None:
            say("Interrupted before it was seen to fail")
        else:
            say("Interrupted. The smallest set so far:")
            _show(target, steps.smallest, settings)
        return INTERRUPTED


def _method(target: Target, name: str) -> str:
    """The name of an earlier test, from its id or name."""
    if name not in target.methods:
        found = find(name)
        if found.cls is not target.cls:
            raise BadTestIdError(
                f"{name}: not of the same class as the test, so that they share no workers"
            )
        name = found.method
    if name == target.method:
        raise BadTestIdError(f"{name}: is the test itself, and cannot come before it")
    return name


def _search(
    target: Target,
    steps: Steps,
    given: Sequence[str],
    order: str,
    settings: Mapping[str, str],
) -> int:
    test_id = target.id_of(target.method)
    say(f"What makes {test_id} fail? Each step has new workers:")
    alone = steps.outcome([])
    if alone is not Outcome.PASSED:
        reasons = {
            Outcome.FAILED: "It fails on its own: nothing leaked",
            Outcome.SKIPPED: "It is skipped on its own: nothing to search for",
        }
        say(reasons.get(alone, "It did not run: its class could not be set up"))
        say(f"To see it:\n  {target.command([], settings)}")
        return NOT_FOUND
    before = _failing_start(target, steps, given, order)
    if before is None:
        return NOT_FOUND
    found = minimise(before, steps.fails)
    say("Once more, the set that was found:")
    again = steps.fails(found)
    say(
        f"{test_id} fails after {counted(found)} of {len(before)}"
        + ("; none can be left out:" if len(found) > 1 else ":")
    )
    _show(target, found, settings)
    if not again:
        say("But it did not fail the last time: it fails only sometimes. Search again")
        return NOT_FOUND
    return FOUND


def _failing_start(
    target: Target, steps: Steps, given: Sequence[str], order: str
) -> list[str] | None:
    """Tests after which it fails, or None and what to try."""
    if given:
        tries = {"the tests given": list(given)}
    else:
        methods = ordered(target.methods, order)
        position = methods.index(target.method)
        others = methods[:position] + methods[position + 1 :]
        # Where nothing, or all else, comes before it there is one try.
        tries = {"the tests before it in its class": methods[:position]}
        if others != methods[:position]:
            tries["all others of its class, also those that come later"] = others
    leaked_first = None
    for what, before in tries.items():
        if before:
            say(f"With {what}:")
            if steps.fails(before):
                return before
            leaked_first = leaked_first or steps.leaked_first
    if not any(tries.values()):
        say("It is the only test of its class: there is nothing that could leak into it")
        return None
    say("It was not seen to fail in used workers. What to try:")
    if leaked_first is not None:
        say(
            f"  - State leaked into {leaked_first} first, and its class went on at level "
            "'process'. Search for that:\n    python -m torchcontinuous bisect "
            + shlex.quote(target.id_of(leaked_first))
        )
    if not given:
        say("  - The tests that StateLeakWarning names, in their order: --from test_a test_b ...")
    say("  - The same once more, if it fails only sometimes")
    return None


def _show(target: Target, before: Sequence[str], settings: Mapping[str, str]) -> None:
    for method in before:
        say(f"  {target.id_of(method)}")
    say(f"To reproduce:\n  {target.command(before, settings)}")
