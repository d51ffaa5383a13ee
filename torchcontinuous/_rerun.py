"""Holding back what one attempt at a test tells the runner, until it is known to count."""

from __future__ import annotations

import functools
from typing import Any

#: What a test tells its result about its outcome; all else goes through as it comes.
_VERDICTS = frozenset(
    {
        "addSuccess",
        "addError",
        "addFailure",
        "addSkip",
        "addSubTest",
        "addExpectedFailure",
        "addUnexpectedSuccess",
        "addDuration",
    }
)


class Attempt:
    """Stands in for a runner's result (unittest's, pytest's item) during one attempt at a test.

    It passes for an object of the result's own class. Verdicts are held back, and are told of
    ``test``, whichever instance they came from.

    Args:
        first: False for a second attempt, whose ``startTest`` the result has had.
    """

    _own = frozenset({"_result", "_test", "_first", "_held", "_stopped", "deliver", "_note"})

    def __init__(self, result: Any, test: Any, first: bool = True) -> None:
        self._result = result
        self._test = test
        self._first = first
        self._held: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._stopped = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._result)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Attempt._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._result, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._result, name)
        if name in _VERDICTS or name in ("startTest", "stopTest"):
            return functools.partial(self._note, name, value)
        return value

    def _note(self, name: str, forward: Any, test: Any, *rest: Any, **keywords: Any) -> None:
        if name == "startTest":
            if self._first:
                forward(self._test)
        elif name == "stopTest":
            self._stopped = True
        else:
            self._held.append((name, rest, keywords))

    def deliver(self, instead_of_success: Any = None) -> None:
        """Tell the result what was held back, and that the test is over.

        Args:
            instead_of_success: exception information with which a success becomes a failure.
        """
        for name, rest, keywords in self._held:
            if name == "addSuccess" and instead_of_success is not None:
                self._result.addFailure(self._test, instead_of_success)
            else:
                getattr(self._result, name)(self._test, *rest, **keywords)
        self._held.clear()
        if self._stopped or not self._first:
            self._result.stopTest(self._test)
