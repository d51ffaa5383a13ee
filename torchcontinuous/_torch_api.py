"""The private names of torch that this package leans on, each in one place.

Importing this module does not import torch; calling its functions does.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from typing import Any

from torchcontinuous.errors import MissingTorchNameError

#: What a stock worker has imported before the test module is; the nursery imports it.
STOCK_MODULE = "torch.testing._internal.common_distributed"

_OLDEST = "torchcontinuous needs torch 2.6 or newer, with its testing modules"


def _require(module: str, name: str, remedy: str = _OLDEST) -> Any:
    import torch

    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingTorchNameError(f"{module}.{name}", torch.__version__, remedy) from error


def stock_test_case() -> Any:
    """``MultiProcessTestCase``, the class whose outcomes are to be met."""
    return _require(STOCK_MODULE, "MultiProcessTestCase")


def own_continuous_test_case() -> Any:
    """torch's own ``MultiProcContinuousTest`` (older versions spell it otherwise)."""
    return _require(STOCK_MODULE, "MultiProcContinuousTest", _NEWER)


_INTERNAL = "torch.testing._internal"

#: Where torch keeps its test bases.
_TEST_BASES = {
    "DTensorTestBase": f"{_INTERNAL}.distributed._tensor.common_dtensor",
    "DTensorContinuousTestBase": f"{_INTERNAL}.distributed._tensor.common_dtensor",
    "FSDPTest": f"{_INTERNAL}.common_fsdp",
    "FSDPTestContinuous": f"{_INTERNAL}.common_fsdp",
    "ShardedTensorTestBase": f"{_INTERNAL}.distributed._shard.sharded_tensor",
    "DistributedTestBase": STOCK_MODULE,
    "SpawnHelper": f"{_INTERNAL}.distributed.rpc_utils",
}

_NEWER = "This torch lacks it; what else torchcontinuous offers works without it"


def test_base(name: str) -> Any:
    """One of torch's own bases of tests.

    Raises:
        MissingTorchNameError: this torch has none of that name, or was built without what it needs.
    """
    return _require(_TEST_BASES[name], name, _NEWER)


def test_skips() -> dict[int, str]:
    """Skip exit codes and their reasons."""
    table = _require(STOCK_MODULE, "TEST_SKIPS")
    return {skip.exit_code: skip.message for skip in table.values()}


def is_sandcastle() -> bool:
    """Whether a skip in workers passes instead (stock does so on that CI)."""
    return bool(_require(STOCK_MODULE, "IS_SANDCASTLE"))


def test_timeout(test_id: str) -> float:
    """Stock's time-out for a test, seconds."""
    return float(_require(STOCK_MODULE, "get_timeout")(test_id))


def started_rpc() -> bool:
    """Whether an RPC agent was started in this process, now or earlier.

    RPC keeps C++ state for the whole process (RRef ids) that nothing resets.
    """
    api = sys.modules.get("torch.distributed.rpc.api")
    return bool(getattr(api, "_ALL_WORKER_NAMES", ()))


def seeds_before_the_test(cls: Any) -> bool:
    """Whether nothing of the class's own runs before ``run_test`` has seeded the generators."""
    stock = stock_test_case()
    own = getattr(cls._run, "__func__", cls._run)
    return (
        own is stock._run.__func__
        and cls.run_test is stock.run_test
        and cls.__init__ is stock.__init__
    )


def silence_event_listener() -> None:
    """In a worker: spare each test the thread in which stock listens to the parent.

    It answers the parent's request for a traceback, which is asked for by a signal here; and on few
    cores the start of a thread costs a test more than the rest of the harness.
    """
    stock = stock_test_case()
    if not hasattr(stock, "_event_listener"):
        return
    stock._event_listener = staticmethod(_listen_to_nobody)
    module = sys.modules[stock.__module__]
    if getattr(module, "threading", None) is threading:
        seen_by_stock = types.ModuleType("threading")
        vars(seen_by_stock).update(vars(threading), Thread=_thread_unless_listener)
        module.threading = seen_by_stock  # type: ignore[attr-defined]


def _listen_to_nobody(parent_pipe: Any, signal_pipe: Any, rank: int) -> None:
    """What is left of stock's listener."""


class _NoThread:
    """Stands for a thread that has nothing to do."""

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


def _thread_unless_listener(*arguments: Any, **keywords: Any) -> Any:
    if keywords.get("target") is _listen_to_nobody:
        return _NoThread()
    return threading.Thread(*arguments, **keywords)


def separate_compile_cache(rank: int) -> None:
    """In a worker: have inductor and Triton keep what they compile in a folder of this rank's own,
    within the one that they would use."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        utils = "torch._inductor.runtime.cache_dir_utils"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _require(utils, "default_cache_dir")()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if name in os.environ:
            os.environ[name] = os.path.join(os.environ[name], f"rank{rank}")


def reread_debug_level() -> None:
    """Let c10d take ``TORCH_DISTRIBUTED_DEBUG`` from the environment again."""
    distributed = sys.modules.get("torch.distributed")
    reread = getattr(distributed, "set_debug_level_from_env", None)
    if reread is not None:
        reread()


_GROUP_TABLES = (
    "_new_process_group_helper",
    "_world",
    "_register_process_group",
    "_update_default_pg",
)


def c10d() -> Any:
    """The module that keeps c10d's Python-side tables of process groups."""
    for name in _GROUP_TABLES:
        _require("torch.distributed.distributed_c10d", name)
    return importlib.import_module("torch.distributed.distributed_c10d")


def wraps_process_groups() -> bool:
    """Whether c10d makes groups of another kind than usual: checked ones, or torchcomms'."""
    import torch.distributed as dist

    module = sys.modules["torch.distributed.distributed_c10d"]
    enabled = getattr(module, "_use_torchcomms_enabled", lambda: False)
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL or enabled())


def group_sequence_number(group: Any) -> int:
    """How many collectives this rank has entered on a group."""
    return int(group._get_sequence_number_for_group())


def group_backends(group: Any) -> list[Any]:
    """The backends of a group, one a kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def backend_timeout(backend: Any) -> Any:
    """A backend's time-out as it is now; None where it does not tell."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def pending_work() -> int:
    """Functional collectives that nobody has waited for."""
    count = getattr(sys.modules.get("torch._C._distributed_c10d"), "_get_work_registry_size", None)
    return int(count()) if count is not None else 0
