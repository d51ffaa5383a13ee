"""The state guard: finds what a test left changed in its worker, and puts it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from torchcontinuous import (
    _module_probes,
    _process_probes,
    _resource_probes,
    _torch_probes,
)
from torchcontinuous._probes import SHOWN, Probe
from torchcontinuous._report import Leak
from torchcontinuous.errors import ConfigurationError

_logger = logging.getLogger("torchcontinuous")

#: Makes a probe for a test class and its number of ranks.
Factory = Callable[[type, int], "Probe | None"]


def _alike_for_all(make: Callable[[], Probe | None]) -> Factory:
    return lambda cls, world_size: make()


def _of_class(make: Callable[[type], Probe | None]) -> Factory:
    return lambda cls, world_size: make(cls)


#: Each probe by its name, in the order in which they run: modes first, since they act on tensors
#: that other probes use; threads and children before what they hold.
PROBES: Mapping[str, Factory] = {
    "default_device": _alike_for_all(_torch_probes.DefaultDevice),
    "modes": _alike_for_all(_torch_probes.Modes),
    "default_dtype": _alike_for_all(_torch_probes.default_dtype),
    "environment": _alike_for_all(_process_probes.Environment),
    "cwd": _alike_for_all(_process_probes.cwd),
    "sys_path": _alike_for_all(_process_probes.sys_path),
    "sys_argv": _alike_for_all(_process_probes.sys_argv),
    "umask": _alike_for_all(_process_probes.umask),
    "imports": _alike_for_all(_process_probes.imports),
    "signals": _alike_for_all(_process_probes.signals),
    "hooks": _alike_for_all(_process_probes.hooks),
    "streams": _alike_for_all(_process_probes.streams),
    "warnings": _alike_for_all(_process_probes.WarningFilters),
    "logging": _alike_for_all(_process_probes.Logging),
    "interpreter": _alike_for_all(_process_probes.Interpreter),
    "gc": _alike_for_all(_process_probes.garbage_collector),
    "start_method": _alike_for_all(_process_probes.start_method),
    "deterministic": _alike_for_all(_torch_probes.deterministic),
    "torch_threads": _alike_for_all(_torch_probes.torch_threads),
    "backends": _alike_for_all(_torch_probes.backends),
    "print_options": _alike_for_all(_torch_probes.print_options),
    "dtensor_rng": _alike_for_all(_torch_probes.dtensor_rng),
    "compile_caches": _alike_for_all(_torch_probes.CompileCaches),
    "configs": _alike_for_all(_module_probes.Configs),
    "patches": _alike_for_all(_module_probes.Patches),
    "module": _of_class(_module_probes.names_of_module),
    "class": _of_class(_module_probes.names_of_class),
    "rng": _of_class(_torch_probes.rng),
    "threads": _alike_for_all(_resource_probes.threads),
    "children": _alike_for_all(_resource_probes.children),
    "native_threads": _alike_for_all(_resource_probes.native_threads),
    "descriptors": lambda cls, world_size: _resource_probes.descriptors(world_size),
    "host_memory": _alike_for_all(_resource_probes.host_memory),
    "device_memory": _alike_for_all(_resource_probes.device_memory),
}

#: Probes of what a test may leave running or held: mostly, only new workers undo it.
RESOURCES = frozenset(
    {"threads", "children", "native_threads", "descriptors", "host_memory", "device_memory"}
)

#: What a class may ask for. The guard itself knows only whether a probe is off.
_CHOICES: Mapping[object, str] = {
    "restore": "restore",
    "off": "off",
    "error": "error",
    True: "restore",
    False: "off",
}


def check_settings(guard: object, owner: str) -> Mapping[str, str]:
    """A class's ``guard``, checked: ``"restore"``, ``"off"`` or ``"error"`` for some probes.

    Args:
        guard: the attribute's value: a mapping from probes' names.
        owner: the class that has it, for the text of the error.

    Raises:
        ConfigurationError: a name or value means nothing.
    """
    if not isinstance(guard, Mapping):
        remedy = "Give a mapping from names of probes, such as {'threads': 'off'}"
        raise ConfigurationError(f"{owner}.guard", guard, remedy)
    checked = {}
    for name, value in guard.items():
        if not isinstance(name, str) or name not in PROBES:
            remedy = f"There is no such probe. Use one of {', '.join(sorted(PROBES))}"
            raise ConfigurationError(f"a name in {owner}.guard", name, remedy)
        if not isinstance(value, (str, bool)) or value not in _CHOICES:
            remedy = "Use 'restore', 'error' or 'off'"
            raise ConfigurationError(f"{owner}.guard[{name!r}]", value, remedy)
        checked[name] = _CHOICES[value]
    return checked


class Guard:
    """The state of one worker around each of its tests.

    Made once, in the worker itself, when the test's module has been imported: what is then is what
    every test is to find. Where the parent sets the state for each test (environment, working
    directory, ...), that is what ``begin`` finds.

    Args:
        cls: the test class.
        settings: what ``check_settings`` gave; a probe that is "off" is not run.
        world_size: ranks, whose connections to each other are no leak.
    """

    def __init__(
        self, cls: type, settings: Mapping[str, str] | None = None, world_size: int = 1
    ) -> None:
        chosen = settings or {}
        self._probes: list[tuple[str, Probe]] = []
        for name, make in PROBES.items():
            if chosen.get(name) == "off":
                continue
            try:
                probe = make(cls, world_size)
            except Exception as error:
                _logger.debug("the state guard's probe %s cannot be used: %r", name, error)
                continue
            if probe is not None:
                self._probes.append((name, probe))
        self._resources = [probe for name, probe in self._probes if name in RESOURCES]
        self._others = [entry for entry in self._probes if entry[0] not in RESOURCES]
        self._from_parent = [entry for entry in self._probes if entry[1].from_parent]
        self._failed: list[Leak] = []

    def begin(self) -> None:
        """Take the baseline of what the parent sets, just before a test. Never raises."""
        self._failed = []
        for name, probe in self._from_parent:
            try:
                probe.begin()
            except Exception as error:
                self._failed.append(_failure(name, error))

    def holds_resources(self) -> bool:
        """Whether the test may have left something running or held. Never raises."""
        try:
            return any(probe.changed() for probe in self._resources)
        except Exception:
            return True

    def end(self, resources: bool = True) -> list[Leak]:
        """Put back what the test changed; everything that it did change. Never raises.

        Args:
            resources: False where ``holds_resources`` has just said that there are none.
        """
        leaks, self._failed = self._failed, []
        for name, probe in self._probes if resources else self._others:
            try:
                if probe.changed():
                    for leak in probe.restore():
                        leaks.append(replace(leak, probe=name))
            except Exception as error:
                leaks.append(_failure(name, error))
        return leaks


def _failure(name: str, error: Exception) -> Leak:
    try:
        text = f"{type(error).__name__}: {error}"[:SHOWN]
    except Exception:
        text = type(error).__name__
    return Leak(name, "the probe itself", "", text, False)
