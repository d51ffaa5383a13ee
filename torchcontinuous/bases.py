"""Ready-made bases: torch's own, on reused workers, each under the name of what it replaces.

Of stock style: ``DTensorTestBase``, ``FSDPTest``, ``ShardedTensorTestBase``,
``DistributedTestBase`` and, at level ``"process"``, RPC's ``SpawnHelper``. Of class style:
``DTensorContinuousTestBase`` and ``FSDPTestContinuous``. Each is made when it is first asked for.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torchcontinuous import _torch_api
from torchcontinuous._class_group import value_of
from torchcontinuous.testcase import ContinuousMixin, MultiProcContinuousTest


def __getattr__(name: str) -> Any:
    make = _BASES.get(name)
    if make is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = globals()[name] = make(name)
    return base


def __dir__() -> list[str]:
    return sorted({*globals(), *_BASES})


def _mixed(name: str) -> Any:
    """A base of stock style: the mixin before torch's class."""
    stock = _torch_api.test_base(name)
    return type(name, (ContinuousMixin, stock), _namespace(name, stock))


def _namespace(name: str, base: Any, **members: Any) -> dict[str, Any]:
    return {"__module__": __name__, "__qualname__": name, "__doc__": base.__doc__, **members}


def _rpc(name: str) -> Any:
    """RPC keeps state in C++ for the whole process: each test has workers of its own."""
    stock = _torch_api.test_base(name)
    members = _namespace(name, stock, isolation="process")
    return type(name, (ContinuousMixin, stock), members)


def _fsdp(name: str) -> Any:
    return type(name, (_FSDPOnCpu, _mixed(name)), {"__module__": __name__})


def _continuous(name: str) -> Any:
    """A base of class style: torch's code, on our class in place of torch's own continuous one."""
    replaced = _torch_api.own_continuous_test_case()
    return rebased(_torch_api.test_base(name), {replaced: MultiProcContinuousTest})


def _fsdp_continuous(name: str) -> Any:
    return type(name, (_FSDPOnCpuContinuous, _continuous(name)), {"__module__": __name__})


class _FSDPOnCpu:
    """Runs on the CPU where a class asks for that; stock needs a device for each rank."""

    @classmethod
    def _run(
        cls: Any, rank: int, test_name: str, file_name: str, pipe: Any, **keywords: Any
    ) -> None:
        if not _asks_for_cpu(cls) or keywords.get("fake_pg"):
            super()._run(rank, test_name, file_name, pipe, **keywords)  # type: ignore[misc]
            return
        import torch
        import torch.distributed as dist

        test = cls(test_name)
        test.rank = rank
        test.file_name = file_name
        dist.init_process_group(
            "gloo", init_method=test.init_method, world_size=int(test.world_size), rank=rank
        )
        dist.barrier()
        # As stock does, so that no test depends on what an earlier one compiled.
        torch.compiler.reset()
        test.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()


class _FSDPOnCpuContinuous:
    """The same for class style."""

    setup_in_workers = True

    @classmethod
    def backend_str(cls: Any) -> Any:
        return "gloo" if _asks_for_cpu(cls) else super().backend_str()  # type: ignore[misc]

    @classmethod
    def _init_pg(cls: Any, rank: int, world_size: int, rdvz_file: str) -> None:
        if _asks_for_cpu(cls):
            # Past torch's own, which looks for devices first.
            init_pg: Any = MultiProcContinuousTest._init_pg
            init_pg.__func__(cls, rank, world_size, rdvz_file)
        else:
            super()._init_pg(rank, world_size, rdvz_file)  # type: ignore[misc]


def _asks_for_cpu(cls: Any) -> bool:
    """Whether a class itself, and not torch for want of devices, has set the CPU."""
    for owner in cls.__mro__:
        if "device_type" in vars(owner):
            is_users = owner.__module__ != __name__ and not owner.__module__.startswith("torch.")
            return is_users and value_of(cls, "device_type") == "cpu"
    return False


def rebased(cls: Any, replacements: Mapping[Any, Any]) -> Any:
    """``cls`` with other classes in place of some that it derives from: the same code, so that no
    helper of torch's is copied.

    Args:
        replacements: by a class, the one that stands in its place.
    """
    if cls in replacements:
        return replacements[cls]
    bases = tuple(rebased(base, replacements) for base in cls.__bases__)
    return cls if bases == cls.__bases__ else cloned(cls, bases)


def cloned(cls: Any, bases: tuple[Any, ...]) -> Any:
    """Another class with the same code as ``cls``, derived from ``bases``."""
    # What super() without arguments looks into: the class in whose body a function was written.
    own_class = types.CellType()
    members = {
        name: _rebound(member, own_class)
        for name, member in vars(cls).items()
        if not inspect.isgetsetdescriptor(member)
    }
    made = type(cls)(cls.__name__, bases, {**members, "__module__": __name__})
    own_class.cell_contents = made
    return made


def _rebound(member: Any, own_class: types.CellType) -> Any:
    if isinstance(member, (classmethod, staticmethod)):
        return type(member)(_rebound(member.__func__, own_class))
    if isinstance(member, property):
        accessors = (member.fget, member.fset, member.fdel)
        return property(*(_rebound(accessor, own_class) for accessor in accessors))
    return _rebound_function(member, own_class, set())


def _rebound_function(member: Any, own_class: types.CellType, seen: set[int]) -> Any:
    """A function, or one that a decorator holds, with another class for its ``super()``."""
    if not isinstance(member, types.FunctionType) or id(member) in seen:
        return member
    seen.add(id(member))
    names, cells = member.__code__.co_freevars, member.__closure__ or ()
    closure = tuple(
        own_class if name == "__class__" else _rebound_cell(cell, own_class, seen)
        for name, cell in zip(names, cells, strict=True)
    )
    if all(one is other for one, other in zip(closure, cells, strict=True)):
        return member
    made = types.FunctionType(
        member.__code__, member.__globals__, member.__name__, member.__defaults__, closure
    )
    made.__kwdefaults__ = member.__kwdefaults__
    made.__dict__.update(vars(member))
    made.__qualname__, made.__doc__ = member.__qualname__, member.__doc__
    return made


def _rebound_cell(cell: types.CellType, own_class: types.CellType, seen: set[int]) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:  # Empty.
        return cell
    made = _rebound_function(held, own_class, seen)
    return cell if made is held else types.CellType(made)


_BASES: Mapping[str, Callable[[str], Any]] = {
    "DTensorTestBase": _mixed,
    "ShardedTensorTestBase": _mixed,
    "DistributedTestBase": _mixed,
    "FSDPTest": _fsdp,
    "SpawnHelper": _rpc,
    "DTensorContinuousTestBase": _continuous,
    "FSDPTestContinuous": _fsdp_continuous,
}
