"""A test that leaks, followed by one that would notice: for each probe, as a user runs them."""

LEAKS = """
import atexit, gc, logging, random, signal, subprocess, threading
import torch.distributed.tensor
from torch.distributed.tensor import _random as dtensor_random

counter, table, nested = 0, {"a": 1}, {"list": [1, 2]}

kept_modes = []

def threads():
    return [t for t in threading.enumerate() if t.name == "left"]

def children():
    return subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "sleep"], capture_output=True, text=True).stdout.split()

def leak_mode(on=[]):
    from torch.utils._python_dispatch import TorchDispatchMode
    class Left(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))
    Left().__enter__()

# Probe: how to leave it changed, and how to look.
PROBES = {
    "environment": (lambda: os.environ.update(TC_LEFT="1"), lambda: os.environ.get("TC_LEFT")),
    "cwd": (lambda: os.chdir("/"), os.getcwd),
    "sys_path": (lambda: sys.path.append("/left"), lambda: list(sys.path)),
    "sys_argv": (lambda: sys.argv.append("left"), lambda: list(sys.argv)),
    "umask": (lambda: os.umask(0o777), lambda: (os.umask(0o22), os.umask(0o22))[0]),
    "imports": (lambda: sys.meta_path.append(object()), lambda: len(sys.meta_path)),
    "signals": (lambda: signal.signal(signal.SIGUSR1, print),
                lambda: signal.getsignal(signal.SIGUSR1)),
    "hooks": (lambda: setattr(sys, "excepthook", print), lambda: sys.excepthook),
    "streams": (lambda: setattr(sys, "stdout", open(os.devnull, "w")), lambda: sys.stdout.name),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "logging": (lambda: logging.getLogger("torch").setLevel(1),
                lambda: logging.getLogger("torch").level),
    "interpreter": (lambda: sys.setrecursionlimit(4321), sys.getrecursionlimit),
    "gc": (gc.disable, gc.isenabled),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True),
                      torch.are_deterministic_algorithms_enabled),
    "torch_threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1),
                      torch.get_num_threads),
    "backends": (lambda: torch.set_float32_matmul_precision("medium"),
                 torch.get_float32_matmul_precision),
    "print_options": (lambda: torch.set_printoptions(precision=2),
                      lambda: repr(torch.tensor(1.23456))),
    "default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default_device": (lambda: torch.set_default_device("meta"),
                       lambda: torch.empty(1).device.type),
    "modes": (leak_mode, lambda: torch._C._len_torch_dispatch_stack()),
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "inference": (lambda: kept_modes.append(torch.inference_mode().__enter__()),
                  torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True),
                 lambda: torch.is_autocast_enabled("cpu")),
    "dtensor_rng": (lambda: setattr(dtensor_random, "_rng_tracker", object()),
                    lambda: dtensor_random._rng_tracker),
    "patches": (lambda: setattr(dist, "all_reduce", print), lambda: dist.all_reduce),
    "module": (lambda: globals().update(counter=counter + 1, extra=1),
               lambda: (counter, "extra" in globals())),
    "containers": (lambda: (table.clear(), nested["list"].append(3)),
                   lambda: (dict(table), list(nested["list"]))),
    "class": (lambda: setattr(Test, "seen", 1), lambda: getattr(Test, "seen", 0)),
    "threads": (lambda: threading.Thread(
        target=time.sleep, args=(60,), name="left", daemon=True).start(), threads),
    "children": (lambda: subprocess.Popen(["sleep", "60"]), children),
    "descriptors": (lambda: [os.dup(0) for _ in range(100)],
                    lambda: len(os.listdir("/proc/self/fd")) > 100),
    "host_memory": (lambda: globals().update(block=torch.ones(320_000_000)),
                    lambda: "block" in globals()),
    "groups": (lambda: dist.init_process_group("fake", rank=0, world_size=1,
                   store=torch.testing._internal.distributed.fake_pg.FakeStore()),
               dist.is_initialized),
}
import torch.testing._internal.distributed.fake_pg

class Test(Spawning):
    world_size = 1

def add(name, leave, look):
    first = str(look())
    def test_1_leaks(self):
        self.assertEqual(str(look()), first)
        leave()
    def test_2_notices(self):
        self.assertEqual(str(look()), first)
    setattr(Test, f"test_{name}_1_leaks", test_1_leaks)
    setattr(Test, f"test_{name}_2_notices", test_2_notices)

for name, (leave, look) in PROBES.items():
    add(name, leave, look)

seed_at_import = torch.initial_seed()
generator = torch.Generator().manual_seed(seed_at_import)
first_values = torch.rand(2, generator=generator)

class TestUnseeded(Spawning):
    # Stock's run_test seeds; one that does not finds torch's generator as at the start.

    def run_test(self, test_name, parent_pipe):
        getattr(self, test_name)()

    def test_1_draws(self):
        self.assertEqual(torch.initial_seed(), seed_at_import)
        torch.rand(3)
        torch.manual_seed(5)
    def test_2_finds_it_as_it_was(self):
        self.assertEqual(torch.initial_seed(), seed_at_import)
        self.assertEqual(torch.rand(2), first_values)
"""

#: What only new workers can undo.
REPLACED = {"threads", "children", "descriptors"}


