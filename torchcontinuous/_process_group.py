"""The process groups of a worker: its default group, kept from test to test, and the others.

Tests call torch's own ``init_process_group`` and ``destroy_process_group``, which do all that they
do elsewhere (arguments, rendezvous, names, tables, hooks). Only where c10d makes the default group
itself, a *kept* one is handed out in its place if it is what would have been made; and where c10d
shuts a kept group down, that is left out. So everything reads as after a real destroy between two
tests, and sub-groups meet on the test's own store, as on stock.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torchcontinuous import _torch_api
from torchcontinuous._class_group import Tables
from torchcontinuous._context import environment
from torchcontinuous._report import GroupState

#: Backends whose groups are kept; a plug-in's may hold anything.
_KEPT_BACKENDS = frozenset({"gloo", "nccl", "undefined"})

#: Variables that shape a group when it is made.
_SHAPING = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "TORCH_DIST", "TORCH_FR_")

#: Methods of a group (and of its backends) after which another test must not have it: unmatched
#: point-to-point messages stay in gloo's buffers and meet a later receive, though the sequence
#: numbers agree; the others change the group for good.
_SPENT_BY = (
    *("send", "recv", "recv_anysource", "monitored_barrier", "abort", "shrink"),
    *("set_timeout", "_set_default_timeout", "_register_backend", "_set_default_backend"),
    *("_register_on_completion_hook", "_enable_collectives_timing", "_set_group_name"),
    *("_set_group_desc", "_start_coalescing", "_set_sequence_number_for_group"),
)


@dataclass
class _Kept:
    """A default group that outlives the tests that use it, and its entries in c10d's tables."""

    group: Any
    key: str
    timeout: timedelta
    backends: list[Any]
    name: str
    backend: str
    config: str
    tag: str | None
    tags: list[str]
    device: Any
    spent: str | None = None


