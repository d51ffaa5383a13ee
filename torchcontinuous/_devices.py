"""Accelerators: the one place that names kinds of device.

Importing this module does not import torch. What only looks (``is_initialized`` and what follows
from it) touches no device; the nursery calls nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

#: torch's modules for kinds of device that have processes' state of their own.
KINDS = ("cuda", "xpu", "mtia", "hpu")

#: Kinds that autocast is kept for, and those that a precision of matrix products is.
AUTOCAST_KINDS = ("cpu", "cuda")
PRECISION_KINDS = ("cuda", "mkldnn")

#: Has ``torch.cuda.is_available()`` ask the driver's library: the runtime would be initialised by
#: the question, which spoils every fork.
LOOK_WITHOUT_TOUCHING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

#: Environment variables that native code reads when it is loaded.
VARIABLES_ON_LOAD = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)

#: How the names of those begin that native code reads when it first uses a device.
PREFIXES_ON_FIRST_USE = ("NCCL_", "CUDA_")


def accelerator() -> str | None:
    """The kind of accelerator that this torch was built for, there or not; None for the CPU."""
    import torch

    found = torch.accelerator.current_accelerator()
    return None if found is None else str(found.type)


def count(kind: str) -> int:
    """Devices of a kind that this process may use (a CPU counts as one)."""
    import torch

    return int(torch.get_device_module(kind).device_count())


def local_index(rank: int, kind: str) -> int:
    """The device of a rank: its number modulo that of the devices; for a CPU the rank itself."""
    devices = 0 if kind == "cpu" else count(kind)
    return rank % devices if devices else rank


def bind(rank: int, kind: str) -> None:
    """Have this process use its rank's device, if that is an accelerator's and there is one."""
    import torch

    if kind == accelerator() and count(kind) > 0:
        torch.accelerator.set_device_index(local_index(rank, kind))


def in_bad_fork() -> bool:
    """Whether an accelerator was initialised or queried before this process was forked."""
    import torch

    for name in KINDS:
        probe = getattr(getattr(torch, name, None), "_is_in_bad_fork", None)
        if callable(probe) and probe():
            return True
    return False


def _initialized() -> Iterator[Any]:
    """torch's modules for the kinds of device that this process has initialised."""
    torch = sys.modules.get("torch")
    for name in KINDS:
        module = getattr(torch, name, None)
        if getattr(module, "is_initialized", bool)():
            yield module


def generators() -> tuple[Any, ...]:
    """The default generators of devices that are initialised."""
    return tuple(g for module in _initialized() for g in getattr(module, "default_generators", ()))


def allocated_memory() -> int:
    """Bytes allocated on the current device of each kind that is initialised."""
    return sum(int(getattr(module, "memory_allocated", int)()) for module in _initialized())


def skip_absent() -> None:
    """In a worker: let seeding pass over the kinds of device that this build of torch lacks.

    torch would queue a seed that nothing ever takes up, and format the whole stack to go with it:
    for each test, and each of three kinds.
    """
    for module in _absent():
        module.manual_seed_all = _seed_nothing


@contextlib.contextmanager
def absent_skipped() -> Iterator[None]:
    """In the parent, around one test: the same, and torch as it was afterwards."""
    seeds = [(module, module.manual_seed_all) for module in _absent()]
    for module, _ in seeds:
        module.manual_seed_all = _seed_nothing
    try:
        yield
    finally:
        for module, seed in seeds:
            if module.manual_seed_all is _seed_nothing:
                module.manual_seed_all = seed


@functools.cache
def _absent() -> tuple[Any, ...]:
    """torch's modules for the kinds of device that this build has no code for."""
    import torch

    modules: list[Any] = [getattr(torch, name, None) for name in KINDS]
    return tuple(
        module
        for module in modules
        if hasattr(module, "manual_seed_all")
        and hasattr(module, "_is_compiled")
        and not module._is_compiled()
    )


def _seed_nothing(seed: int) -> None:
    """What is left of seeding a kind of device that is not there."""
