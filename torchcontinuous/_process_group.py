"""The default process group of a worker: left over by a test, or made for a class."""

from __future__ import annotations

import sys
from typing import Any


def release_leftovers() -> None:
    """Destroy the groups that a test left behind, as the end of its process would have."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()


def backend_of(cls: Any) -> str:
    """The backend of a class-style class: its own, else that of its device."""
    import torch.distributed as dist

    own = cls.backend_str()
    return str(own or dist.get_default_backend_for_device(cls.device_type()))


def check_backend(test_class: str, backend: str) -> None:
    """Raise RuntimeError, naming class and remedy, if torch was built without ``backend``."""
    import torch.distributed as dist

    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            raise RuntimeError(
                f"{test_class} asks for the backend {name!r}, which this build of torch lacks. "
                "Install a torch that has it, or return another from backend_str()"
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
        cls.rank = rank
        cls.world_size = world_size
        cls.rdvz_file = rendezvous_file
        if self._ready:
            return
        try:
            cls._init_pg(rank, world_size, rendezvous_file)
        except SystemExit as error:
            self._exit = error
            raise
        self._ready = True
