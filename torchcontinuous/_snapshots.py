"""The contents of containers and namespaces, by identity, and putting them back in place."""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

from torchcontinuous._probes import MISSING, Probe, alike, attempt, difference, leak, same, short
from torchcontinuous._report import Leak

_CACHE = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True)
class _Kind:
    """How one type of container is read and filled, past what a subclass may override."""

    type: type
    elements: Callable[[Any], list[Any]]
    refill: Callable[[Any, list[Any]], object]


def _refill_dict(container: dict[Any, Any], saved: list[Any]) -> None:
    dict.clear(container)
    half = len(saved) // 2
    dict.update(container, zip(saved[:half], saved[half:], strict=True))


def _refill_ordered(container: OrderedDict[Any, Any], saved: list[Any]) -> None:
    OrderedDict.clear(container)
    half = len(saved) // 2
    for key, value in zip(saved[:half], saved[half:], strict=True):
        OrderedDict.__setitem__(container, key, value)


def _refill_set(container: set[Any], saved: list[Any]) -> None:
    set.clear(container)
    set.update(container, saved)


def _refill_deque(container: deque[Any], saved: list[Any]) -> None:
    deque.clear(container)
    deque.extend(container, saved)


_KINDS = (
    _Kind(list, list.copy, lambda c, saved: list.__setitem__(c, slice(None), saved)),
    # An OrderedDict keeps a second list of its keys, which dict's own methods pass by.
    _Kind(OrderedDict, lambda c: [*OrderedDict.keys(c), *OrderedDict.values(c)], _refill_ordered),
    _Kind(dict, lambda c: [*dict.keys(c), *dict.values(c)], _refill_dict),
    _Kind(set, lambda c: [*set.__iter__(c)], _refill_set),
    _Kind(deque, lambda c: [*deque.__iter__(c)], _refill_deque),
    _Kind(
        bytearray,
        lambda c: [bytes(c)],
        lambda c, saved: bytearray.__setitem__(c, slice(None), saved[0]),
    ),
)

CONTAINERS = tuple(kind.type for kind in _KINDS)


