"""The state guard: what each probe finds, puts back, and leaves alone."""

import gc
import io
import logging
import multiprocessing
import operator
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import unittest
import warnings

import numpy as np
import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.distributed.tensor._random as dtensor_random
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchcontinuous import _resource_probes, _snapshots, _torch_api, _torch_probes
from torchcontinuous._probes import difference, short
from torchcontinuous._report import Leak
from torchcontinuous._state_guard import PROBES, Guard, check_settings
from torchcontinuous.errors import ConfigurationError

MODULE = """
import collections, functools, unittest
from collections import OrderedDict, defaultdict, deque
from os import path as some_library

CONSTANT = 1000
NUMBERS = [1, [2, 3], {"a": {4}}]
TABLE = {"x": [1], "y": (2, [3])}
SEEN = {1, 2}
RECENT = deque([1, 2], maxlen=5)
BUFFER = bytearray(b"abc")
COUNTS = collections.Counter("aab")
ORDERED = OrderedDict(a=1, b=2)
BY_NAME = defaultdict(list, x=[1])

def helper():
    return "helper"

@functools.lru_cache
def cached(number):
    return number

class Settings:
    flag = False
    items = [1]

class Base(unittest.TestCase):
    shared = []
    limit = 3

    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        "Seeds nothing, unlike stock's: the guard sees to the generators."

    def run_test(self, test_name, parent_pipe):
        pass

    @staticmethod
    @functools.cache
    def computed(number):
        return number

class TestIt(Base):
    world_size = 2

    def test_it(self):
        pass
"""


@pytest.fixture
def suite(request):
    """A test module of its own, as a worker has it after the import."""
    module = types.ModuleType("suite_of_the_guard")
    sys.modules[module.__name__] = module
    exec(MODULE, vars(module))
    yield module
    del sys.modules[module.__name__]


def only(guard, *names):
    """A guard's settings by which nothing else runs."""
    return dict.fromkeys(set(PROBES) - set(names), "off")


def what(leaks):
    return {leak.what for leak in leaks}


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def leave_warnings():
    warnings.catch_warnings(record=True).__enter__()
    warnings.simplefilter("error")


def patch_all_reduce():
    dist.all_reduce = lambda *arguments: None


def leave_handler():
    logging.getLogger("torch").addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.DEBUG)
    logging.disable(logging.INFO)


def rebind(suite):
    suite.CONSTANT = "other"
    suite.new_name = 1
    del suite.helper


def change_class(suite):
    suite.TestIt.world_size = 8
    suite.Base.shared.append("left")
    suite.Base.extra = True


def compile_something():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def change_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)


def set_rng_tracker():
    dtensor_random._rng_tracker = object()


def set_dispatch_mode(suite):
    torch.set_grad_enabled(False)
    torch.set_anomaly_enabled(True)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    Mode().__enter__()
    DispatchMode().__enter__()


