"""The process groups that stand for a whole class-style test class, in one worker."""

from __future__ import annotations

import unittest
from typing import Any

from torchcontinuous import _torch_api


def backend_of(cls: Any) -> str | None:
    """The backend of a class-style class: its own, else that of its device; None leaves it to
    c10d, which takes one for each kind of device."""
    own = value_of(cls, "backend_str")
    return None if own is None else str(own)


def value_of(cls: Any, name: str) -> Any:
    """A class's own setting: method, property or plain attribute (torch's classes have each)."""
    value = getattr(cls, name)
    if isinstance(value, property):
        return getattr(cls.__new__(cls), name)
    return value() if callable(value) else value


def check_backend(cls: Any) -> None:
    """Look whether torch was built with the backend of a class-style class.

    Raises:
        unittest.SkipTest: not with the one that the class names, as in torch's own class.
        RuntimeError: not with that of its device; it names class and remedy.
    """
    import torch.distributed as dist

    backend = backend_of(cls)
    for name in (part.rpartition(":")[2] for part in (backend or "").split(",") if part):
        if not dist.is_backend_available(name):
            raise unittest.SkipTest(f"Backend {name!r} is not available")
    default = dist.get_default_backend_for_device(value_of(cls, "device_type"))
    if backend is None and not dist.is_backend_available(default):
        raise RuntimeError(
            f"{cls.__module__}.{cls.__qualname__} needs the backend {default!r}, which this build "
            "of torch lacks. Install a torch that has it, or return another from backend_str()"
        )


class ClassGroup:
    """The process group that a class-style test class has in one worker."""

    def __init__(self) -> None:
        self._ready = False
        self._exit: SystemExit | None = None

    def ensure(self, cls: Any, rank: int, world_size: int, rendezvous_file: str) -> None:
        """Make the class's group at its first test; a skip raised then skips each test."""
        if self._exit is not None:
            raise self._exit
        if self._ready:
            return
        cls.rank = rank
        cls.world_size = world_size
        cls.rdvz_file = rendezvous_file
        try:
            cls._init_pg(rank, world_size, rendezvous_file)
        except SystemExit as error:
            self._exit = error
            raise
        self._ready = True


class Tables:
    """c10d's tables as they are while a class's own groups stand."""

    def __init__(self, world: Any, register: Any) -> None:
        self._world = world
        self._register = register
        self._default = world.default_pg
        self._count = world.group_count
        self._saved = [dict(table) for table in self._tables()]
        self._tags = {tag: list(groups) for tag, groups in world.tags_to_pg.items()}
        self._names = self._saved[0]
        self._base_store = world.pg_map[self._default][1]

    def _tables(self) -> list[dict[Any, Any]]:
        world = self._world
        return [
            world.pg_names,
            world.pg_map,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ]

    def groups(self) -> list[Any]:
        return list(self._names)

    def stands(self) -> bool:
        return self._world.default_pg is self._default

    def renew_store(self, sequence: int) -> None:
        """Names of groups start over with each test: their keys must not meet older ones."""
        import torch.distributed as dist

        backend = self._world.pg_map[self._default][0]
        store = dist.PrefixStore(f"test{sequence}/", self._base_store)
        self._world.pg_map[self._default] = self._saved[1][self._default] = (backend, store)

    def restore(self) -> None:
        """Destroy what a test made, and have the class's groups stand again."""
        c10d, world = _torch_api.c10d(), self._world
        if world.default_pg is not None and not self.stands():
            c10d.destroy_process_group()
        for group in [g for g in world.pg_names if g not in self._names]:
            c10d.destroy_process_group(group)
        missing = [group for group in self._names if group not in world.pg_names]
        for table, saved in zip(self._tables(), self._saved, strict=True):
            if table != saved:
                table.clear()
                table.update(saved)
        if world.tags_to_pg != self._tags:
            world.tags_to_pg.clear()
            world.tags_to_pg.update({tag: list(groups) for tag, groups in self._tags.items()})
        world.group_count = self._count
        if not self.stands():
            c10d._update_default_pg(self._default)
        for group in missing:
            self._register(self._names[group], group)