class Snapshot:
    """One container's elements as they are now."""

    __slots__ = ("_elements", "_kind", "_saved", "container", "what")

    def __init__(self, what: str, container: Any) -> None:
        self.what = what
        self.container = container
        self._kind = next(kind for kind in _KINDS if isinstance(container, kind.type))
        self._elements = self._kind.elements
        self._saved = self._elements(container)

    def changed(self) -> bool:
        now, saved = self._elements(self.container), self._saved
        if len(now) != len(saved):
            return True
        if all(map(is_, now, saved)):
            return False
        if self._kind.type is set:  # Its order may differ.
            return not alike(set(now), set(saved))
        return not all(map(same, now, saved))

    def put_back(self) -> Leak:
        """Fill the container with what it had."""
        before, after = self._shown(self._elements(self.container))
        restored = attempt(
            lambda: self._kind.refill(self.container, self._saved), lambda: not self.changed()
        )
        return Leak("", self.what, before, after, restored)

    def _shown(self, now: list[Any]) -> tuple[str, str]:
        """Texts of what was and what is, without what is the same in both."""
        saved = self._saved
        if issubclass(self._kind.type, dict):
            pairs = [
                list(zip(e[: len(e) // 2], e[len(e) // 2 :], strict=True)) for e in (saved, now)
            ]
            return difference(*pairs)
        if self._kind.type is set:
            one, other = set(map(id, now)), set(map(id, saved))
            return difference(
                [e for e in saved if id(e) not in one], [e for e in now if id(e) not in other]
            )
        return difference(saved, now)


def snapshots(what: str, value: object, seen: set[int]) -> Iterator[Snapshot]:
    """Snapshots of a container and of those in it, at any depth; of each container one."""
    pending = [(what, value)]
    while pending:
        path, found = pending.pop()
        if not isinstance(found, (*CONTAINERS, tuple)) or id(found) in seen:
            continue
        seen.add(id(found))
        if _is_namespace(found):
            continue
        if isinstance(found, dict):
            inner = [(f"{path}[{_key(key)}]", dict.__getitem__(found, key)) for key in list(found)]
        elif isinstance(found, (list, tuple, deque)):
            inner = [(f"{path}[{index}]", element) for index, element in enumerate(found)]
        else:
            inner = []
        pending += [part for part in inner if isinstance(part[1], (*CONTAINERS, tuple))]
        if not isinstance(found, tuple):
            yield Snapshot(path, found)


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int) else f"<{type(key).__qualname__}>"


def _is_namespace(value: object) -> bool:
    """Whether this is some module's own dictionary, or all modules."""
    return isinstance(value, dict) and (
        value is sys.modules or ("__name__" in value and "__spec__" in value)
    )


#: Where CPython 3.13 and older keeps, in a dictionary, a number that each change of it makes new
#: (PEP 509): after its type, its count of references and its length.
_VERSION_OFFSET = 3 * ctypes.sizeof(ctypes.c_void_p)


def count_writes(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[], Sequence[int]] | None:
    """A function whose result differs once one of the dictionaries was written to; None where this
    interpreter does not count.

    It looks at none of the values: to look at one is to write its count of references, in memory
    that forked workers share until then.
    """
    if not _counts_writes():
        return None
    versions = [ctypes.c_uint64.from_address(id(d) + _VERSION_OFFSET) for d in dictionaries]
    read = attrgetter("value")
    return lambda: list(map(read, versions))


@functools.cache
def _counts_writes() -> bool:
    """Whether it is true of this interpreter; nothing else of it is relied upon."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14):
        return False
    probe: dict[str, int] = {"one": 1}
    version = ctypes.c_uint64.from_address(id(probe) + _VERSION_OFFSET)
    found = [version.value, version.value]
    for change in ({"one": 2}, {"two": 2}):
        probe.update(change)
        found.append(version.value)
    del probe["two"]
    found.append(version.value)
    return found[0] == found[1] and len(set(found)) == len(found) - 1


class Contents(Probe):
    """Lists of the interpreter's or a library's: which object a name holds, and what is in it."""

    def __init__(self, places: dict[str, tuple[Any, str]]) -> None:
        self._places = [
            (what, owner, name, Snapshot(what, getattr(owner, name)))
            for what, (owner, name) in places.items()
        ]

    def changed(self) -> bool:
        return any(
            getattr(owner, name, None) is not saved.container or saved.changed()
            for _, owner, name, saved in self._places
        )

    def restore(self) -> Iterator[Leak]:
        for what, owner, name, saved in self._places:
            found = getattr(owner, name, MISSING)
            moved = found is not saved.container
            if moved:
                setattr(owner, name, saved.container)
            if saved.changed():
                yield saved.put_back()
            elif moved and not alike(found, saved.container):
                texts = (
                    difference(saved.container, found)
                    if isinstance(found, list)
                    else (short(saved.container), short(found))
                )
                yield Leak("", what, *texts, True)


class ParentContents(Contents):
    """Lists that the parent's context has just been written into when a test begins."""

    from_parent = True

    def begin(self) -> None:
        self._places = [
            (what, owner, name, saved)
            if getattr(owner, name) is saved.container and not saved.changed()
            else (what, owner, name, Snapshot(what, getattr(owner, name)))
            for what, owner, name, saved in self._places
        ]


class Namespace:
    """The names of a module or class, and the objects that they stand for."""

    def __init__(self, what: str, owner: Any) -> None:
        self.what = what
        self.owner = owner
        self._names = vars(owner)
        self._saved = {n: v for n, v in self._names.items() if not _is_bookkeeping(n)}
        self._all = list(self._names.values())

    def values(self) -> Iterator[tuple[str, object]]:
        """Names, written as a reader would look for them, and their values."""
        for name, value in self._saved.items():
            yield f"{self.what}.{name}", value

    def changed(self) -> bool:
        names, saved = self._names, self._all
        return len(names) != len(saved) or not all(map(is_, names.values(), saved))

    def put_back(self) -> Iterator[Leak]:
        """Undo what was bound, rebound and deleted."""
        for name, before in self._saved.items():
            after = self._names.get(name, MISSING)
            if not same(before, after):
                restored = attempt(
                    lambda: self._set(name, before),  # noqa: B023
                    lambda: self._names.get(name) is before,  # noqa: B023
                )
                yield leak(f"{self.what}.{name}", before, after, restored)
        for name in [n for n in self._names if n not in self._saved and not _is_bookkeeping(n)]:
            after = self._names[name]
            if self._is_own_submodule(name, after):
                self._saved[name] = after
                continue
            restored = attempt(
                lambda: self._delete(name),  # noqa: B023
                lambda: name not in self._names,  # noqa: B023
            )
            yield leak(f"{self.what}.{name}", MISSING, after, restored)
        self._all = list(self._names.values())

    def _set(self, name: str, value: object) -> None:
        if isinstance(self.owner, type):
            type.__setattr__(self.owner, name, value)
        else:
            vars(self.owner)[name] = value

    def _delete(self, name: str) -> None:
        if isinstance(self.owner, type):
            type.__delattr__(self.owner, name)
        else:
            del vars(self.owner)[name]

    def _is_own_submodule(self, name: str, value: object) -> bool:
        # The import system binds it, once for the whole process.
        full = f"{getattr(self.owner, '__name__', '')}.{name}"
        return isinstance(value, types.ModuleType) and sys.modules.get(full) is value


#: Names that unittest keeps on a class, and one that the harness sets on stock's.
_BOOKKEEPING = frozenset(
    {"_classSetupFailed", "_class_cleanups", "tearDown_exceptions", "pytestmark", "_event_listener"}
)


def _is_bookkeeping(name: str) -> bool:
    return (
        (name.startswith("__") and name.endswith("__"))
        or name.startswith(("_torchcontinuous", "_continuous", "@py"))
        or name in _BOOKKEEPING
    )


class Names(Probe):
    """Namespaces, with the containers and function caches that are found in them."""

    def __init__(self, namespaces: list[Namespace], is_library: Callable[[str], bool]) -> None:
        self._namespaces = namespaces
        seen: set[int] = set()
        self._containers: list[Snapshot] = []
        self._caches: list[tuple[str, Any]] = []
        for namespace in namespaces:
            for what, value in namespace.values():
                self._containers += snapshots(what, value, seen)
                cache = getattr(value, "__func__", value) if _is_method(value) else value
                if type(cache) is _CACHE and not is_library(cache.__module__ or ""):
                    self._caches.append((what, cache))
        self._cached = [_filling(cache) for _, cache in self._caches]

    def changed(self) -> bool:
        return (
            any(namespace.changed() for namespace in self._namespaces)
            or any(snapshot.changed() for snapshot in self._containers)
            or [_filling(cache) for _, cache in self._caches] != self._cached
        )

    def restore(self) -> Iterator[Leak]:
        for namespace in self._namespaces:
            if namespace.changed():
                yield from namespace.put_back()
        for snapshot in self._containers:
            if snapshot.changed():
                yield snapshot.put_back()
        for index, (what, cache) in enumerate(self._caches):
            before, after = self._cached[index], _filling(cache)
            if before != after:
                cache.cache_clear()
                self._cached[index] = _filling(cache)
                yield leak(
                    f"{what}.cache_info()", f"{before[1]} entries", f"{after[1]} entries", True
                )


def _is_method(value: object) -> bool:
    return isinstance(value, (staticmethod, classmethod))


def _filling(cache: Any) -> tuple[int, int]:
    """Misses and entries: a full cache takes in new entries without growing."""
    info = cache.cache_info()
    return info.misses, info.currsize
