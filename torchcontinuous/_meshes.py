"""Device meshes that a test made, and the caches of torch that remember them.

Names of groups start over with each test, so that a mesh which outlives its test would find
another group under the name of its own. torch's caches are emptied; a mesh that lives on all the
same (code under test keeps it) costs the worker.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_TENSOR = "torch.distributed.tensor"

#: Caches keyed by meshes, or holding them: module, name in it, and the method that empties it.
_CACHES = (
    (f"{_TENSOR}._api", "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding"),
    (f"{_TENSOR}._redistribute", "_planner_cache"),
    (f"{_TENSOR}._redistribute", "_gen_transform_infos"),
    (f"{_TENSOR}._redistribute", "_warned_flatten_issues"),
    (f"{_TENSOR}._collective_utils", "MeshTopoInfo.build_from_mesh"),
    ("torch.distributed.device_mesh", "_mesh_resources.mesh_stack"),
)

#: Tables by groups' names, whose counterparts in C++ nothing empties.
_SYMMETRIC_MEMORY = ("_group_name_to_store", "_group_name_to_workspace_tensor")


#: Where a mesh keeps what it knows of its groups, by the version of torch.
_GROUPS_OF_MESH = ("_dim_group_names", "_dim_group_infos")


class Meshes:
    """The meshes of one worker."""

    def __init__(self) -> None:
        #: The meshes, and whether each was made without groups.
        self._alive: list[tuple[weakref.ref[Any], bool]] = []
        self._installed = False

    def install(self) -> None:
        """Have every mesh that is made from here on noted."""
        module = sys.modules.get("torch.distributed.device_mesh")
        mesh_class = getattr(module, "DeviceMesh", None)
        if self._installed or mesh_class is None:
            return
        self._installed = True
        make = mesh_class.__init__

        @functools.wraps(make)
        def note(mesh: Any, *arguments: Any, **keywords: Any) -> None:
            bare = keywords.get("_init_backend") is False
            self._alive.append((weakref.ref(mesh), bare))
            make(mesh, *arguments, **keywords)

        mesh_class.__init__ = note

    @property
    def made_any(self) -> bool:
        """Whether a test made a mesh since ``settle`` was called last."""
        return bool(self._alive)

    def keep_those_there(self) -> None:
        """The meshes made so far belong to the class, not to a test."""
        self._alive.clear()

    def settle(self) -> str | None:
        """After a test, and after what it left in its module was put back: why the worker must not
        run another, or None."""
        if self._some_live():
            gc.collect()  # In a cycle, say: what was there before the fork is frozen.
        alive = [
            mesh
            for mesh, bare in ((noted(), bare) for noted, bare in self._alive)
            if mesh is not None and not (bare and _has_no_groups(mesh))
        ]
        self._alive.clear()
        if alive:
            return f"its code keeps {alive[0]!r}, whose groups are gone"
        return None

    def _some_live(self) -> bool:
        return any(noted() is not None for noted, _ in self._alive)


def _has_no_groups(mesh: Any) -> bool:
    """Whether a mesh that was made without process groups was given none since, as parts of other
    meshes are. DTensor keeps such a one for good, to try operators on."""
    return not any(getattr(mesh, name, None) for name in _GROUPS_OF_MESH)


def empty_caches() -> str | None:
    """Empty the caches that remember meshes and groups; what cannot be emptied, or None."""
    for clear in _clearers():
        clear()
    symmetric = vars(sys.modules.get("torch.distributed._symmetric_memory", object))
    used = False
    for name in _SYMMETRIC_MEMORY:
        table = symmetric.get(name)
        used = used or bool(table)
        if table:
            table.clear()
    return "its test used symmetric memory, which C++ remembers by group" if used else None


def _clearers() -> Iterator[Callable[[], Any]]:
    for module_name, path in _CACHES:
        found: Any = sys.modules.get(module_name)
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            continue
        yield getattr(found, "cache_clear", None) or found.clear
    if f"{_TENSOR}._api" in sys.modules:
        fast_path = getattr(
            sys.modules["torch._C"], "_clear_DTensor_sharding_propagator_cache", None
        )
        if fast_path is not None:
            yield fast_path
    propagation = sys.modules.get(f"{_TENSOR}._sharding_prop")
    propagator = getattr(propagation, "ShardingPropagator", None)
    for value in vars(propagator).values() if propagator is not None else ():
        if hasattr(value, "cache_clear"):
            yield value.cache_clear