#: For each probe whose finds are put back: what a test leaves, and what the guard calls it.
LEAKS = {
    "default_device": (lambda s: torch.set_default_device("meta"), {"the default device"}),
    "modes": (
        set_dispatch_mode,
        {
            "torch.is_grad_enabled()",
            "anomaly mode (enabled, check_nan)",
            "torch.is_autocast_enabled('cpu')",
            "autocast's nesting",
            "torch function modes",
            "torch dispatch modes",
        },
    ),
    "default_dtype": (
        lambda s: torch.set_default_dtype(torch.float64),
        {"torch.get_default_dtype()"},
    ),
    "environment": (
        lambda s: os.environ.update(GUARD_NEW="1", PATH="/nowhere"),
        {"os.environ['GUARD_NEW']", "os.environ['PATH']"},
    ),
    "cwd": (lambda s: os.chdir("/"), {"os.getcwd()"}),
    "sys_path": (lambda s: sys.path.insert(0, "/nowhere"), {"sys.path"}),
    "sys_argv": (lambda s: setattr(sys, "argv", ["other"]), {"sys.argv"}),
    "umask": (lambda s: os.umask(0o007), {"umask"}),
    "imports": (lambda s: sys.meta_path.insert(0, object()), {"sys.meta_path"}),
    "signals": (
        lambda s: (
            signal.signal(signal.SIGUSR1, lambda *a: None),
            signal.alarm(1000),
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
        ),
        {"handler of SIGUSR1", "ITIMER_REAL is running", "blocked signals"},
    ),
    "hooks": (
        lambda s: (
            setattr(sys, "excepthook", print),
            setattr(threading, "excepthook", print),
            setattr(sys, "displayhook", print),
            sys.setprofile(lambda *a: None),
        ),
        {"sys.excepthook", "threading.excepthook", "sys.displayhook", "sys.getprofile()"},
    ),
    "streams": (lambda s: setattr(sys, "stdin", io.StringIO()), {"sys.stdin"}),
    "warnings": (
        lambda s: leave_warnings(),
        {"warnings.filters", "warnings._showwarnmsg_impl"},
    ),
    "logging": (
        lambda s: leave_handler(),
        {
            "logging.getLogger('torch').handlers",
            "logging.getLogger('root').level",
            "logging.root.manager.disable",
        },
    ),
    "interpreter": (
        lambda s: (sys.setrecursionlimit(4321), sys.setswitchinterval(0.01)),
        {"sys.getrecursionlimit()", "sys.getswitchinterval()"},
    ),
    "gc": (
        lambda s: (gc.disable(), gc.set_threshold(5, 5, 5)),
        {"gc.isenabled()", "gc.get_threshold()"},
    ),
    "start_method": (
        lambda s: multiprocessing.set_start_method("forkserver", force=True),
        {"multiprocessing.get_start_method()"},
    ),
    "deterministic": (
        lambda s: (
            torch._C._set_deterministic_algorithms(True, warn_only=True),
            torch.set_warn_always(True),
        ),
        {"torch.get_deterministic_debug_mode()", "torch.is_warn_always_enabled()"},
    ),
    "torch_threads": (lambda s: change_threads(), {"torch.get_num_threads()"}),
    "backends": (
        lambda s: (
            torch.set_float32_matmul_precision("medium"),
            torch._C._set_cudnn_benchmark(True),
            torch._C._set_sdp_use_flash(False),
            setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
            torch._C._set_rocm_fa_preferred_backend(torch._C._ROCmFABackend.AOTriton),
        ),
        {
            "float32_matmul_precision",
            "cudnn_benchmark",
            "flash attention",
            "cublas_allow_fp16_reduced_precision_reduction",
            "rocm_fa_preferred_backend",
        },
    ),
    "print_options": (
        lambda s: torch.set_printoptions(precision=2),
        {"torch.set_printoptions.precision"},
    ),
    "dtensor_rng": (lambda s: set_rng_tracker(), {"torch.distributed.tensor's RNG tracker"}),
    "compile_caches": (
        lambda s: compile_something(),
        {"compiled by Dynamo (frames, code objects)"},
    ),
    "configs": (
        lambda s: setattr(torch._dynamo.config, "suppress_errors", True),
        {"torch._dynamo.config.suppress_errors"},
    ),
    "patches": (lambda s: patch_all_reduce(), {"torch.distributed.all_reduce"}),
    "module": (
        rebind,
        {f"suite_of_the_guard.{name}" for name in ("CONSTANT", "new_name", "helper")},
    ),
    "class": (change_class, {"TestIt.world_size", "Base.shared", "Base.extra"}),
}  # fmt: skip

#: Probes whose finds only new workers undo, which report nothing, or which have tests of their own.
OTHERS = {
    "rng", "threads", "children", "native_threads", "descriptors", "host_memory", "device_memory",
}  # fmt: skip


def test_every_probe_has_a_case():
    assert set(LEAKS) | OTHERS == set(PROBES)


