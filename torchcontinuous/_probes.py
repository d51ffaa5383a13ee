"""What a probe is: one kind of a process's state, compared with its baseline and put back.

A probe takes its baseline when it is made. ``changed`` has to be cheap and may err on the side of
yes; ``restore`` compares exactly. Objects of users are compared by identity alone: their ``__eq__``
may do anything.
"""

from __future__ import annotations

import contextlib
import reprlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar

from torchcontinuous._report import Leak

#: Types whose values are the same if they are equal.
PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None)})

#: Characters of a value that a leak shows.
SHOWN = 80

#: Stands for what is not there: a deleted name, say.
MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "(not set)"})()


def same(one: object, other: object) -> bool:
    """Whether two values are one object, or equal and of one plain type."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in PLAIN:
        return one == other
    if isinstance(one, tuple) and isinstance(other, tuple) and kind is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return False


def alike(one: object, other: object) -> bool:
    """The same, or plain containers of alike elements."""
    if same(one, other):
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple, deque)) and isinstance(other, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return alike([*one.keys()], [*other.keys()]) and alike([*one.values()], [*other.values()])
    if isinstance(one, (set, frozenset)) and isinstance(other, (set, frozenset)):
        if set(map(id, one)) == set(map(id, other)):
            return True
        return all(type(e) in PLAIN for e in (*one, *other)) and one == other
    return False


class _Describer(reprlib.Repr):
    """Never calls the ``__repr__`` of a user's object, or of a tensor, which may wait for peers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = SHOWN

    def repr_instance(self, x: Any, level: int) -> str:
        if x is MISSING or type(x) in PLAIN:
            return repr(x)
        if isinstance(x, type):
            return f"<class {x.__module__}.{x.__qualname__}>"
        if isinstance(x, types.ModuleType):
            return f"<module {vars(x).get('__name__')}>"
        if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
            return f"<function {x.__qualname__} at {id(x):#x}>"
        kind = type(x)
        if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
            return str(x)
        return f"<{kind.__module__}.{kind.__qualname__} object at {id(x):#x}>"

    def repr1(self, x: Any, level: int) -> str:
        # Repr chooses by the type's name, which a user's class may share with list or dict.
        known = type(x).__module__ in ("builtins", "collections")
        return super().repr1(x, level) if known else self.repr_instance(x, level)


_describer = _Describer()


def short(value: object) -> str:
    """A value's text, short and without running any code of the value's."""
    try:
        text = _describer.repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def difference(before: Sequence[object], after: Sequence[object]) -> tuple[str, str]:
    """The texts of two sequences, without what they begin and end with alike."""
    most = min(len(before), len(after))
    start = next((i for i in range(most) if not same(before[i], after[i])), most)
    most -= start
    end = next((i for i in range(most) if not same(before[-1 - i], after[-1 - i])), most)
    cut = [list(items[start : len(items) - end]) for items in (before, after)]
    marks = "... " if start else "", " ..." if end else ""
    shown = [f"{marks[0]}{short(items)[: SHOWN - 8]}{marks[1]}" for items in cut]
    return shown[0], shown[1]


class Probe:
    """One kind of state. Its baseline is the state at the time when the probe was made."""

    #: Where the parent sets the state for each test, the baseline is taken then.
    from_parent: ClassVar[bool] = False

    def begin(self) -> None:
        """Just before a test."""

    def changed(self) -> bool:
        """Whether there may be a difference; cheap, as it runs after each test."""
        raise NotImplementedError

    def restore(self) -> Iterator[Leak]:
        """Put every difference back, or say that it cannot be."""
        raise NotImplementedError


def leak(what: str, before: object, after: object, restored: bool) -> Leak:
    """A leak of whichever probe yields it: the guard fills in the name."""
    return Leak("", what, short(before), short(after), restored)


def attempt(put: Callable[[], object], undone: Callable[[], bool]) -> bool:
    """Whether ``put`` brought the baseline back."""
    try:
        put()
        return undone()
    except Exception:
        return False


@dataclass(frozen=True)
class Setting:
    """A value that can be read, and set unless only new workers undo it."""

    what: str
    get: Callable[[], object]
    put: Callable[[Any], object] | None = None
    #: Tells values that libraries leave in the course of things: put back, and no leak.
    usual: Callable[[object], bool] = lambda value: False


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that could not be read."""

    error: str


def attributes(what: str, owner: object, *names: str) -> Iterator[Setting]:
    """A setting for each attribute that ``owner`` has."""
    for name in names:
        if hasattr(owner, name):
            yield attribute(what, owner, name)


def attribute(what: str, owner: Any, name: str) -> Setting:
    """One attribute as a setting."""
    return Setting(
        f"{what}.{name}",
        lambda: getattr(owner, name, MISSING),
        lambda value: setattr(owner, name, value),
    )


class Settings(Probe):
    """Values that are read and set one by one.

    Args:
        read: reads them all at once, where that is faster.
        plain: whether torch's C++ or the interpreter makes the values, so that ``==`` is safe.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        read: Callable[[], list[object]] | None = None,
        plain: bool = False,
    ) -> None:
        self._settings: Sequence[Setting] = tuple(settings)
        self._getters = [setting.get for setting in self._settings]
        self._read = read
        self._plain = plain
        self._baseline = [_value(setting) for setting in self._settings]

    def changed(self) -> bool:
        try:
            now = self._read() if self._read is not None else [get() for get in self._getters]
        except Exception:
            return True
        if self._plain:
            return now != self._baseline
        baseline = self._baseline
        return not (all(map(is_, now, baseline)) or all(map(same, now, baseline)))

    def restore(self) -> Iterator[Leak]:
        found = [
            (setting, before, after)
            for setting, before in zip(self._settings, self._baseline, strict=True)
            if not _equal(before, after := _value(setting))
        ]
        for setting, before, _ in found:
            _put(setting, before)
        # Setting one may have set another.
        for setting, before in zip(self._settings, self._baseline, strict=True):
            if not _equal(before, _value(setting)):
                _put(setting, before)
        for setting, before, after in found:
            restored = _equal(before, _value(setting))
            if not (restored and setting.usual(after)):
                yield leak(setting.what, before, after, restored)


class ParentSettings(Settings):
    """Settings that the parent's context has just changed when a test begins."""

    from_parent = True

    def begin(self) -> None:
        self._baseline = [_value(setting) for setting in self._settings]


def _value(setting: Setting) -> object:
    try:
        return setting.get()
    except Exception as error:
        return Unreadable(f"{type(error).__name__}: {error}")


def _put(setting: Setting, value: object) -> None:
    if setting.put is not None:
        with contextlib.suppress(Exception):
            setting.put(value)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Unreadable) and isinstance(other, Unreadable):
        return one == other
    return same(one, other)
