"""Run ``torch.distributed`` test suites on a pool of reused worker processes.

Change the parent class of a suite from torch's ``MultiProcessTestCase`` to
``MultiProcContinuousTest``, or put ``ContinuousMixin`` before a class derived from it::

    from torchcontinuous import MultiProcContinuousTest

    class TestAllReduce(MultiProcContinuousTest):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_sum(self): ...

Where things are, each layer importing only from those above it:

====== =================================== ==================================================
layer  module                              holds
====== =================================== ==================================================
0      ``errors``, ``_settings``,          public exceptions and warnings; environment
       ``_report``, ``_torch_api``,        variables; reports and verdict; torch's private names
       ``_torch_state``, ``_devices``,     (and those of the state guard); accelerators;
       ``_counts``, ``_order``, ``_hang``  totals of a run; orders of tests; who waits where
1      ``_messages``, ``_summary``         the wire's dataclasses; outcomes of a run, compared
2      ``_channel``                        send and receive, with deadlines
3      ``_context``, ``_output``,          what a fresh interpreter takes over; captured output;
       ``_process_group``,                 a worker's process groups,
       ``_class_group``, ``_meshes``,      those of a class, and its device meshes;
       ``_probes``, ``_snapshots``,        what the state guard's probes are made of;
       ``_process_probes``,                probes of the interpreter and the process,
       ``_resource_probes``,               of threads, children and memory,
       ``_torch_probes``,                  of torch's state,
       ``_module_probes``,                 of modules and the test's own names;
       ``_state_guard``                    the table of probes, run around each test
4      ``_single``                         one test on one rank
5      ``_worker``                         a worker's loop
6      ``_nursery``, ``_processes``,       the fork server; processes as their supervisor sees
       ``_launcher``                       them; starting workers
7      ``_generation``, ``_pool``          supervision
8      ``_registry``, ``_handles``,        the unittest adapter
       ``_rerun``, ``_leaks``,
       ``testcase``
9      ``bases``, ``_bisect``,             torch's test bases on reused workers; the search for a
       ``_adoption``                       leak's origin; classes continuous where they stand
11     ``_running``                        unittest's command for suites with no edit
12     ``__main__``, ``pytest_plugin``     ``python -m torchcontinuous``; ``pytest --continuous``
-      ``migrate``                         the migration codemod: has layers of its own
====== =================================== ==================================================

Importing this package does not import torch; using one of the test classes does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchcontinuous._version import __version__
from torchcontinuous.errors import (
    ChannelError,
    ConfigurationError,
    MissingTorchNameError,
    RankWarning,
    StartError,
    StateLeakError,
    StateLeakWarning,
    TorchContinuousError,
    UnreachableClassError,
    WorkerAssertionError,
    WorkerError,
)

if TYPE_CHECKING:
    from torchcontinuous.bases import (
        DistributedTestBase,
        DTensorContinuousTestBase,
        DTensorTestBase,
        FSDPTest,
        FSDPTestContinuous,
        ShardedTensorTestBase,
        SpawnHelper,
    )
    from torchcontinuous.testcase import ContinuousMixin, MultiProcContinuousTest, isolated

__all__ = [
    "ChannelError",
    "ConfigurationError",
    "ContinuousMixin",
    "DTensorContinuousTestBase",
    "DTensorTestBase",
    "DistributedTestBase",
    "FSDPTest",
    "FSDPTestContinuous",
    "MissingTorchNameError",
    "MultiProcContinuousTest",
    "RankWarning",
    "ShardedTensorTestBase",
    "SpawnHelper",
    "StartError",
    "StateLeakError",
    "StateLeakWarning",
    "TorchContinuousError",
    "UnreachableClassError",
    "WorkerAssertionError",
    "WorkerError",
    "__version__",
    "isolated",
]

_IN_TESTCASE = frozenset({"ContinuousMixin", "MultiProcContinuousTest", "isolated"})
_IN_BASES = frozenset(
    {"DTensorContinuousTestBase", "DTensorTestBase", "DistributedTestBase", "FSDPTest"}
    | {"FSDPTestContinuous", "ShardedTensorTestBase", "SpawnHelper"}
)


def __getattr__(name: str) -> Any:
    if name not in _IN_TESTCASE | _IN_BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchcontinuous import _launcher

    if _launcher.may_start():
        # It imports torch beside this process, which is about to do the same.
        _launcher.launcher().start_early()
    from torchcontinuous import bases, testcase

    return getattr(bases if name in _IN_BASES else testcase, name)
