"""Probes of modules: torch's configuration, torch.distributed's functions, the test's own names."""

from __future__ import annotations

import contextvars
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

from torchcontinuous import _torch_state
from torchcontinuous._probes import MISSING, Probe, alike, leak
from torchcontinuous._report import Leak
from torchcontinuous._snapshots import (
    CONTAINERS,
    Names,
    Namespace,
    Snapshot,
    count_writes,
    snapshots,
)


class Configs(Probe):
    """Overrides in configuration modules. One first loaded by the test is expected to have none.

    In newer torch each override is a context variable: that none was set is seen at once, from the
    context as a whole. (Other context variables are put back along with them.) In older torch it
    is an attribute of each entry, and all are compared.
    """

    def __init__(self) -> None:
        self._configs: list[_torch_state.ConfigEntries] = []
        self._attributes: list[tuple[str, Any, object]] = []
        self._context = contextvars.copy_context()
        self._values = dict(self._context.items())
        self._containers: list[Snapshot] = []
        self._count = 0
        self._take_in_new(first=True)
        held = {v: value for v, value in self._values.items() if isinstance(value, CONTAINERS)}
        # Naming them reads a thousand entries, so only where there is something to name.
        names = self._by_variable() if held else {}
        seen: set[int] = set()
        for variable, value in held.items():
            if variable in names:
                self._containers += snapshots(names[variable][0], value, seen)

    def _take_in_new(self, first: bool = False) -> None:
        known = {config.name for config in self._configs}
        seen: set[int] = set()
        for config in _torch_state.config_modules():
            if config.name in known:
                continue
            self._configs.append(config)
            if config.uses_context:
                continue
            for key, entry in config.entries().items():
                baseline = entry.user_override if first else _torch_state.no_override()
                self._attributes.append((f"{config.name}.{key}", entry, baseline))
                self._containers += snapshots(f"{config.name}.{key}", baseline, seen)
        self._count = _torch_state.config_module_count()
        self._entries = [entry for _, entry, _ in self._attributes]
        self._baseline = [baseline for _, _, baseline in self._attributes]

    def _by_variable(self) -> dict[contextvars.ContextVar[Any], tuple[str, Any]]:
        """The names and entries of overrides that are context variables."""
        return {
            entry.user_override: (f"{config.name}.{key}", entry)
            for config in self._configs
            if config.uses_context
            for key, entry in config.entries().items()
        }

    def changed(self) -> bool:
        if _torch_state.config_module_count() != self._count:
            self._take_in_new()
        try:
            if contextvars.copy_context() != self._context:
                return True
        except Exception:
            return True
        return not all(map(is_, map(_override, self._entries), self._baseline)) or any(
            snapshot.changed() for snapshot in self._containers
        )

    def restore(self) -> Iterator[Leak]:
        entries = self._by_variable()
        for snapshot in self._containers:
            if snapshot.changed():
                yield snapshot.put_back()
        for variable, after in list(contextvars.copy_context().items()):
            before = self._values.get(variable, MISSING)
            if before is MISSING:
                # A variable cannot be unset; where it has a default that is the same.
                before = contextvars.Context().run(_default, variable)
            if before is after or before is MISSING:
                continue
            variable.set(before)
            if variable in entries:
                yield from _told(*entries[variable], before, after)
        for what, entry, before in self._attributes:
            after = entry.user_override
            if after is not before:
                entry.user_override = before
                yield from _told(what, entry, before, after)
        for config in self._configs:
            config.invalidate()
        self._context = contextvars.copy_context()


_override = attrgetter("user_override")


def _default(variable: contextvars.ContextVar[Any]) -> object:
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _told(what: str, entry: Any, before: object, after: object) -> Iterator[Leak]:
    """The leak of an override, unless it is the copy of a default that merely reading it makes."""
    copied = before is _torch_state.no_override() and alike(entry.default, after)
    if not (copied or alike(before, after)):
        yield leak(what, _shown(before), _shown(after), True)


