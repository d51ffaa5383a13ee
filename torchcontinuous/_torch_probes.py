"""Probes of what torch keeps for a process or a thread."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchcontinuous import _devices, _torch_api, _torch_state
from torchcontinuous._probes import Probe, Setting, Settings, attempt, attributes, leak, same
from torchcontinuous._report import Leak


def switches(found: Iterable[_torch_state.Switch]) -> Probe:
    """A probe of values that torch's C++ keeps."""
    return Settings([Setting(*switch) for switch in found], plain=True)


class Rng(Probe):
    """Random number generators: put back, and no leak, as every test draws numbers.

    Stock seeds before each test, and where it does not the runner does; so what is put back
    matters only where nobody seeds (torch's, of a class with a ``_run`` of its own). Nothing is
    compared: setting a generator costs less than reading it.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _NumpyState.capture()
        self._torch: Any = _torch_state.loaded("torch").get("default_generator")
        self._state = None if self._torch is None else self._torch.get_state()
        self._seeds: list[tuple[Any, int, int]] = []
        self._see_devices()

    def _see_devices(self) -> None:
        """Generators of devices initialised since; reading a seed copies nothing from a device."""
        for generator in _devices.generators()[len(self._seeds) :]:
            self._seeds.append((generator, generator.initial_seed(), generator.get_offset()))

    def changed(self) -> bool:
        return True

    def restore(self) -> Iterator[Leak]:
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.put_back()
        if self._torch is not None:
            self._torch.set_state(self._state)
        self._see_devices()
        for generator, seed, offset in self._seeds:
            generator.manual_seed(seed)
            generator.set_offset(offset)
        return iter(())


class _NumpyState:
    """numpy's global generator. Its setter is slow, so its memory is written where it is known."""

    #: The Mersenne twister's words and its position in them.
    _SIZE = 4 * 624 + 4

    @classmethod
    def capture(cls) -> _NumpyState | None:
        """The state now, if numpy is loaded and new enough to tell."""
        module = sys.modules.get("numpy.random")
        return cls(module) if hasattr(module, "get_bit_generator") else None

    def __init__(self, module: Any) -> None:
        self._module = module
        self._generator = module.get_bit_generator()
        self._state = module.get_state()
        self._memory = None
        if self._state[0] == "MT19937" and not self._state[3]:
            self._address = self._generator.ctypes.state_address
            self._memory = ctypes.string_at(self._address, self._SIZE)

    def put_back(self) -> None:
        if self._module.get_bit_generator() is not self._generator:
            self._module.set_bit_generator(self._generator)
        if self._memory is None:
            self._module.set_state(self._state)
        else:
            self._module.seed(0)  # Forgets a normal number that was drawn ahead.
            ctypes.memmove(self._address, self._memory, self._SIZE)


def rng(cls: type) -> Probe | None:
    """Random number generators, of a class whose tests nobody seeds."""
    is_stock = _torch_api.STOCK_MODULE in sys.modules  # A probe imports nothing.
    return None if is_stock and _torch_api.seeds_before_the_test(cls) else Rng()


def default_dtype() -> Probe | None:
    """``torch.get_default_dtype()``."""
    torch = _torch_state.loaded("torch")
    if "get_default_dtype" not in torch:
        return None
    get, put = torch["get_default_dtype"], torch["set_default_dtype"]
    return Settings([Setting("torch.get_default_dtype()", get, put)])


def torch_threads() -> Probe | None:
    """``torch.get_num_threads()``."""
    torch = _torch_state.loaded("torch")
    if "get_num_threads" not in torch:
        return None
    get, put = torch["get_num_threads"], torch["set_num_threads"]
    return Settings([Setting("torch.get_num_threads()", get, put)])


def print_options() -> Probe | None:
    """``torch.set_printoptions``."""
    options = _torch_state.print_options()
    if options is None:
        return None
    return Settings(attributes("torch.set_printoptions", options, *vars(options)))


def dtensor_rng() -> Probe:
    """DTensor's random number tracker, made at the first random operator on a DTensor."""
    return Settings(
        [
            Setting(
                "torch.distributed.tensor's RNG tracker",
                _torch_state.rng_tracker,
                _torch_state.set_rng_tracker,
            )
        ]
    )


