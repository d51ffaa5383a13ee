"""The private names of torch that the state guard leans on, each in one place.

A torch that lacks a name leaves out what hangs on it. Nothing here imports a module that the test
has not: what is not loaded has not been changed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

from torchcontinuous import _devices

#: Variables that torch and triton set for themselves when first used.
OWN_VARIABLES = frozenset(
    {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
)

#: Loggers that torch changes by itself: this one drops its handler when first used.
OWN_LOGGERS = frozenset({"torch.__trace"})

#: Modules whose functions tests patch.
PATCHED_MODULES = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rendezvous",
    "torch.distributed.device_mesh",
    "torch.distributed.utils",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch.distributed._composable_state",
    "torch.distributed._symmetric_memory",
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._random",
    "torch.distributed.tensor._utils",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.parallel.api",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._runtime_utils",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.utils",
    "torch.distributed.nn.functional",
)

#: A state's name, how it is read, and how it is set.
Switch = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def loaded(module: str) -> dict[str, Any]:
    """The names of a module if it is loaded; empty if not."""
    found = sys.modules.get(module)
    return {} if found is None else vars(found)


def _core() -> Any:
    return loaded("torch").get("_C")


def _switches(*names: tuple[str, str, str]) -> Iterator[Switch]:
    core = _core()
    for what, getter, setter in names:
        get, put = getattr(core, getter, None), getattr(core, setter, None)
        if get is not None and put is not None:
            yield _comparable(what, get, put)


def _comparable(what: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> Switch:
    """A switch whose values are plain: enumerations' members are new objects at each call."""
    try:
        value = get()
    except RuntimeError:  # (Two ways to set a precision were mixed.)
        return what, get, put
    kind: Any = type(value)
    if isinstance(value, list):
        return what, lambda: tuple(get()), lambda values: put(list(values))
    if isinstance(value, tuple):
        return what, get, lambda values: put(*values)
    if kind is not bool and hasattr(kind, "__members__"):
        return what, lambda: int(get()), lambda number: put(kind(number))
    return what, get, put


