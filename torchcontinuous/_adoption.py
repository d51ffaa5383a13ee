"""Suites on reused workers with no edit: their classes are given another parent as they are made.

The same happens in the parent and in the workers, before either imports the test module, so that
both have the same classes under the same names.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from torchcontinuous import _registry, _torch_api
from torchcontinuous.bases import cloned
from torchcontinuous.errors import ConfigurationError, MissingTorchNameError
from torchcontinuous.testcase import ContinuousMixin, MultiProcContinuousTest

#: What a project's own copy of stock's class has to have for the mixin to take its place.
_NEEDED = ("_start_processes", "_join_processes", "_run", "run_test")

#: The mixin for classes that are adopted: a class of its own, so that one which a suite has edited
#: may derive from ``ContinuousMixin`` and from an adopted class.
_AdoptedMixin: Any = cloned(ContinuousMixin, ContinuousMixin.__bases__)


class _AdoptedContinuous(MultiProcContinuousTest):
    """For classes derived from torch's own continuous class."""

    #: Looked at by those of torch's that run in the parent, on simulated ranks.
    _processes_spawned = False


#: By base, what its direct subclasses derive from in its place.
_adopted: dict[Any, tuple[Any, ...]] = {}


def adopt(names: Sequence[str] = ()) -> None:
    """From here on, have every class that derives from stock's ``MultiProcessTestCase``, from
    torch's own continuous class, or from a class that is named, run on reused workers. Those that
    derive from them already do so as well.

    Args:
        names: projects' own copies of stock's class, as ``package.module.Class``.

    Raises:
        ConfigurationError: a name leads to no class, or to one that lacks what is needed.
    """
    replacements: dict[Any, tuple[Any, ...]] = {}
    copies = [_find(name) for name in names]
    for base in (_torch_api.stock_test_case(), *copies):
        replacements[base] = (_AdoptedMixin, base)
    with contextlib.suppress(MissingTorchNameError):  # An older torch: no class derives from it.
        replacements[_torch_api.own_continuous_test_case()] = (_AdoptedContinuous,)
    for base, parents in replacements.items():
        if base not in _adopted:
            _adopted[base] = parents
            _follow(base)
    _registry.before_import = (__name__, adopt.__name__, tuple(names))


def is_adopted(cls: type) -> bool:
    """Whether a class runs on reused workers."""
    return issubclass(cls, (ContinuousMixin, _AdoptedMixin))


def _find(name: str) -> Any:
    setting = "--base"
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ConfigurationError(setting, name, "Give package.module.Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        remedy = f"It cannot be imported: {type(error).__name__}: {error}"
        raise ConfigurationError(setting, name, remedy) from error
    missing = [method for method in _NEEDED if not hasattr(found, method)]
    if missing or not isinstance(found, type):
        remedy = f"It is no copy of MultiProcessTestCase: it lacks {', '.join(missing)}"
        raise ConfigurationError(setting, name, remedy)
    return found


def _follow(base: Any) -> None:
    """Give its direct subclasses, now and later, other parents."""
    for cls in base.__subclasses__():
        _give_parents(cls, base)
    own = vars(base).get("__init_subclass__")

    def give_parents_too(cls: Any, /, **keywords: Any) -> None:
        if own is not None:
            own.__get__(None, cls)(**keywords)
        else:
            super(base, cls).__init_subclass__(**keywords)
        _give_parents(cls, base)

    base.__init_subclass__ = classmethod(give_parents_too)


def _give_parents(cls: Any, base: Any) -> None:
    if issubclass(cls, _AdoptedMixin):
        # By way of an adopted class: what the suite's author did to the same end is done.
        if ContinuousMixin in cls.__bases__:
            cls.__bases__ = tuple(
                parent for parent in cls.__bases__ if parent is not ContinuousMixin
            )
    elif base in cls.__bases__ and not issubclass(cls, ContinuousMixin):
        cls.__bases__ = tuple(
            parent
            for old in cls.__bases__
            for parent in (_adopted[base] if old is base else (old,))
        )