class DefaultDevice(Probe):
    """The default device: it is also the lowest of the torch function modes."""

    def __init__(self) -> None:
        self._state = _torch_state.default_device()
        self._modes = self._device_modes()

    def _device_modes(self) -> tuple[Any, ...]:
        return tuple(filter(_torch_state.is_device_mode, _torch_state.function_modes()))

    def changed(self) -> bool:
        device, context = _torch_state.default_device()
        return (
            device is not self._state[0]
            or context is not self._state[1]
            # Nothing asks for the modes where there are none, so that is looked at first.
            or not same(self._device_modes(), self._modes)
        )

    def restore(self) -> Iterator[Leak]:
        if not self.changed():
            return
        found = _torch_state.default_device()
        restored = attempt(self._put, lambda: not self.changed())
        shown = [
            device if device is not None else context for device, context in (self._state, found)
        ]
        yield leak("the default device", shown[0], shown[1], restored)

    def _put(self) -> None:
        others = [m for m in _torch_state.function_modes() if not _torch_state.is_device_mode(m)]
        _torch_state.set_function_modes((*self._modes, *others))
        _torch_state.set_default_device(self._state)


class _ModeStack(Probe):
    """Modes that were entered and not left are left; what cannot be is taken off the stack."""

    def __init__(
        self,
        what: str,
        get: Callable[[], tuple[Any, ...]],
        put: Callable[[tuple[Any, ...]], None],
    ) -> None:
        self._what = what
        self._get = get
        self._put = put
        self._baseline = self._entered()

    def _entered(self) -> tuple[Any, ...]:
        modes = self._get()
        return tuple(m for m in modes if not _torch_state.is_device_mode(m)) if modes else ()

    def changed(self) -> bool:
        return not same(self._entered(), self._baseline)

    def restore(self) -> Iterator[Leak]:
        found = self._entered()
        if same(found, self._baseline):
            return
        for mode in reversed(found):
            if any(mode is known for known in self._baseline):
                break
            # A mode's exit also takes back what else it set up (hooks, flags).
            with contextlib.suppress(Exception):
                mode.__exit__(None, None, None)
        restored = self._baseline == self._entered() or attempt(
            self._rebuild, lambda: same(self._entered(), self._baseline)
        )
        yield leak(self._what, self._baseline, found, restored)

    def _rebuild(self) -> None:
        devices = [m for m in self._get() if _torch_state.is_device_mode(m)]
        self._put((*devices, *self._baseline))


class Modes(Probe):
    """Gradient, inference, anomaly and autocast mode, and stacks of torch's modes."""

    def __init__(self) -> None:
        self._parts: list[Probe] = [
            _ModeStack(
                "torch dispatch modes", _torch_state.dispatch_modes, _torch_state.set_dispatch_modes
            ),
            _ModeStack(
                "torch function modes", _torch_state.function_modes, _torch_state.set_function_modes
            ),
            # Setting it back would be undone when the test's own guard object is collected.
            Settings([Setting("torch.is_inference_mode_enabled()", _torch_state.inference_mode)]),
            switches(_torch_state.mode_switches()),
        ]

    def changed(self) -> bool:
        return any(part.changed() for part in self._parts)

    def restore(self) -> Iterator[Leak]:
        for part in self._parts:
            if part.changed():
                yield from part.restore()


class CompileCaches(Probe):
    """What Dynamo and inductor have compiled."""

    def __init__(self) -> None:
        self._baseline = _torch_state.compilations()

    def changed(self) -> bool:
        return _torch_state.compilations() != self._baseline

    def restore(self) -> Iterator[Leak]:
        before, after = self._baseline, _torch_state.compilations()
        restored = attempt(_torch_state.reset_compilations, lambda: True)
        # Where the import had compiled something, that is forgotten too, and compiled anew.
        self._baseline = _torch_state.compilations()
        what = "compiled by Dynamo (frames, code objects)"
        yield leak(what, before, after, restored)


def backends() -> Probe:
    """Precision of matrix products, and the flags of ``torch.backends``."""
    return switches(_torch_state.backend_switches())


def deterministic() -> Probe:
    """Deterministic algorithms, and warnings given each time."""
    return switches(_torch_state.deterministic_switches())