def _shown(override: object) -> object:
    return MISSING if override is _torch_state.no_override() else override


_PATCHABLE = (types.FunctionType, types.BuiltinFunctionType, type)


class _Functions:
    """The functions and classes that a module's names stand for."""

    def __init__(self, name: str, module: types.ModuleType) -> None:
        self.name = name
        self.names = vars(module)
        self.saved = {n: v for n, v in self.names.items() if issubclass(type(v), _PATCHABLE)}

    def put_back(self) -> Iterator[Leak]:
        for name, before in self.saved.items():
            after = self.names.get(name, MISSING)
            if after is not before:
                self.names[name] = before
                yield leak(f"{self.name}.{name}", before, after, True)


class Patches(Probe):
    """Functions and classes replaced in the modules of ``torch.distributed`` that tests patch.

    Left out: its other modules (operators' rules, RPC, the insides of sharded tensors, pipelining
    and the elastic launcher), attributes of its classes, and all modules outside it. To look at
    a name is to write to its object's reference count: with every module, workers would share
    several megabytes less with each other.
    """

    def __init__(self) -> None:
        self._missing = list(_torch_state.PATCHED_MODULES)
        self._functions: list[_Functions] = []
        self._views: list[Any] = []
        self._values: list[list[object]] = []
        self._writes: Callable[[], Sequence[int]] | None = None
        self._take_in_new()

    def _take_in_new(self) -> None:
        self._count = len(sys.modules)
        for name in [name for name in self._missing if name in sys.modules]:
            self._missing.remove(name)
            self._functions.append(_Functions(name, sys.modules[name]))
            self._views.append(vars(sys.modules[name]).values())
            self._values.append(list(self._views[-1]))
        self._writes = count_writes([functions.names for functions in self._functions])
        self._written = self._writes() if self._writes is not None else ()

    def changed(self) -> bool:
        if len(sys.modules) != self._count:
            self._take_in_new()
        if self._writes is not None:
            return self._writes() != self._written
        try:
            # Lists compare by identity first, several times as fast as dictionaries do.
            return list(map(list, self._views)) != self._values
        except Exception:  # Something that was put there cannot be compared.
            return True

    def restore(self) -> Iterator[Leak]:
        # Other values than functions change in the course of things: they are passed over.
        writes = self._writes() if self._writes is not None else ()
        for index, view in enumerate(self._views):
            if writes and writes[index] == self._written[index]:
                continue
            now, saved = list(view), self._values[index]
            if len(now) != len(saved) or not all(map(is_, now, saved)):
                yield from self._functions[index].put_back()
                self._values[index] = list(view)
        if self._writes is not None:
            self._written = self._writes()


#: Packages whose classes a test may derive from without owning them.
_LIBRARIES = frozenset(
    {"torch", "torchgen", "functorch", "numpy", "pytest", "_pytest", "expecttest", "hypothesis"}
    | {"torchcontinuous"}
    | set(sys.stdlib_module_names)
)


def is_library(module: str) -> bool:
    """Whether a module is the standard library's, torch's, a test runner's or this package's."""
    return module.partition(".")[0] in _LIBRARIES


def names_of_module(cls: type) -> Probe | None:
    """The globals of the test's module, and the attributes of the helper classes in it."""
    module = sys.modules.get(cls.__module__)
    if module is None:
        return None
    helpers = {
        id(value): Namespace(value.__qualname__, value)
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == cls.__module__
        and not hasattr(value, "assertEqual")  # Another test class: no test of this one runs it.
    }
    return Names([Namespace(cls.__module__, module), *helpers.values()], is_library)


def names_of_class(cls: type) -> Probe:
    """The attributes of the test class and of those that it derives from."""
    owners = [base for base in cls.__mro__ if base is cls or not is_library(base.__module__)]
    return Names([Namespace(owner.__qualname__, owner) for owner in owners], is_library)
