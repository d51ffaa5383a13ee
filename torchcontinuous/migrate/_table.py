"""Which of torch's classes is replaced by which of ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

OURS = "torchcontinuous"
MIXIN = "ContinuousMixin"
MIXED_IN = "MultiProcContinuousTest"

_INTERNAL = "torch.testing._internal"
_COMMON = f"{_INTERNAL}.common_distributed"
_FSDP = f"{_INTERNAL}.common_fsdp"
_DTENSOR = f"{_INTERNAL}.distributed._tensor.common_dtensor"
_SHARDED = f"{_INTERNAL}.distributed._shard.sharded_tensor"
_RPC = f"{_INTERNAL}.distributed.rpc_utils"
_BACKENDS = f"{_INTERNAL}.distributed.distributed_test"


@dataclass(frozen=True)
class Stock:
    """A class of torch's (or of ``--base``) that can be a parent of tests.

    Attributes:
        module: where it is defined.
        name: its name there; dots for a class within a class.
        replacement: the name of what replaces it, in torchcontinuous; None where the mixin is put
            before it.
        style: ``"stock"`` (processes for each test), or ``"class"`` (torch's own continuous ones).
        spawns: whether its own setUp starts the processes.
        world_size: its default number of ranks, where that of what replaces it is another.
        refused: why it cannot be replaced, if so.
    """

    module: str
    name: str
    replacement: str | None
    style: Literal["stock", "class"] = "stock"
    spawns: bool = True
    rpc: bool = False
    world_size: int | None = None
    refused: str | None = None

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"


_TABLE = (
    Stock(_COMMON, "MultiProcessTestCase", MIXED_IN, spawns=False),
    Stock(_COMMON, "DistributedTestBase", "DistributedTestBase"),
    Stock(_DTENSOR, "DTensorTestBase", "DTensorTestBase"),
    Stock(_FSDP, "FSDPTest", "FSDPTest"),
    Stock(_SHARDED, "ShardedTensorTestBase", "ShardedTensorTestBase"),
    Stock(_RPC, "SpawnHelper", "SpawnHelper", rpc=True),
    # No base of ours has their name: the mixin goes before them.
    Stock(_COMMON, "DynamoDistributedMultiProcTestCase", None),
    Stock(_BACKENDS, "TestDistBackend", None, spawns=False),
    Stock(_COMMON, MIXED_IN, MIXED_IN, style="class"),
    Stock(_DTENSOR, "DTensorContinuousTestBase", "DTensorContinuousTestBase", style="class"),
    Stock(_FSDP, "FSDPTestContinuous", "FSDPTestContinuous", style="class"),
    # What MultiProcContinuousTest was called in older releases; a rank for each device came later.
    Stock(_COMMON, "MultiProcContinousTest", MIXED_IN, style="class", world_size=2),
    Stock(
        _COMMON,
        "C10dTorchCommsTestBase",
        None,
        style="class",
        refused="torchcomms' groups are those of torch's own continuous class only",
    ),
)

#: What is no test class by itself, but says that the tests start RPC agents.
RPC_FIXTURES = frozenset(
    {
        "RpcAgentTestFixture",
        "TensorPipeRpcAgentTestFixture",
        "FaultyRpcAgentTestFixture",
    }
)

#: Which class of torch's a class of ours stands for, by the name of ours.
_BACK = {stock.replacement: stock for stock in reversed(_TABLE) if stock.replacement}


class Table:
    """The classes that are looked for: torch's, and those of ``--base``."""

    def __init__(self, bases: Iterable[str] = ()) -> None:
        self._by_name = {stock.name: stock for stock in _TABLE}
        self._given: dict[str, Stock] = {}
        for dotted in bases:
            module, _, name = dotted.rpartition(".")
            self._given[dotted] = Stock(module, name, None)

    def find(self, dotted: str) -> Stock | None:
        """The class of this dotted name. torch's test modules import one another's classes: any
        of them will do."""
        if dotted in self._given:
            return self._given[dotted]
        module, _, name = dotted.rpartition(".")
        if module == _INTERNAL or module.startswith(f"{_INTERNAL}."):
            return self._by_name.get(name)
        return None

    def names(self) -> set[str]:
        """What a file must mention to be of interest."""
        given = {dotted.rpartition(".")[2] for dotted in self._given}
        return {*self._by_name, *given, OURS}


def stands_for(name: str, spawned: bool) -> Stock | None:
    """Which class of torch's is meant by one of ours.

    Args:
        spawned: whether the class at hand starts its processes itself: MultiProcContinuousTest is
            two classes in one.
    """
    if name == MIXED_IN:
        wanted = "MultiProcessTestCase" if spawned else MIXED_IN
        return next(stock for stock in _TABLE if stock.name == wanted)
    return _BACK.get(name)