@dataclass
class GroupKeeper:
    """What one worker keeps of process groups between tests.

    All ranks have to decide alike whether they use the kept group: the parent compares their
    ``GroupState`` after each test and tells them, by a number, which group is still good; within a
    test they agree, by ``agree(number, key, seconds)``, before they use it.
    """

    rank: int
    world_size: int
    agree: Callable[[int, str, float], bool]
    made: int = 0
    reused: int = 0
    used_kept: bool = False
    broken: str | None = None
    _pid: int = field(default_factory=os.getpid)
    _on: bool = False
    _good: int = 0
    _kept: _Kept | None = None
    _made: int = 0
    _agreed: int = 0
    _store_file: str | None = None
    _store: Any = None
    #: Groups that the last test left: a peer may still be connecting to them, so that they are let
    #: go of when every rank has finished the test.
    _left: list[Any] = field(default_factory=list)
    _tables: Tables | None = None

    # Between c10d and a test

    def install(self) -> None:
        """Have c10d ask here before it makes a default group or shuts a kept one down."""
        c10d = _torch_api.c10d()
        self._make = c10d._new_process_group_helper
        self._signature = inspect.signature(self._make)
        self._world = c10d._world
        self._register = c10d._register_process_group

        @functools.wraps(self._make)
        def make(*arguments: Any, **keywords: Any) -> Any:
            self.made += 1
            if not self._on or os.getpid() != self._pid:
                return self._make(*arguments, **keywords)
            call = self._signature.bind(*arguments, **keywords)
            call.apply_defaults()
            return self._provide(call)

        c10d._new_process_group_helper = make
        self._note_calls(c10d)

    def _note_calls(self, c10d: Any) -> None:
        """Note what spends the kept group. Methods, not functions: no import by name misses it."""
        group_class = c10d.ProcessGroup
        shutdown = group_class.shutdown

        @functools.wraps(shutdown)
        def shut_down_unless_kept(group: Any) -> Any:
            if self._is_kept(group):
                self.used_kept = True
                return None
            return shutdown(group)

        group_class.shutdown = shut_down_unless_kept
        for owner in (group_class, *_backend_classes(c10d)):
            for name in _SPENT_BY:
                if name in vars(owner):
                    setattr(owner, name, self._noting(getattr(owner, name), name))
        wait = c10d.Work.wait

        @functools.wraps(wait)
        def note_failure(work: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return wait(work, *arguments, **keywords)
            except BaseException as error:
                if self._kept is not None:
                    self._kept.spent = f"a collective failed ({type(error).__name__})"
                raise

        c10d.Work.wait = note_failure

    def _noting(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def note(owner: Any, *arguments: Any, **keywords: Any) -> Any:
            kept = self._kept
            if kept is not None and (
                owner is kept.group or any(owner is backend for backend in kept.backends)
            ):
                kept.spent = f"{name} was called"
            return method(owner, *arguments, **keywords)

        return note

    def _is_kept(self, group: Any) -> bool:
        if os.getpid() != self._pid:
            return False
        tables = self._tables
        if tables is not None and any(group is held for held in tables.groups()):
            return True
        return self._on and self._kept is not None and group is self._kept.group

    # Making, and handing out

    def _provide(self, call: inspect.BoundArguments) -> Any:
        """The default group that c10d asks for: the kept one, or one that is made now."""
        given = call.arguments
        whole = (given["group_size"], given["group_rank"]) == (self.world_size, self.rank)
        if given["global_ranks_in_group"] or not whole:
            return self._make(*call.args, **call.kwargs)
        if not _is_keepable(given):
            return self._make(*call.args, **call.kwargs)
        try:
            return self._settle(call)
        except BaseException as error:
            # A peer did not come, say: whatever of this is under way is out of step for good.
            self.broken = f"its process group could not be made ({type(error).__name__})"
            raise

    def _settle(self, call: inspect.BoundArguments) -> Any:
        given, kept = call.arguments, self._kept
        if kept is None:
            make_kept = self._tables is None
            return self._create(call) if make_kept else self._make(*call.args, **call.kwargs)
        key = _key(given) if given["device_id"] == kept.device else "of another device"
        if self._agree(key, given["timeout"]) and key == kept.key:
            return self._give_back(given)
        return self._make(*call.args, **call.kwargs)

    def _create(self, call: inspect.BoundArguments) -> Any:
        import torch.distributed as dist

        given = call.arguments
        store, timeout = given["store"], given["timeout"]
        key = _key(given)
        if self._store is None:
            # A store of the pool's: the kept group must not hold a test's port or file. No rank is
            # its server, as one may end while others still meet.
            assert self._store_file is not None
            self._store = dist.FileStore(self._store_file, -1)
        self._store.set_timeout(timeout)
        self._made += 1
        given["store"] = dist.PrefixStore(f"group{self._made}", self._store)
        group, _ = self._make(*call.args, **call.kwargs)
        world = self._world
        self._kept = _Kept(
            group,
            key,
            timeout,
            _torch_api.group_backends(group),
            given["group_name"],
            world.pg_map[group][0],
            world.pg_backend_config[group],
            world.pg_to_tag.get(group),
            [tag for tag, groups in world.tags_to_pg.items() if group in groups],
            given["device_id"],
        )
        given["store"] = store
        return group, self._enter_store(given)

    def _give_back(self, given: Mapping[str, Any]) -> Any:
        """Enter the kept group into c10d's tables, as if it had just been made."""
        kept, world = self._kept, self._world
        assert kept is not None
        self.used_kept = True
        self.made -= 1
        self.reused += 1
        world.pg_names[kept.group] = kept.name
        world.pg_backend_config[kept.group] = kept.config
        if kept.tag is not None:
            world.pg_to_tag[kept.group] = kept.tag
        for tag in kept.tags:
            world.tags_to_pg.setdefault(tag, []).append(kept.group)
        self._register(kept.name, kept.group)
        return kept.group, self._enter_store(given)

    def _enter_store(self, given: Mapping[str, Any]) -> Any:
        """Give the kept group the test's own store, for sub-groups and whoever asks for it."""
        import torch.distributed as dist

        kept = self._kept
        assert kept is not None
        store = dist.PrefixStore(f"{given['group_name']}/", given["store"])
        self._world.pg_map[kept.group] = (kept.backend, store)
        return store

    def _agree(self, key: str, timeout: timedelta) -> bool:
        """Wait for every rank to come here; whether all of them ask for the same group."""
        import torch.distributed as dist

        self._agreed += 1
        try:
            return self.agree(self._agreed, key, timeout.total_seconds())
        except TimeoutError:
            milliseconds = int(timeout.total_seconds() * 1000)
            raise dist.DistStoreError(
                f"wait timeout after {milliseconds}ms: not every rank asked for the default "
                "process group"
            ) from None

    # Around a test

    def begin(self, good: int | None, store_file: str | None) -> None:
        """Before a test. ``good`` is the number of the kept groups that ranks may go on with; with
        None each group is made, and destroyed, as the test says. They meet in ``store_file``."""
        self._store_file = store_file
        self._left = []
        self.used_kept = False
        self.made = self.reused = 0
        self._on = good is not None
        if good is not None and good != self._good:
            self._good = good
            self._give_up()

    def _give_up(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.group.shutdown()

    def release(self) -> GroupState:
        """After a test: destroy what it left, as the end of its process would have; how the kept
        group came out of it."""
        used = self.used_kept
        self._left = list(self._world.pg_names)
        if self._tables is None:
            release_leftovers()
        else:
            self._tables.restore()
        self.used_kept = used
        return self.state()

    def state(self) -> GroupState:
        """How the kept group came out of the test so far."""
        kept = self._kept
        if kept is None:
            numbers: tuple[int, ...] = (self._good, self._made, self._agreed)
            return GroupState(numbers, None, self.used_kept, self.made, self.reused)
        sequence = _torch_api.group_sequence_number(kept.group)
        spent = kept.spent
        timeouts = [_torch_api.backend_timeout(backend) for backend in kept.backends]
        if any(timeout not in (None, kept.timeout) for timeout in timeouts):
            spent = "its time-out was changed"
        numbers = (self._good, self._made, self._agreed, sequence)
        return GroupState(numbers, spent, self.used_kept, self.made, self.reused)

    # Class style

    def stand(self, sequence: int, module: Any) -> None:
        """Before a test of class style: the class's own groups stand; sub-groups of this test meet
        under keys of its own."""
        if self._tables is None:
            if self._world.default_pg is None:
                return
            self._tables = Tables(self._world, self._register)
            self._let_tests_make_their_own(module)
        else:
            self.reused += 1
        self._tables.renew_store(sequence)

    def _let_tests_make_their_own(self, module: Any) -> None:
        """A test that calls ``init_process_group``, though a group stands, gets what it asks for:
        the class's group steps aside until the test's end."""
        original: Any = _torch_api.c10d().init_process_group

        @functools.wraps(original)
        def make_room(*arguments: Any, **keywords: Any) -> Any:
            if self._tables is not None and self._tables.stands() and os.getpid() == self._pid:
                _torch_api.c10d().destroy_process_group()
            return original(*arguments, **keywords)

        name = "init_process_group"
        for holder in list(sys.modules.values()):
            names = getattr(holder, "__dict__", {})
            if names.get(name) is original:
                names[name] = make_room
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, make_room)


def _backend_classes(c10d: Any) -> list[Any]:
    """The classes of backends that this build of torch has."""
    names = ("ProcessGroupGloo", "ProcessGroupNCCL")
    found = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    return list(dict.fromkeys(base for cls in found for base in cls.__mro__[:-1]))


def _is_keepable(given: Mapping[str, Any]) -> bool:
    """Whether a group made with these arguments may serve other tests."""
    parts = {part.rpartition(":")[2] for part in str(given["backend"]).split(",")}
    return (
        parts <= _KEPT_BACKENDS
        and given["backend_options"] is None
        and given["pg_tag"] in (None, "")
        and not _torch_api.wraps_process_groups()
    )


def _key(given: Mapping[str, Any]) -> str:
    """What has to be equal for one group to stand for another, on every rank."""
    shaping = sorted(item for item in environment().items() if item[0].startswith(_SHAPING))
    device = given["device_id"]
    return repr(
        (
            str(given["backend"]),
            given["group_size"],
            given["timeout"],
            str(given["group_name"]),
            given["group_desc"],
            None if device is None else device.type,
            shaping,
        )
    )


def release_leftovers() -> None:
    """Destroy the groups that a test left behind, as the end of its process would have."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()