def test_the_next_test_notices_nothing(suites):
    suites.write(LEAKS)
    run = suites.pytest("test_it.py", "-W", "always", TORCHCONTINUOUS_VERBOSE=1)
    failed = [name for name, outcome in run.outcomes().items() if outcome != "passed"]
    assert failed == [], run.output[-8000:]
    assert "passed in fresh ones" not in run.output
    for probe in REPLACED:
        assert f"Test.test_{probe}_1_leaks, rank 0" in run.output, run.output[-4000:]
    for name, case in run.cases.items():
        assert ("; put back" in case.stderr) <= name.endswith("1_leaks"), (name, case.stderr)
    silent = {*REPLACED, "groups", "inference", "containers", "host_memory"}
    for name in set(run.outcomes()) - {f"test_{probe}_2_notices" for probe in silent}:
        probe = name.removeprefix("test_").rpartition("_1_")[0]
        if probe and probe not in silent:
            assert "; put back" in run.cases[name].stderr, name
    suites.assert_nothing_left()


def test_nor_when_it_is_put_back_after_the_report(suites):
    """Without the listing, what needs only putting back is put back while the parent goes on."""
    suites.write(LEAKS)
    run = suites.pytest("test_it.py", "-W", "always")
    failed = [name for name, outcome in run.outcomes().items() if outcome != "passed"]
    assert failed == [], run.output[-8000:]
    assert "passed in fresh ones" not in run.output
    for probe in REPLACED:
        assert f"Test.test_{probe}_1_leaks, rank 0" in run.output, run.output[-4000:]
    suites.assert_nothing_left()


def test_a_worker_that_cannot_be_put_back_refuses_the_next_test(suites):
    """Found after the report, and after the next test was on its way: that runs in fresh workers,
    and the class goes on at its level."""
    suites.write(
        """
        from torchcontinuous._report import Leak
        from torchcontinuous._state_guard import Guard

        pids = os.environ["PIDS"]

        class Test(Spawning):
            def test_1(self):
                if self.rank == 1:
                    def end(guard, resources=True):
                        time.sleep(1)
                        return [Leak("modes", "a thing", "off", "on", False)]
                    Guard.end = end
            def test_2(self):
                with open(f"{pids}-2-{self.rank}", "a") as file:
                    print(os.getpid(), file=file)
            def test_3(self):
                with open(f"{pids}-3-{self.rank}", "a") as file:
                    print(os.getpid(), file=file)
            def test_4(self):
                with open(f"{pids}-4-{self.rank}", "a") as file:
                    print(os.getpid(), file=file)
        """
    )
    pids = suites.folder / "pids"
    run = suites.pytest("test_it.py", "-W", "always", PIDS=pids)
    assert set(run.outcomes().values()) == {"passed"}, run.output[-3000:]
    output = " ".join(run.output.split())
    assert "Test.test_1, rank 1: modes: a thing: off became on. The next test has new" in output
    assert "passed in fresh ones" not in output
    ran = {name: (suites.folder / f"pids-{name}").read_text().split() for name in ("2-1", "3-1")}
    assert [len(pids) for pids in ran.values()] == [1, 1]  # Rank 1 refused, then ran elsewhere.
    assert (suites.folder / "pids-4-1").read_text().split() == ran["3-1"]
    suites.assert_nothing_left()


def test_a_class_chooses(suites):
    """Probes off, or errors; names and values that mean nothing are refused at once."""
    suites.write(
        """
        class Base(Spawning):
            def test_1_leaks(self):
                torch.set_default_dtype(torch.float64)

        class TestOff(Base):
            guard = {"default_dtype": "off"}
            def test_2(self):
                self.assertIs(torch.get_default_dtype(), torch.float64)

        class TestError(Base):
            guard = {"default_dtype": "error"}
            def test_2(self):
                self.assertIs(torch.get_default_dtype(), torch.float32)

        class TestBadName(Base):
            guard = {"nosuch": "off"}

        class TestBadValue(Base):
            guard = {"gc": "maybe"}
        """
    )
    off = suites.pytest("test_it.py::TestOff")
    assert set(off.outcomes().values()) == {"passed"}, off.output[-3000:]
    run = suites.pytest("test_it.py::TestError")
    assert run.outcomes() == {"test_1_leaks": "failed", "test_2": "passed"}, run.output[-3000:]
    text = run.cases["test_1_leaks"].text
    assert "default_dtype: torch.get_default_dtype()" in text
    assert "torch.float64" in text
    for name, word in (("TestBadName", "nosuch"), ("TestBadValue", "maybe")):
        run = suites.pytest(f"test_it.py::{name}")
        assert run.outcomes() == {"test_1_leaks": "failed"}
        assert word in run.cases["test_1_leaks"].text
        assert f"{name}.guard" in run.cases["test_1_leaks"].text


def test_a_leak_that_made_a_test_fail_is_explained(suites):
    """What the guard cannot put back, in a module of the user's: the report says what it saw."""
    (suites.folder / "under_test.py").write_text("registered = []\n")
    suites.write(
        """
        import under_test

        class Test(Spawning):
            def test_1(self):
                under_test.registered.append(1)
                torch.set_default_dtype(torch.float64)
            def test_2(self):
                self.assertEqual(under_test.registered, [])
        """
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}
    output = " ".join(run.output.split())
    assert "test_1 (ranks 0, 1): default_dtype: torch.get_default_dtype()" in output
    assert "python -m torchcontinuous bisect test_it.Test.test_2" in output
