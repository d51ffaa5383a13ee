"""Public exceptions and warnings. Facts are attributes; the text is for people."""

from __future__ import annotations

__all__ = [
    "ChannelError",
    "ConfigurationError",
    "MissingTorchNameError",
    "RankWarning",
    "StartError",
    "StateLeakError",
    "StateLeakWarning",
    "TorchContinuousError",
    "UnreachableClassError",
    "WorkerAssertionError",
    "WorkerError",
]


class TorchContinuousError(Exception):
    """Base of every exception that this package raises on its own account."""


class ConfigurationError(TorchContinuousError, ValueError):
    """A setting has a value that means nothing.

    Attributes:
        setting: the class, decorator or environment variable that holds it.
        value: what was found there.
    """

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        self.setting = setting
        self.value = value
        super().__init__(f"{setting}: {value!r} is not valid. {remedy}")


class UnreachableClassError(TorchContinuousError, TypeError):
    """Workers cannot import the test class (it was defined in a function, say).

    Attributes:
        test_class: the full name of the class.
    """

    def __init__(self, test_class: str, reason: str) -> None:
        self.test_class = test_class
        super().__init__(
            f"workers cannot import {test_class}: {reason}. Define the class at the top level of "
            "its module (or inside another class), under the name that it is found by"
        )


class MissingTorchNameError(TorchContinuousError, ImportError):
    """The torch in use lacks a name that this package needs.

    Attributes:
        missing: the dotted name.
        version: torch's version.
    """

    def __init__(self, missing: str, version: str, remedy: str) -> None:
        self.missing = missing
        self.version = version
        super().__init__(f"torch {version} has no {missing}. {remedy}")


class ChannelError(TorchContinuousError, ConnectionError):
    """A connection to a worker or nursery broke, stalled, or carried something unreadable."""


class StartError(TorchContinuousError, RuntimeError):
    """The nursery or a worker did not start."""


class WorkerError(TorchContinuousError, RuntimeError):
    """A test failed in its workers (stock raises a plain RuntimeError there).

    Attributes:
        ranks: the ranks that failed, in order.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(text)


class WorkerAssertionError(WorkerError, AssertionError):
    """Every failing rank raised an AssertionError, so the test is a *failure*, not an error."""


class StateLeakError(WorkerError, AssertionError):
    """Under ``TORCHCONTINUOUS_STRICT=1``: the test passes only in fresh workers."""


class StateLeakWarning(UserWarning):
    """A test failed in a used worker and passed in fresh ones: something leaked into it."""


class RankWarning(UserWarning):
    """The ranks of a test disagree in a way that stock, which asks rank 0, passes over."""
