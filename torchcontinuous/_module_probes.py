"""Probes of modules: torch's configuration, torch.distributed's functions, the test's own names."""

from __future__ import annotations

import contextvars
import sys
import types
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

from torchcontinuous import _torch_state
from torchcontinuous._probes import MISSING, Probe, alike, leak
from torchcontinuous._report import Leak
from torchcontinuous._snapshots import Names, Namespace, Snapshot, snapshots


class NewModules:
    """Which modules were loaded since the last look; cheap where none was."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._count = 0

    def any(self) -> bool:
        """Whether there may be some."""
        return len(sys.modules) != self._count

    def take(self) -> list[tuple[str, types.ModuleType]]:
        """Them, each once."""
        new = [
            (name, module) for name, module in list(sys.modules.items()) if name not in self._seen
        ]
        self._seen.update(name for name, _ in new)
        self._count = len(sys.modules)
        return new


_override = attrgetter("user_override")


class Configs(Probe):
    """Overrides in configuration modules. One first loaded by the test is expected to have none.

    From torch 2.12 or so each override is a context variable: that none was set is seen at once,
    from the context as a whole. (Other context variables are put back along with them.)
    """

    def __init__(self) -> None:
        self._modules = NewModules()
        self._configs: list[_torch_state.ConfigEntries] = []
        self._variables: dict[contextvars.ContextVar[Any], str] = {}
        self._plain: list[tuple[str, Any, object]] = []
        self._containers: list[Snapshot] = []
        self._context = contextvars.copy_context()
        self._values = dict(self._context.items())
        self._take_in_new(first=True)

    def _take_in_new(self, first: bool = False) -> None:
        seen: set[int] = set()
        unset = _torch_state.no_override()
        for config in _torch_state.config_modules(self._modules.take()):
            self._configs.append(config)
            for key, entry in config.entries.items():
                what = f"{config.name}.{key}"
                override = entry.user_override
                if isinstance(override, contextvars.ContextVar):
                    self._variables[override] = what
                    override = self._values.get(override)
                else:
                    self._plain.append((what, entry, override if first else unset))
                self._containers += snapshots(what, override, seen)
        self._baseline = [baseline for _, _, baseline in self._plain]
        self._entries = [entry for _, entry, _ in self._plain]

    def changed(self) -> bool:
        if self._modules.any():
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
        for snapshot in self._containers:
            if snapshot.changed():
                yield snapshot.put_back()
        yield from self._restore_variables()
        for what, entry, before in self._plain:
            after = entry.user_override
            if after is not before:
                entry.user_override = before
                if not _is_default(entry, before, after):
                    yield leak(what, _shown(before), _shown(after), True)
        for config in self._configs:
            config.invalidate()
        self._context = contextvars.copy_context()

    def _restore_variables(self) -> Iterator[Leak]:
        now = dict(contextvars.copy_context().items())
        for variable, after in now.items():
            before = self._values.get(variable, MISSING)
            if before is after:
                continue
            if before is MISSING:
                # A variable cannot be unset; where it has a default that is the same.
                before = contextvars.Context().run(variable.get, MISSING)
                default = contextvars.Context().run(_default, variable)
                if default is MISSING:
                    continue
                before = default
            what = self._variables.get(variable)
            if after is not before:
                variable.set(before)
                if what is not None and not alike(before, after):
                    config_entry = self._entry(what)
                    if not _is_default(config_entry, before, after):
                        yield leak(what, _shown(before), _shown(after), True)

    def _entry(self, what: str) -> Any:
        for config in self._configs:
            name = what.removeprefix(f"{config.name}.")
            if name in config.entries and what.startswith(config.name):
                return config.entries[name]
        return None


def _default(variable: contextvars.ContextVar[Any]) -> object:
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _is_default(entry: Any, before: object, after: object) -> bool:
    """Whether this is the copy of a default that merely reading it makes."""
    return before is _torch_state.no_override() and alike(getattr(entry, "default", MISSING), after)


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


#: Parts of torch.distributed that tests seldom patch, and that hold half of its names: they are
#: looked at in turns, one share of them after each test.
_SELDOM_PATCHED = (
    "torch.distributed.tensor._ops",
    "torch.distributed.tensor.parallel",
    "torch.distributed._shard",
    "torch.distributed._pycute",
    "torch.distributed.rpc",
    "torch.distributed.nn",
    "torch.distributed.autograd",
    "torch.distributed.algorithms",
    "torch.distributed.elastic",
    "torch.distributed.launcher",
)
_TURNS = 10


class Patches(Probe):
    """Functions and classes replaced in the modules of ``torch.distributed``.

    Left out: attributes of its classes, and functions in other modules than these.
    """

    def __init__(self) -> None:
        self._modules = NewModules()
        self._often: list[_Functions] = []
        self._seldom: list[_Functions] = []
        self._turn = 0
        self._take_in_new()

    def _take_in_new(self) -> None:
        for name, module in self._modules.take():
            if name.startswith("torch.distributed") and isinstance(module, types.ModuleType):
                seldom = name.startswith(_SELDOM_PATCHED)
                (self._seldom if seldom else self._often).append(_Functions(name, module))
        self._remember()

    def _remember(self) -> None:
        # Lists of values compare by identity first, several times as fast as dictionaries do.
        self._shares = [self._often, *(self._seldom[turn::_TURNS] for turn in range(_TURNS))]
        self._views = [[functions.names.values() for functions in s] for s in self._shares]
        self._values = [list(map(list, views)) for views in self._views]

    def changed(self) -> bool:
        if self._modules.any():
            self._take_in_new()
        self._turn = self._turn % _TURNS + 1
        try:
            return any(
                list(map(list, self._views[share])) != self._values[share]
                for share in (0, self._turn)
            )
        except Exception:  # Something that was put there cannot be compared.
            return True

    def restore(self) -> Iterator[Leak]:
        # Other values than functions change in the course of things: they are passed over.
        for share in (0, self._turn):
            values = self._values[share]
            for index, view in enumerate(self._views[share]):
                now = list(view)
                if len(now) != len(values[index]) or not all(map(is_, now, values[index])):
                    yield from self._shares[share][index].put_back()
                    values[index] = list(view)


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