def mode_switches() -> list[Switch]:
    """What autograd and autocast do in this thread."""
    core = _core()
    found = [
        *_switches(
            ("torch.is_grad_enabled()", "is_grad_enabled", "_set_grad_enabled"),
            ("threads of autograd", "_is_multithreading_enabled", "_set_multithreading_enabled"),
            ("forward-mode AD", "_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
            ("view replay", "_is_view_replay_enabled", "_set_view_replay_enabled"),
            ("autocast's cache", "is_autocast_cache_enabled", "set_autocast_cache_enabled"),
        )
    ]
    if hasattr(core, "set_anomaly_enabled"):
        found.append(
            (
                "anomaly mode (enabled, check_nan)",
                lambda: (core.is_anomaly_enabled(), core.is_anomaly_check_nan_enabled()),
                lambda pair: core.set_anomaly_enabled(*pair),
            )
        )
    for device in _devices.AUTOCAST_KINDS:
        for what, getter, setter in (
            ("torch.is_autocast_enabled", "is_autocast_enabled", "set_autocast_enabled"),
            ("torch.get_autocast_dtype", "get_autocast_dtype", "set_autocast_dtype"),
        ):
            if hasattr(core, getter) and hasattr(core, setter):
                get, put = getattr(core, getter), getattr(core, setter)
                found.append((f"{what}({device!r})", partial(get, device), partial(put, device)))
    if hasattr(core, "autocast_increment_nesting"):
        found.append(("autocast's nesting", _autocast_nesting, _set_autocast_nesting))
    return found


def _autocast_nesting() -> int:
    core = _core()
    core.autocast_increment_nesting()
    return int(core.autocast_decrement_nesting())


def _set_autocast_nesting(depth: int) -> None:
    core = _core()
    while _autocast_nesting() > depth:
        core.autocast_decrement_nesting()
    core.clear_autocast_cache()


def inference_mode() -> bool:
    """Whether this thread is in inference mode."""
    return bool(getattr(_core(), "is_inference_mode_enabled", bool)())


def deterministic_switches() -> list[Switch]:
    """Deterministic algorithms, what goes with them, and whether warnings are given each time."""
    torch = loaded("torch")
    found = [
        *_switches(
            (
                "torch.utils.deterministic.fill_uninitialized_memory",
                "_get_deterministic_fill_uninitialized_memory",
                "_set_deterministic_fill_uninitialized_memory",
            ),
            ("torch.is_warn_always_enabled()", "_get_warnAlways", "_set_warnAlways"),
        )
    ]
    if "get_deterministic_debug_mode" in torch:
        what = "torch.get_deterministic_debug_mode()"
        get, put = torch["get_deterministic_debug_mode"], torch["set_deterministic_debug_mode"]
        found.append((what, get, put))
    return found


#: Flags behind ``torch.backends``, which may refuse to be set ("flags are frozen"). Their getters
#: are ``_get_NAME`` and their setters ``_set_NAME``.
_BACKEND_FLAGS = (
    "float32_matmul_precision", "cublas_allow_tf32", "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction", "cpu_allow_fp16_reduced_precision_reduction",
    "cudnn_allow_tf32", "cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled",
    "cudnn_depthwise_kernel", "miopen_immediate", "mkldnn_enabled", "mkldnn_deterministic",
    "onednn_allow_tf32", "nnpack_enabled", "qengine", "linalg_preferred_backend",
    "blas_preferred_backend", "rocm_fa_preferred_backend", "sdp_priority_order",
    "math_sdp_allow_fp16_bf16_reduction", "autograd_fallback_mode", "sm_carveout_experimental",
    "graph_executor_optimize",
)  # fmt: skip

_ATTENTION_KERNELS = ("flash", "math", "mem_efficient", "cudnn", "overrideable", "fa3")

#: Where a precision of its own may be set; those of a whole backend go before those of its parts.
_PRECISIONS = [
    ("generic", "all"),
    *((kind, "all") for kind in _devices.PRECISION_KINDS),
    *((kind, part) for kind in _devices.PRECISION_KINDS for part in ("matmul", "conv", "rnn")),
]  # fmt: skip


def backend_switches() -> list[Switch]:
    """Precision of matrix products, and the flags of ``torch.backends``."""
    core = _core()
    found: list[Switch] = []
    found += _switches(*((name, f"_get_{name}", f"_set_{name}") for name in _BACKEND_FLAGS))
    found += _switches(
        *(
            (f"{name} attention", f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}")
            for name in _ATTENTION_KERNELS
        )
    )
    # Last, since the legacy flags above write these as well.
    get = getattr(core, "_get_fp32_precision_getter", None)
    put = getattr(core, "_set_fp32_precision_setter", None)
    if get is not None and put is not None:
        for place in _PRECISIONS:
            what = f"fp32_precision of {'.'.join(place)}"
            found.append((what, partial(get, *place), partial(put, *place)))
    return found


def function_modes() -> tuple[Any, ...]:
    """The stack of torch function modes (a default device is the lowest of them)."""
    core = _core()
    return tuple(map(core._get_function_stack_at, range(core._len_torch_function_stack())))


def set_function_modes(modes: tuple[Any, ...]) -> None:
    """Make the stack of torch function modes equal to ``modes``."""
    core = _core()
    while core._len_torch_function_stack():
        core._pop_torch_function_stack()
    for mode in modes:
        core._push_on_torch_function_stack(mode)


def dispatch_modes() -> tuple[Any, ...]:
    """The stack of torch dispatch modes."""
    core = _core()
    return tuple(map(core._get_dispatch_stack_at, range(core._len_torch_dispatch_stack())))


def set_dispatch_modes(modes: tuple[Any, ...]) -> None:
    """Make the stack of torch dispatch modes equal to ``modes``."""
    core = _core()
    while core._len_torch_dispatch_stack():
        core._pop_torch_dispatch_stack(None)
    for mode in modes:
        core._push_on_torch_dispatch_stack(mode)


def default_device() -> tuple[Any, Any]:
    """The default device of this thread, and the mode that ``set_default_device`` entered."""
    context = getattr(loaded("torch").get("_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    return loaded("torch.utils._device").get("CURRENT_DEVICE"), context


def set_default_device(state: tuple[Any, Any]) -> None:
    """Put back what ``default_device`` gave; the stack of modes is put back apart from it."""
    loaded("torch.utils._device")["CURRENT_DEVICE"] = state[0]
    loaded("torch")["_GLOBAL_DEVICE_CONTEXT"].device_context = state[1]


def is_device_mode(mode: object) -> bool:
    """Whether a torch function mode is a default device."""
    kind = loaded("torch.utils._device").get("DeviceContext")
    return kind is not None and isinstance(mode, kind)


def print_options() -> Any:
    """What ``torch.set_printoptions`` changes, or None."""
    return loaded("torch._tensor_str").get("PRINT_OPTS")


def rng_tracker() -> Any:
    """DTensor's random number tracker, or None."""
    return loaded("torch.distributed.tensor._random").get("_rng_tracker")


def set_rng_tracker(tracker: Any) -> None:
    """Replace DTensor's random number tracker."""
    loaded("torch.distributed.tensor._random")["_rng_tracker"] = tracker


def compilations() -> tuple[int, int]:
    """Frames that Dynamo has compiled, and code objects with compiled entries."""
    frames = loaded("torch._dynamo.convert_frame")
    codes = getattr(frames.get("input_codes"), "seen", ())
    return frames.get("FRAME_COUNTER", 0), len(codes)


def reset_compilations() -> None:
    """Forget everything that Dynamo and inductor have compiled in this process."""
    loaded("torch._dynamo")["reset"]()
    counters = loaded("torch._dynamo.utils").get("counters")
    if counters is not None:
        counters.clear()
    clear = loaded("torch._inductor.utils").get("clear_caches")
    if clear is not None:
        clear()


def _compile_pools() -> list[Any]:
    return list(loaded("torch._inductor.async_compile").get("_pool_set", ()))


def compile_worker_pids() -> set[int]:
    """Inductor's compile workers, as far as they are this process's children."""
    pids: set[int] = set()
    for pool in _compile_pools():
        pids |= set(getattr(pool, "_processes", None) or ())
        pids.add(getattr(getattr(pool, "process", None), "pid", 0))
    return pids


def compile_threads() -> set[threading.Thread]:
    """The threads that serve inductor's compile workers."""
    threads: set[Any] = set()
    for pool in _compile_pools():
        threads.add(getattr(pool, "read_thread", None))
        threads.add(getattr(pool, "_executor_manager_thread", None))
    own_pool = getattr(loaded("torch._inductor.async_compile").get("AsyncCompile"), "pool", None)
    if own_pool is not None and own_pool.cache_info().currsize:
        threads |= own_pool()._threads
    return {thread for thread in threads if isinstance(thread, threading.Thread)}


class ConfigEntries:
    """The entries of a configuration module (Dynamo's, inductor's), and what overrides each."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._module = module
        first = next(iter(vars(module)["_config"].values()), None)
        #: Whether overrides are context variables (or else plain attributes).
        self.uses_context = isinstance(getattr(first, "user_override", None), ContextVar)

    def entries(self) -> dict[str, Any]:
        """Them by name; one that stands for another's has no override of its own."""
        return {
            key: entry
            for key, entry in vars(self._module)["_config"].items()
            if getattr(entry, "alias", None) is None
        }

    def invalidate(self) -> None:
        """After overrides were put back: nothing is to be hidden, or taken from a cache."""
        for entry in self.entries().values():
            entry.hide = False
        if "_is_dirty" in vars(self._module):
            self._module._is_dirty = True


#: Configuration modules by name; the others are found by going through all modules.
_CONFIG_MODULES = (
    "torch._dynamo.config", "torch._inductor.config", "torch._functorch.config",
    "torch.fx.experimental._config", "torch.compiler.config", "torch._export.config",
    "torch.distributed.config",
)  # fmt: skip


def _config_kinds() -> list[type]:
    kind = loaded("torch.utils._config_module").get("ConfigModule")
    # Each configuration module is an instance of a subclass of its own.
    return [] if kind is None else kind.__subclasses__()


def config_module_count() -> int:
    """How many configuration modules there are."""
    return len(_config_kinds())


def config_modules() -> list[ConfigEntries]:
    """The configuration modules that are loaded."""
    kinds = tuple(_config_kinds())
    found = [ConfigEntries(n, sys.modules[n]) for n in _CONFIG_MODULES if n in sys.modules]
    if len(found) == len(kinds):
        return found
    modules = list(sys.modules.items())
    return [ConfigEntries(name, m) for name, m in modules if issubclass(type(m), kinds)]


def no_override() -> object:
    """What stands for "not overridden" in a configuration module."""
    return loaded("torch.utils._config_module").get("_UNSET_SENTINEL")