@pytest.mark.parametrize("probe", LEAKS)
def test_found_and_put_back(probe, suite, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    guard = Guard(suite.TestIt, only(suite, probe))
    guard.begin()
    assert guard.end() == []
    guard.begin()
    leave, expected = LEAKS[probe]
    leave(suite)
    leaks = guard.end()
    assert expected <= what(leaks)
    assert all(leak.probe == probe and leak.before != leak.after for leak in leaks)
    assert [leak for leak in leaks if not leak.restored] == []
    assert guard.end() == []
    guard.begin()
    assert guard.end() == []
    # A guard that is made now agrees: nothing is left that only the first takes for normal.
    leaks_again = Guard(suite.TestIt, only(suite, probe))
    leave(suite)
    assert what(leaks_again.end()) == what(leaks)


def test_all_probes_together_find_nothing_in_a_test_that_leaves_nothing(suite):
    guard = Guard(suite.TestIt)
    for _ in range(12):
        guard.begin()
        torch.ones(3).sum()
        assert guard.end() == []


def test_before_and_after_are_told(suite):
    guard = Guard(suite.TestIt, only(suite, "default_dtype", "environment"))
    guard.begin()
    os.environ["GUARD_NEW"] = "x" * 200
    torch.set_default_dtype(torch.float64)
    dtype, environment = guard.end()
    assert dtype == Leak(
        "default_dtype", "torch.get_default_dtype()", "torch.float32", "torch.float64", True
    )
    assert environment.before == "(not set)"
    assert len(environment.after) <= 80
    assert "GUARD_NEW" not in os.environ


def test_the_parents_context_is_no_leak(suite, monkeypatch, tmp_path):
    guard = Guard(suite.TestIt)
    guard.begin()
    assert guard.end() == []
    monkeypatch.setenv("GUARD_NEW", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    mask = os.umask(0o027)
    guard.begin()
    os.environ["GUARD_NEW"] = "2"
    assert what(guard.end()) == {"os.environ['GUARD_NEW']"}
    assert os.environ["GUARD_NEW"] == "1"
    assert os.getcwd() == str(tmp_path)
    os.umask(mask)


def test_a_folder_that_the_parent_removes_meanwhile_is_no_leak(suite, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    guard = Guard(suite.TestIt, only(suite, "cwd"))
    removed = tmp_path / "removed"
    removed.mkdir()
    os.chdir(removed)
    guard.begin()
    removed.rmdir()
    assert guard.end() == []
    other = tmp_path / "other"
    other.mkdir()
    os.chdir(other)
    other.rmdir()
    assert what(guard.end()) == {"os.getcwd()"}


def test_generators_are_put_back_and_are_no_leak(suite):
    guard = Guard(suite.TestIt)
    np.random.set_state(np.random.get_state())
    guard = Guard(suite.TestIt)

    def draw():
        return random.random(), np.random.randn(), torch.rand(1).item()

    guard.begin()
    first = draw()
    assert guard.end() == []
    assert draw() == first
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert guard.end() == []
    assert draw() == first


def test_generators_that_every_test_seeds_are_left_alone():
    stock = _torch_api.stock_test_case()
    assert _torch_probes.rng(type("Seeded", (stock,), {})) is None
    for name in ("_run", "run_test", "__init__"):
        own = type("Own", (stock,), {name: lambda self, *arguments: None})
        assert _torch_probes.rng(own) is not None


def test_inference_mode_cannot_be_put_back(suite):
    guard = Guard(suite.TestIt, only(suite, "modes"))
    mode = torch.inference_mode()
    mode.__enter__()
    try:
        leaks = guard.end()
    finally:
        mode.__exit__(None, None, None)
    assert ("torch.is_inference_mode_enabled()", False) in {(e.what, e.restored) for e in leaks}


def test_a_default_device_below_other_modes(suite):
    guard = Guard(suite.TestIt, only(suite, "default_device", "modes"))
    with torch.device("meta"):
        inside = Guard(suite.TestIt, only(suite, "default_device", "modes"))
        Mode().__enter__()
        torch.device("cpu").__enter__()
        assert what(inside.end()) == {"the default device", "torch function modes"}
        assert torch.ones(1).device.type == "meta"
        assert inside.end() == []
    assert guard.end() == []


def test_threads(suite):
    guard = Guard(suite.TestIt, only(suite, "threads"))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left running")
    thread.start()
    try:
        (leak,) = guard.end()
        assert (leak.what, leak.restored) == ("thread 'left running'", False)
    finally:
        stop.set()
    thread.join()
    assert guard.end() == []
    # One that is about to end is waited for.
    threading.Thread(target=time.sleep, args=(0.01,)).start()
    assert guard.end() == []


def test_a_thread_of_c_that_ran_python_is_no_leak(suite):
    guard = Guard(suite.TestIt, only(suite, "threads"))
    import _thread

    noted = threading.Event()
    lock = threading.Lock()
    lock.acquire()

    def run():
        threading.current_thread()  # Registers a thread that never ends, as far as Python knows.
        noted.set()
        lock.acquire()

    _thread.start_new_thread(run, ())
    noted.wait()
    try:
        assert guard.end() == []
    finally:
        lock.release()


def test_children(suite):
    guard = Guard(suite.TestIt, only(suite, "children"))
    child = subprocess.Popen(["sleep", "100"])
    try:
        (leak,) = guard.end()
        assert (leak.what, leak.restored) == (f"child process {child.pid}", False)
        assert "sleep 100" in leak.after
    finally:
        child.kill()
    # It is ending, or has ended and nobody waited for it.
    assert guard.end() == []
    child.wait()


def test_lasting_children_are_no_leak(suite, monkeypatch):
    guard = Guard(suite.TestIt, only(suite, "children"))
    child = subprocess.Popen(["sleep", "100"])
    pool = types.SimpleNamespace(process=child)
    module = types.SimpleNamespace(_pool_set=[pool])
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)
    try:
        assert guard.end() == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("there", [True, False], ids=["children files", "no such files"])
def test_children_are_listed(there, monkeypatch):
    if not there:
        monkeypatch.setattr(_resource_probes, "_CHILDREN", "/proc/self/task/{}/no_such_file")
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert child.pid in _resource_probes._children()
    finally:
        child.kill()
        child.wait()


def test_descriptors(suite):
    guard = Guard(suite.TestIt, only(suite, "descriptors"), world_size=2)
    limit = _resource_probes.DESCRIPTOR_GROWTH + 2 * _resource_probes.DESCRIPTOR_GROWTH_PER_RANK
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
    assert guard.end() == []
    opened += [os.open(os.devnull, os.O_RDONLY) for _ in range(limit)]
    (leak,) = guard.end()
    assert (leak.what, leak.restored) == ("open descriptors", False)
    assert int(leak.after) >= int(leak.before) + len(opened)
    for descriptor in opened:
        os.close(descriptor)
    assert guard.end() == []


def test_native_threads(suite, monkeypatch):
    monkeypatch.setattr(_resource_probes, "NATIVE_THREAD_GROWTH", 2)
    guard = Guard(suite.TestIt, only(suite, "native_threads"))
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    (leak,) = guard.end()
    stop.set()
    for thread in threads:
        thread.join()
    assert (leak.what, leak.restored) == ("native threads", False)
    assert int(leak.after) == int(leak.before) + 4


def test_host_memory(suite, monkeypatch):
    monkeypatch.setattr(_resource_probes, "HOST_MEMORY_GROWTH", 1 << 20)
    taken = bytearray(256 << 20)  # More than what the process has had at its most.
    del taken
    guard = Guard(suite.TestIt, only(suite, "host_memory"))
    assert guard.end() == []
    held = bytearray(os.urandom(1 << 20) * 512)
    (leak,) = guard.end()
    assert (leak.what, leak.restored) == ("resident memory (bytes)", False)
    del held
    assert guard.end() == []


def test_device_memory(suite, monkeypatch):
    allocated = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    guard = Guard(suite.TestIt, only(suite, "device_memory"))
    allocated[0] = 1000
    assert guard.end() == []
    allocated[0] = _resource_probes.DEVICE_MEMORY_GROWTH + 1
    (leak,) = guard.end()
    assert (leak.probe, leak.restored) == ("device_memory", False)


def test_a_closed_stream_cannot_be_opened_again(suite, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    guard = Guard(suite.TestIt, only(suite, "streams"))
    sys.stdin.close()
    assert [(e.what, e.restored) for e in guard.end()] == [("sys.stdin.closed", False)]


CONTENTS = {
    "list": (lambda s: s.NUMBERS.append(5), "NUMBERS"),
    "a list in a list": (lambda s: s.NUMBERS[1].clear(), "NUMBERS[1]"),
    "a set in a dict in a list": (lambda s: s.NUMBERS[2]["a"].add(9), "NUMBERS[2]['a']"),
    "dict": (lambda s: s.TABLE.update(z=1), "TABLE"),
    "a list in a tuple in a dict": (lambda s: s.TABLE["y"][1].append(4), "TABLE['y'][1]"),
    "set": (lambda s: s.SEEN.discard(1), "SEEN"),
    "deque": (lambda s: s.RECENT.extend(range(9)), "RECENT"),
    "bytearray": (lambda s: s.BUFFER.extend(b"d"), "BUFFER"),
    "Counter": (lambda s: s.COUNTS.update("zz"), "COUNTS"),
    "the order of a dict": (lambda s: s.ORDERED.move_to_end("a"), "ORDERED"),
    "defaultdict": (lambda s: s.BY_NAME["new"], "BY_NAME"),
    "a helper class's list": (lambda s: s.Settings.items.append(2), None),
    "a helper class's flag": (lambda s: setattr(s.Settings, "flag", True), None),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_containers(case, suite):
    guard = Guard(suite.TestIt, only(suite, "module"))
    before = repr({k: v for k, v in vars(suite).items() if k.isupper()}), suite.Settings.flag
    held = suite.NUMBERS, suite.TABLE, suite.RECENT
    leave, name = CONTENTS[case]
    leave(suite)
    leaks = guard.end()
    assert len(leaks) == 1
    assert leaks[0].restored
    if name is not None:
        assert leaks[0].what == f"suite_of_the_guard.{name}"
    assert before == (
        repr({k: v for k, v in vars(suite).items() if k.isupper()}),
        suite.Settings.flag,
    )
    assert all(map(operator.is_, held, (suite.NUMBERS, suite.TABLE, suite.RECENT)))
    assert suite.RECENT.maxlen == 5
    assert guard.end() == []


def test_equal_plain_values_are_no_change(suite):
    guard = Guard(suite.TestIt, only(suite, "module", "class"))
    suite.CONSTANT = int("1000")
    suite.SEEN.discard(1)
    suite.SEEN.add(1)
    suite.NUMBERS[0] = int("1")
    assert guard.end() == []


def test_a_rebound_container_is_the_old_one_again(suite):
    guard = Guard(suite.TestIt, only(suite, "module"))
    numbers = suite.NUMBERS
    numbers.append(1)
    suite.NUMBERS = list(numbers)
    guard.end()
    assert suite.NUMBERS is numbers
    assert len(numbers) == 3


def test_containers_that_hold_each_other(suite):
    suite.NUMBERS.append(suite.NUMBERS)
    suite.NAMES = vars(suite)
    suite.MODULES = sys.modules
    guard = Guard(suite.TestIt, only(suite, "module"))
    suite.NUMBERS.append(1)
    sys.modules["guard_new"] = suite
    assert what(guard.end()) == {"suite_of_the_guard.NUMBERS"}
    assert sys.modules.pop("guard_new") is suite


def test_function_caches_are_cleared(suite):
    suite.cached(1)
    guard = Guard(suite.TestIt, only(suite, "module", "class"))
    suite.cached(1)
    assert guard.end() == []
    suite.cached(2)
    suite.Base.computed(1)
    leaks = guard.end()
    assert what(leaks) == {
        "suite_of_the_guard.cached.cache_info()",
        "Base.computed.cache_info()",
    }
    assert {(leak.before, leak.after) for leak in leaks} >= {("'1 entries'", "'2 entries'")}
    assert suite.cached.cache_info().currsize == 0
    assert guard.end() == []


def test_bookkeeping_is_no_leak(suite):
    guard = Guard(suite.TestIt)
    suite.TestIt._classSetupFailed = True
    suite.TestIt._event_listener = staticmethod(print)
    suite.TestIt._torchcontinuous_pool = 1
    suite.TestIt._continuous_pool = 1
    suite.__warningregistry__ = {}
    assert guard.end() == []


def test_making_a_process_group_is_no_leak(suite, tmp_path):
    guard = Guard(suite.TestIt)
    hook = sys.excepthook
    for attempt in range(2):
        guard.begin()
        store = dist.FileStore(str(tmp_path / str(attempt)), 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
        assert sys.excepthook is not hook
        assert guard.end() == []
        assert sys.excepthook is hook


class Hostile:
    """An object of a user's that answers nothing."""

    def __eq__(self, other):
        raise ValueError("never to be compared")

    __hash__ = object.__hash__

    def __repr__(self):
        raise ValueError("never to be shown")


def test_users_objects_are_not_compared(suite):
    suite.THING, suite.THINGS = Hostile(), [Hostile()]
    suite.BY_THING, suite.THING_SET = {Hostile(): Hostile()}, {Hostile()}
    suite.TENSORS = [torch.ones(2)]
    guard = Guard(suite.TestIt)
    assert guard.end() == []
    suite.THING = Hostile()
    suite.THINGS.append(Hostile())
    suite.BY_THING.clear()
    suite.THING_SET.add(Hostile())
    suite.TENSORS[0] = torch.zeros(2)
    dist.all_gather = Hostile()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    sys.excepthook = Hostile()
    leaks = guard.end()
    assert all(leak.restored for leak in leaks)
    names = ("THING", "THINGS", "BY_THING", "THING_SET", "TENSORS")
    assert what(leaks) == {
        "sys.excepthook",
        "torch.distributed.all_gather",
        *(f"suite_of_the_guard.{name}" for name in names),
    }
    assert guard.end() == []


def test_a_probe_that_raises_is_reported(suite, monkeypatch):
    guard = Guard(suite.TestIt, only(suite, "umask", "cwd"))

    def fail():
        raise ValueError("no such thing")

    for _, probe in guard._probes:
        monkeypatch.setattr(probe, "changed", fail)
        monkeypatch.setattr(probe, "begin", fail)
    guard.begin()
    leaks = guard.end()
    assert {leak.probe for leak in leaks} == {"umask", "cwd"}
    assert {(leak.after, leak.restored) for leak in leaks} == {("ValueError: no such thing", False)}


def test_reading_a_configuration_is_no_leak(suite):
    guard = Guard(suite.TestIt, only(suite, "configs"))
    for name in torch._dynamo.config._config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(torch._dynamo.config, name)
    with torch._dynamo.config.patch(suppress_errors=True):
        pass
    assert guard.end() == []


def test_configuration_containers_and_hidden_entries(suite):
    guard = Guard(suite.TestIt, only(suite, "configs"))
    config = torch._dynamo.config
    before = set(config.traceable_tensor_subclasses)
    config.traceable_tensor_subclasses.add(str)
    del config.suppress_errors
    assert "torch._dynamo.config.traceable_tensor_subclasses" in what(guard.end())
    assert config.traceable_tensor_subclasses == before
    assert config.suppress_errors is False
    # The same where the container was an override at the baseline.
    config.traceable_tensor_subclasses = {int}
    guard = Guard(suite.TestIt, only(suite, "configs"))
    config.traceable_tensor_subclasses.add(str)
    assert what(guard.end()) == {"torch._dynamo.config.traceable_tensor_subclasses"}
    assert config.traceable_tensor_subclasses == {int}
    config.traceable_tensor_subclasses = before


def test_a_logger_made_by_the_test_is_as_it_is_found(suite):
    guard = Guard(suite.TestIt, only(suite, "logging"))
    logger = logging.getLogger("torch.guard_new")
    logger.setLevel(logging.ERROR)
    assert guard.end() == []
    logger.setLevel(logging.INFO)
    assert what(guard.end()) == {"logging.getLogger('torch.guard_new').level"}
    logging.getLogger("torch").handlers = []
    guard.end()
    assert guard.end() == []


def test_settings():
    checked = check_settings({"threads": False, "cwd": True, "module": "error"}, "TestX")
    assert checked == {"threads": "off", "cwd": "restore", "module": "error"}
    assert check_settings({}, "TestX") == {}


@pytest.mark.parametrize(
    ("guard", "words"),
    [
        ("off", ("TestX.guard", "'off'", "mapping")),
        ({"thread": "off"}, ("TestX.guard", "'thread'", "threads")),
        ({"threads": "ignore"}, ("TestX.guard['threads']", "'ignore'", "'restore'")),
        ({"threads": 1}, ("TestX.guard['threads']", "1")),
        ({3: "off"}, ("TestX.guard", "3")),
        ({"threads": []}, ("TestX.guard['threads']", "[]")),
    ],
)
def test_settings_that_mean_nothing(guard, words):
    with pytest.raises(ConfigurationError) as caught:
        check_settings(guard, "TestX")
    assert all(word in str(caught.value) for word in words)


def test_a_probe_that_is_off_is_not_made(suite):
    guard = Guard(suite.TestIt, {"environment": "off", "default_dtype": "error"})
    assert {name for name, _ in guard._probes} == set(PROBES) - {"environment"}


@pytest.mark.parametrize("preloaded", ["", "import torch"])
def test_nothing_is_imported(preloaded):
    code = f"""
    import sys, unittest
    {preloaded}
    from torchcontinuous._state_guard import Guard
    class T(unittest.TestCase): pass
    before = set(sys.modules)
    guard = Guard(T, {{'module': 'off'}})
    guard.begin()
    leaks = guard.end()
    assert leaks == [], leaks
    assert set(sys.modules) == before, set(sys.modules) - before
    assert ("torch" in before) == {bool(preloaded)}
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], check=True)


def test_modules_first_loaded_by_a_test():
    code = """
    import sys, unittest, torch
    from torchcontinuous._state_guard import Guard
    class T(unittest.TestCase): pass
    assert "torch._inductor.config" not in sys.modules
    guard = Guard(T, {'module': 'off'})
    guard.begin()
    import torch._inductor.config, torch.distributed.tensor
    torch._inductor.config.max_autotune = True
    assert [e.what for e in guard.end()] == ["torch._inductor.config.max_autotune"]
    assert torch._inductor.config.max_autotune is False
    torch.distributed.tensor.distribute_tensor = None
    assert [e.what for e in guard.end()] == ["torch.distributed.tensor.distribute_tensor"]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_short():
    assert short(Hostile()).startswith("<test.test_state_guard.Hostile object at 0x")
    assert short(torch.ones(2)).startswith("<torch.Tensor object at 0x")
    assert short([1, Hostile()]).startswith("[1, <test.test_state_guard.Hostile object at 0x")
    assert short(test_short).startswith("<function test_short at 0x")
    assert short(unittest.TestCase) == "<class unittest.case.TestCase>"
    assert len(short(["word"] * 100)) <= 80
    list_of_ones_own = type("list", (), {"__len__": lambda self: 1 // 0})
    assert "list object" in short(list_of_ones_own())


def test_difference():
    assert difference([1, 2, 3], [1, 2, 3, 4]) == ("... []", "... [4]")
    assert difference([1, 2, 3], [0, 2, 3]) == ("[1] ...", "[0] ...")
    assert difference([], ["x"]) == ("[]", "['x']")


def test_subclasses_cannot_interfere():
    class Stubborn(dict):
        def update(self, *arguments, **keywords):
            raise ValueError("not to be called")

        clear = keys = values = __setitem__ = update

    table = Stubborn(a=1)
    snapshot = _snapshots.Snapshot("table", table)
    dict.__setitem__(table, "b", 2)
    assert snapshot.put_back().restored
    assert dict(dict.items(table)) == {"a": 1}


def test_a_recursion_limit_that_an_import_raises_stays(suite, monkeypatch):
    guard = Guard(suite.TestIt, only(suite, "interpreter"))
    limit = sys.getrecursionlimit()
    monkeypatch.setitem(sys.modules, "guard_new", suite)
    sys.setrecursionlimit(limit + 1000)
    assert guard.end() == []
    sys.setrecursionlimit(limit)
    assert guard.end() != []
    assert sys.getrecursionlimit() == limit + 1000
    sys.setrecursionlimit(limit)


def test_warning_filters_that_an_import_brings_stay(suite, monkeypatch):
    guard = Guard(suite.TestIt, only(suite, "warnings"))
    category = type("Deprecated", (UserWarning,), {"__module__": "guard_new"})
    monkeypatch.setitem(sys.modules, "guard_new", suite)
    with warnings.catch_warnings():
        warnings.simplefilter("once", category)
        warnings.simplefilter("error")
        guard.end()
        assert warnings.filters[0][2] is category
        assert warnings.filters[1][0] != "error"
        assert guard.end() == []
    warnings.filters.pop(0)


def test_writes_to_dictionaries_are_counted():
    tables = [{"one": 1}, {}]
    count = _snapshots.count_writes(tables)
    if count is None:
        pytest.skip("this interpreter does not count them")
    before = count()
    assert tables[0]["one"] == 1
    assert [*tables[1].values()] == []
    assert count() == before
    for change in (
        lambda: tables[0].update(one=2),
        lambda: tables[1].update(new=None),
        lambda: tables[1].pop("new"),
    ):
        change()
        assert count() != before
        before = count()


def test_patches_without_a_count_of_writes(suite, monkeypatch):
    monkeypatch.setattr("torchcontinuous._module_probes.count_writes", lambda dictionaries: None)
    guard = Guard(suite.TestIt, only(PROBES, "patches"))
    assert guard.end() == []
    monkeypatch.setattr(torch.distributed, "all_reduce", print)
    assert what(guard.end()) == {"torch.distributed.all_reduce"}
    assert guard.end() == []
