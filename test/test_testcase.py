"""Stock style, item by item: what a stock worker sees, a pooled worker sees too."""

import json

import pytest


def test_what_a_worker_sees(suites):
    """Environment, folder, paths, arguments, umask, seeds, start method, parent, file_name."""
    suites.write(
        """
        import multiprocessing as mp, random, signal
        import numpy as np

        class Test(Spawning):
            seen = set()

            def setUp(self):
                MultiProcContinuousTest.setUp(self)
                number = self._testMethodName[-1]
                os.environ["TC_NUMBER"] = number
                os.environ.pop("TC_GONE", None)
                if number == "1":
                    os.environ["TC_GONE"] = "there"
                folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "d" + number)
                os.makedirs(folder, exist_ok=True)
                os.chdir(folder)
                sys.path.append("/tc/" + number)
                sys.argv[1:] = ["argument", number]
                os.umask(0o020 + int(number))
                self._spawn_processes()
                os.environ["TC_NUMBER"] = "set after the spawn"

            def check(self, number):
                self.assertEqual(os.environ["TC_NUMBER"], number)
                self.assertEqual(os.environ.get("TC_GONE"), "there" if number == "1" else None)
                self.assertEqual(os.path.basename(os.getcwd()), "d" + number)
                self.assertEqual(sys.path[-1], "/tc/" + number)
                self.assertEqual(sys.argv[1:], ["argument", number])
                mask = os.umask(0)
                os.umask(mask)
                self.assertEqual(mask, 0o020 + int(number))
                self.assertEqual(torch.initial_seed(), 1234)
                state = random.Random(1234).getstate()
                self.assertEqual(random.getstate(), state)
                self.assertEqual(os.environ["TORCH_SHOW_CPP_STACKTRACES"], "1")
                process = mp.current_process()
                self.assertEqual(process.name, f"process {self.rank}")
                self.assertFalse(process.daemon)
                self.assertEqual(mp.get_start_method(), "spawn")
                self.assertEqual(mp.parent_process().pid, int(os.environ["TC_PARENT"]))
                self.assertTrue(mp.parent_process().is_alive())
                # A new file each time, there until the test's end.
                self.assertTrue(os.path.exists(self.file_name))
                self.assertNotIn(self.file_name, type(self).seen)
                type(self).seen.add(self.file_name)
                # Left for the next test to find, if it could.
                os.environ["TC_LEFT"] = "x"
                os.environ["TC_NUMBER"] = "changed by a test"
                os.chdir("/")
                os.umask(0)
                sys.path.append("/left")
                torch.rand(1), random.random()

            def test_1(self): self.check("1")
            def test_2(self):
                self.assertNotIn("TC_LEFT", os.environ)
                self.check("2")
            def test_3(self): self.check("3")

        os.environ.setdefault("TC_PARENT", str(os.getpid()))
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {"test_1": "passed", "test_2": "passed", "test_3": "passed"}, (
        run.output
    )
    assert "StateLeakWarning" not in run.output  # Passed on the first attempt, too.
    suites.assert_nothing_left()


def test_overridden_run_and_run_test(suites):
    suites.write(
        """
        class Over(Spawning):
            @classmethod
            def _run(cls, rank, test_name, file_name, pipe, **kwargs):
                assert set(kwargs) == {"fake_pg"}
                self = cls(test_name)
                self.rank, self.file_name, self.extra = rank, file_name, "from _run"
                self.run_test(test_name, pipe)
                sys.exit(0)

            def run_test(self, name, pipe):
                self.more = "from run_test"
                super().run_test(name, pipe)

            def test_seen(self):
                self.assertEqual((self.extra, self.more), ("from _run", "from run_test"))

        class NoKeywords(Spawning):
            @classmethod
            def _run(cls, rank, test_name, file_name, parent_pipe):
                super()._run(rank, test_name, file_name, parent_pipe)

            def test_no_keywords(self): pass

        class FakeGroup(Spawning):
            fake_pg = True

            @classmethod
            def _run(cls, rank, test_name, file_name, pipe, **kwargs):
                assert kwargs == {"fake_pg": True}
                super()._run(rank, test_name, file_name, pipe, **kwargs)

            def test_fake(self): pass

        class Outside(Spawning):
            @classmethod
            def _run(cls, rank, test_name, file_name, pipe, **kwargs):
                raise ValueError("outside run_test")

            def test_outside(self): pass

        class Big(Spawning):
            def test_big_traceback(self):
                raise ValueError("x" * 300_000 + "end")
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_seen": "passed",
        "test_no_keywords": "passed",
        "test_fake": "passed",
        "test_outside": "failed",
        "test_big_traceback": "failed",
    }, run.output
    assert "ValueError: outside run_test" in run.cases["test_outside"].text
    assert "xend" in run.cases["test_big_traceback"].text


def test_exit_codes(suites):
    """Skips by code and by exception, code 10, special and unchecked codes, the sandcastle way."""
    source = """
        from torch.testing._internal.common_distributed import TEST_SKIPS

        def decorated(fn):
            import functools
            @functools.wraps(fn)
            def wrapper(self): return fn(self)
            return wrapper

        class Test(Spawning):
            def setUp(self):
                super().setUp()
                self.special_return_code_checks = {
                    self.test_special.__wrapped__: 7,
                    self.test_special_late.__wrapped__: -6,
                    self.test_special_missed.__wrapped__: 7,
                }
                self.skip_return_code_checks = [self.test_unchecked.__wrapped__]

            def test_skip_code(self): sys.exit(TEST_SKIPS["multi-gpu-2"].exit_code)
            def test_skip_text(self): self.skipTest("my own reason")
            def test_skip_raised(self): raise unittest.SkipTest("raised reason")
            @decorated
            def test_special(self): os._exit(7)
            @decorated
            def test_special_late(self):
                # Reports success, dies at its exit.
                import atexit
                atexit.register(os.abort)
            @decorated
            def test_special_missed(self): pass
            @decorated
            def test_unchecked(self): os._exit(33)
            def test_wrapped_once(self):
                class Stock(MultiProcessTestCase):
                    def test_it(self): pass

                def depth(fn):
                    return 1 + depth(fn.__wrapped__) if hasattr(fn, "__wrapped__") else 0

                self.assertEqual(depth(self.test_wrapped_once), depth(Stock("test_it").test_it))
            def test_undeclared(self): sys.exit(5)
            def test_fine(self): self.init(); dist.barrier()
    """
    suites.write(source)
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_skip_code": "skipped",
        "test_skip_text": "skipped",
        "test_skip_raised": "skipped",
        "test_special": "passed",
        "test_special_late": "passed",
        "test_special_missed": "failed",
        "test_unchecked": "passed",
        "test_wrapped_once": "passed",
        "test_undeclared": "failed",
        "test_fine": "passed",
    }, run.output
    assert run.cases["test_skip_code"].message == "Need at least 2 CUDA devices"
    assert run.cases["test_skip_text"].message == "my own reason"
    assert "Expected exit code 7 but got 0" in run.cases["test_special_missed"].text
    assert "Expected exit code 0 but got 5" in run.cases["test_undeclared"].text
    run = suites.pytest("test_it.py", "-k", "skip_text or fine", SANDCASTLE=1)
    assert run.outcomes() == {"test_skip_text": "passed", "test_fine": "passed"}, run.output


def test_failures_and_errors(suites):
    """A failure if every failing rank's exception is an assertion, else an error; the text."""
    suites.write(
        """
        class Test(Spawning):
            world_size = 3

            def helper(self, value):
                self.assertTrue(value)

            def test_failure(self): self.helper(self.rank == 1)
            def test_error(self): {}["no such key"]
            def test_sub(self):
                for i in range(3):
                    with self.subTest("outer"), self.subTest(i=i):
                        self.assertLess(i, 1)
            def test_after(self): pass
            @unittest.expectedFailure
            def test_expected(self): self.fail("as expected")
            def test_died(self):
                if self.rank == 0:
                    os.kill(os.getpid(), 9)
            def test_peer_killed(self):
                if self.rank == 0:
                    raise RuntimeError("rank 0 fails")
                time.sleep(60)
        """
    )
    run = suites.unittest("-v", "test_it")
    text = run.output
    assert "FAILED (failures=2, errors=3, expected failures=1)" in text
    assert "failed on ranks 0, 2 of 3" in text
    assert "ranks 0, 2: AssertionError" in text
    assert "ranks 0, 1, 2: KeyError" in text
    assert "in helper" in text
    assert "in test_failure" in text
    assert "rank 0 died with SIGKILL (exit code -9)" in text
    assert "rank 1 was killed only because a peer failed" in text
    # The test's own lines only: between the two sentences there is no frame of a harness.
    part = text.partition("ranks 0, 1, 2: KeyError")[2].partition("KeyError: ")[0]
    assert "run_test" not in part
    assert "torchcontinuous" not in part
    assert "AssertionError: 1 not less than 1" in text
    assert "in sub-test [outer] (i=1)" in text


def test_setup_and_teardown_that_misbehave(suites):
    """setUp that raises or skips after it has spawned; tearDown(Class) that omits super()."""
    suites.write(
        """
        class Test(Spawning):
            def setUp(self):
                super().setUp()
                if "raises" in self.id():
                    raise ValueError("in setUp")
                if "skips" in self.id():
                    self.skipTest("in setUp")

            def tearDown(self): pass

            @classmethod
            def tearDownClass(cls): pass

            def test_1_raises(self): time.sleep(60)
            def test_2_fine(self): pass
            def test_3_skips(self): time.sleep(60)
            def test_4_fine(self): self.init(); dist.barrier()
        """
    )
    run = suites.pytest("test_it.py")
    assert [c.outcome for c in run.cases.values()] == ["failed", "passed", "skipped", "passed"]
    assert "in setUp" in run.cases["test_1_raises"].text
    suites.assert_nothing_left()


def test_parent_side_attributes_and_overrides(suites):
    suites.write(
        """
        class Attributes(Spawning):
            def setUp(self):
                super().setUp()
                assert self.rank == self.MAIN_PROCESS_RANK
                assert len(self.processes) == len(self.pid_to_pipe) == 2
                for process in self.processes:
                    assert process.is_alive() and process.exitcode is None
                    assert process.pid in self.pid_to_pipe

            def test_alive(self): time.sleep(0.3)

        class Terminated(Spawning):
            def setUp(self):
                super().setUp()
                self.processes[0].terminate()

            def test_terminated(self): time.sleep(20)

        class Codes(Spawning):
            def _check_return_codes(self, fn, elapsed):
                for process in self.processes:
                    self.assertEqual(process.exitcode, 10)
                    self.assertIn("the reason", self.pid_to_pipe[process.pid].recv())

            def test_codes(self): raise ValueError("the reason")

        class Super(Spawning):
            def _check_return_codes(self, fn, elapsed):
                super()._check_return_codes(fn, elapsed)

            def test_super(self): raise ValueError("through stock")

        class Joins(MultiProcessTestCase):
            joined = []

            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def _join_processes(self, fn):
                self.joined.append(self.id())
                super()._join_processes(fn)

        class JoinedByStock(ContinuousMixin, Joins):
            world_size = 2
            def test_joined(self): self.assertEqual(self.rank >= 0, True)
            def test_joined_failing(self): raise ValueError("to stock's join")

            @classmethod
            def tearDownClass(cls):
                super().tearDownClass()
                assert len(set(cls.joined)) == 2, cls.joined

        class ExtraArguments(MultiProcessTestCase):
            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def _spawn_processes(self):
                spawn = torch.multiprocessing.get_context("spawn").Process
                def wrap(*positional, args, **keywords):
                    return spawn(*positional, args=("extra", *args), **keywords)
                self._start_processes(wrap)

            @classmethod
            def _run(cls, extra, rank, test_name, file_name, pipe, **kwargs):
                assert extra == "extra"
                super()._run(rank, test_name, file_name, pipe, **kwargs)

        class LeftToStock(ContinuousMixin, ExtraArguments):
            world_size = 1
            def test_extra(self): pass
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_alive": "passed",
        "test_terminated": "failed",
        "test_codes": "passed",
        "test_super": "failed",
        "test_joined": "passed",
        "test_joined_failing": "failed",
        "test_extra": "passed",
    }, run.output
    assert "through stock" in run.cases["test_super"].text
    assert "to stock's join" in run.cases["test_joined_failing"].text


def test_world_sizes(suites):
    suites.write(
        """
        class Per(MultiProcContinuousTest):
            def setUp(self):
                super().setUp()
                self._spawn_processes()

            @property
            def world_size(self):
                return getattr(getattr(self, self._testMethodName), "_required_world_size", 1)

            def check(self, size):
                store = dist.FileStore(self.file_name, size)
                dist.init_process_group("gloo", rank=self.rank, world_size=size, store=store)
                self.assertEqual(dist.get_world_size(), size)
                dist.barrier()

            def test_1(self): self.check(1)
            def test_2(self): self.check(2)
            test_2._required_world_size = 2
            def test_3(self): self.check(3)
            test_3._required_world_size = 3
            def test_4(self): self.check(2)
            test_4._required_world_size = 2

        class Text(Spawning):
            world_size = "2"
            def test_text(self): pass

        class Nothing(Spawning):
            world_size = 0
            def test_nothing(self): raise ValueError("never run")

        class Default(MultiProcContinuousTest):
            def setUp(self):
                super().setUp()
                self._spawn_processes()
            def test_default(self): self.assertEqual(self.world_size, 4)

        class Negative(Spawning):
            world_size = -3
            def test_negative(self): pass

        class Word(Spawning):
            world_size = "many"
            def test_word(self): pass

        class AllDevices(Spawning):
            world_size = -2
            def test_all(self):
                size = torch.get_device_module(MultiProcContinuousTest.device_type()).device_count()
                dist.init_process_group("gloo", store=dist.FileStore(self.file_name, size),
                                        rank=self.rank, world_size=size)
                dist.barrier()
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_1": "passed",
        "test_2": "passed",
        "test_3": "passed",
        "test_4": "passed",
        "test_text": "passed",
        "test_nothing": "passed",
        "test_default": "passed",
        "test_negative": "failed",
        "test_word": "failed",
        "test_all": "passed",  # A CPU is one device.
    }, run.output
    assert "test_it.Negative.world_size: -3 is not valid" in run.cases["test_negative"].text
    assert "test_it.Word.world_size: 'many' is not valid" in run.cases["test_word"].text


def test_bad_input_is_told_at_once(suites):
    suites.write(
        """
        def make():
            class Local(Spawning):
                def test_local(self): pass
            return Local
        Local = make()

        class Level(Spawning):
            isolation = "thread"
            def test_level(self): pass

        class Shadowed(Spawning):
            def test_shadowed(self): pass
        Kept = Shadowed
        class Shadowed: pass

        class Method(Spawning):
            def test_decorator(self):
                try:
                    isolated("thread")
                except ValueError as error:
                    assert "@isolated: 'thread' is not valid" in str(error)
                else:
                    self.fail("accepted")

        class Backend(MultiProcContinuousTest):
            world_size = 2
            @classmethod
            def backend_str(cls): return "mpi"
            def test_backend(self): pass
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_local": "failed",
        "test_level": "failed",
        "test_shadowed": "failed",
        "test_decorator": "passed",
        "test_backend": "skipped",
    }, run.output
    assert "test_it.make.<locals>.Local" in run.cases["test_local"].text
    assert "defined in a function" in run.cases["test_local"].text
    assert "test_it.Level.isolation: 'thread' is not valid" in run.cases["test_level"].text
    assert "test_it.Shadowed" in run.cases["test_shadowed"].text
    assert (
        run.cases["test_backend"].message == "Backend 'mpi' is not available"
    )  # As in torch's own.
    for name in ("test_local", "test_level", "test_shadowed", "test_backend"):
        assert run.cases[name].seconds < 1
    for variable in ("ISOLATION", "START_METHOD", "STRICT", "START_TIMEOUT"):
        name = f"TORCHCONTINUOUS_{variable}"
        run = suites.pytest("test_it.py", "-k", "decorator", **{name: "nonsense"})
        assert f"{name}: 'nonsense' is not valid" in run.output


def test_classes_of_every_origin(suites):
    """Nested, parametrised, made for device types; in both import modes, and as a script."""
    source = """
        from torch.testing._internal.common_utils import (
            instantiate_parametrized_tests, parametrize)
        from torch.testing._internal.common_device_type import instantiate_device_type_tests

        class Outer:
            class TestInner(Spawning):
                def test_nested(self):
                    self.assertEqual(type(self).__qualname__, "Outer.TestInner")
        TestInner = Outer.TestInner

        class TestParametrised(Spawning):
            @parametrize("value", [1, 2])
            def test_value(self, value): self.assertIn(value, (1, 2))
        instantiate_parametrized_tests(TestParametrised)

        class TestDevices(Spawning):
            def test_device(self, device): self.assertEqual(device, "cpu")
        instantiate_device_type_tests(TestDevices, globals(), only_for="cpu")

        if __name__ == "__main__":
            unittest.main()
    """
    suites.write(source, "sub/test_it.py")
    expected = {"test_nested", "test_value_value_1", "test_value_value_2", "test_device_cpu"}
    for mode in ("prepend", "importlib"):
        run = suites.pytest("sub/test_it.py", f"--import-mode={mode}")
        assert run.outcomes() == dict.fromkeys(expected, "passed"), run.output
    run = suites.python("sub/test_it.py")
    assert "Ran 4 tests" in run.output
    assert run.code == 0, run.output
    run = suites.unittest("discover", "-s", "sub")
    assert "Ran 4 tests" in run.output
    assert run.code == 0, run.output


def test_importlib_mode_with_packages_and_like_names(suites):
    source = """
        from . import helper

        class Test(Spawning):
            def test_helper(self): self.assertEqual(helper.WHO, {name!r})
    """
    for name in ("a", "b"):
        suites.write("", f"{name}/__init__.py", header="")
        suites.write(f"WHO = {name!r}", f"{name}/helper.py", header="")
        suites.write(source.format(name=name), f"{name}/test_same.py")
    run = suites.pytest("a", "b", "--import-mode=importlib")
    assert "2 passed" in run.output, run.output


def test_output_belongs_to_its_test(suites):
    suites.write(
        """
        import ctypes, subprocess

        class Test(Spawning):
            def test_1(self):
                print("printed by", self.rank)
                print("to stderr", file=sys.stderr)
                os.write(1, b"raw\\n")
                subprocess.run(["echo", "from a child"])
                ctypes.CDLL(None).puts(b"from C")
            def test_2(self): print("second")
            def test_3(self):
                # A daemon that holds our pipes open.
                subprocess.Popen(["sleep", "30"], start_new_session=True)
            def test_4(self): print("fourth")
            def test_5_binary(self): os.write(1, b"\\xff\\x00\\n")
        """
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}, run.output
    out = run.cases["test_1"].stdout
    for rank in (0, 1):
        assert f"[rank {rank}] printed by {rank}" in out
        for text in ("raw", "from a child", "from C"):
            assert f"[rank {rank}] {text}" in out
        assert f"[rank {rank}] to stderr" in run.cases["test_1"].stderr
    assert run.cases["test_2"].stdout.count("second") == 2
    assert "fourth" in run.cases["test_4"].stdout
    assert "printed" not in run.cases["test_2"].stdout
    assert max(case.seconds for case in run.cases.values()) < 20
    suites.assert_nothing_left()
    # unittest's own buffering holds it as well: nothing of a passing test is shown.
    run = suites.unittest("-b", "test_it.Test.test_1", "test_it.Test.test_2")
    assert "printed by" not in run.output
    assert "OK" in run.output


def test_a_gigabyte_of_output(suites):
    suites.write(
        """
        class Test(Spawning):
            world_size = 1

            def test_much(self):
                line = b"x" * 1023 + b"\\n"
                os.write(1, b"the head\\n")
                for _ in range(1024):
                    view = memoryview(line * 1024)
                    while view:
                        view = view[os.write(1, view):]
                os.write(1, b"the tail\\n")

        def tearDownModule():
            # (getrusage's would count what the process that started this one once had.)
            status = open("/proc/self/status").read()
            print("peak MB", int(status.partition("VmHWM:")[2].split()[0]) // 1024)
        """
    )
    run = suites.pytest("test_it.py", "-s")
    assert "1 passed" in run.output, run.output[-3000:]
    assert "the head" in run.output
    assert "the tail" in run.output
    assert "bytes cut" in run.output
    peak = int(run.output.partition("peak MB ")[2].split()[0])
    assert peak < 900  # torch alone takes 350.


def test_class_style(suites):
    suites.write(
        """
        class Test(MultiProcContinuousTest):
            world_size = 2

            def test_1(self):
                tensor = torch.ones(1)
                dist.all_reduce(tensor)
                self.assertEqual(tensor.item(), 2)
                self.assertEqual(type(self.world_size), int)
                # (Kept where the state guard does not look.)
                torch.tc_kept = id(dist.group.WORLD)

            def test_2(self):
                # The group was made once.
                self.assertEqual(torch.tc_kept, id(dist.group.WORLD))
                self.assertIs(self.pg, dist.group.WORLD)
                dist.barrier()

            def test_3_any_death_fails(self):
                if self.rank == 1:
                    os._exit(3)

            def test_4(self): dist.barrier()

        class Skipped(MultiProcContinuousTest):
            world_size = 2
            @classmethod
            def _init_pg(cls, rank, world_size, rdvz_file):
                sys.exit(75)
            def test_5(self): pass
            def test_6(self): pass
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {
        "test_1": "passed",
        "test_2": "passed",
        "test_3_any_death_fails": "failed",
        "test_4": "passed",
        "test_5": "skipped",
        "test_6": "skipped",
    }, run.output
    suites.assert_nothing_left()


def test_fixtures_of_pytest_reach_both_attempts(suites):
    """A re-run's instance has what fixtures put on the first; the environment as well."""
    suites.write(
        """
        import pytest

        @pytest.fixture
        def value(request, monkeypatch):
            request.instance.value = 7
            monkeypatch.setenv("TC_FROM_FIXTURE", "7")

        @pytest.mark.usefixtures("value")
        class Test(Spawning):
            def setUp(self):
                assert self.value == 7
                super().setUp()
            def test_1(self): torch.tc_ran = True
            def test_2(self):
                self.assertEqual(os.environ["TC_FROM_FIXTURE"], "7")
                self.assertFalse(hasattr(torch, "tc_ran"))
        """
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {"test_1": "passed", "test_2": "passed"}, run.output
    assert "StateLeakWarning" in run.output


@pytest.mark.parametrize("strict", [False, True])
def test_leak(suites, strict):
    """Fails in a used worker, passes in a fresh one: a pass with a warning, or a failure."""
    suites.write(
        """
        LOG = os.environ["TC_LOG"]

        class Test(Spawning):
            def setUp(self):
                with open(LOG, "a") as f: f.write(f"setUp {self._testMethodName}\\n")
                super().setUp()

            def tearDown(self):
                with open(LOG, "a") as f: f.write(f"tearDown {self._testMethodName}\\n")
                super().tearDown()

            def test_1_leaves(self): torch.tc_left = os.getpid()
            def test_2_suffers(self): self.assertFalse(hasattr(torch, "tc_left"))
            def test_3_fresh_now(self): self.assertFalse(hasattr(torch, "tc_left"))
            def test_4_fails(self): self.fail("anyway")
        """
    )
    log = suites.folder / "log"
    strict_env = {"TORCHCONTINUOUS_STRICT": "1"} if strict else {}
    run = suites.pytest("test_it.py", TC_LOG=log, **strict_env)
    assert run.outcomes() == {
        "test_1_leaves": "passed",
        "test_2_suffers": "failed" if strict else "passed",
        "test_3_fresh_now": "passed",
        "test_4_fails": "failed",
    }, run.output
    where = run.cases["test_2_suffers"].text if strict else run.output
    assert "test_2_suffers failed in used workers and passed in fresh ones" in where
    assert "These ran there before: test_1_leaves" in where
    # The whole test ran again: tearDown, then setUp.
    lines = [line for line in log.read_text().splitlines() if "test_2" in line]
    assert lines == ["setUp test_2_suffers", "tearDown test_2_suffers"] * 2
    # The class went on at level "process": a failure there is not run again.
    assert log.read_text().count("setUp test_4_fails") == 1


def test_failure_in_a_used_worker_is_reported_once(suites):
    suites.write(
        """
        class Test(Spawning):
            def test_1(self): pass
            def test_2(self): self.fail(f"in {os.getpid()}")
            def test_3(self): pass
        """
    )
    run = suites.unittest("-v", "test_it")
    assert "Ran 3 tests" in run.output
    assert "FAILED (failures=1)" in run.output
    assert "StateLeakWarning" not in run.output


def test_isolation_levels(suites):
    source = """
        def note(test):
            if test.rank == 0:
                with open(os.environ["TC_LOG"], "a") as file:
                    print(type(test).__name__, os.getpid(), file=file)

        class Shared(Spawning):
            def test_1(self): note(self)
            def test_2(self): note(self)
            @isolated("process")
            def test_3(self): note(self)
            def test_4(self): note(self)

        class Fresh(Spawning):
            isolation = "process"
            def test_1(self): note(self)
            def test_2(self): note(self)
    """
    suites.write(source)

    def workers(**environ):
        log = suites.folder / "log"
        log.unlink(missing_ok=True)
        run = suites.unittest("test_it", TC_LOG=log, **environ)
        assert run.code == 0, run.output
        pids: dict[str, list[str]] = {}
        for line in log.read_text().splitlines():
            name, pid = line.split()
            pids.setdefault(name, []).append(pid)
        return pids

    pids = workers()
    first, second, isolated, last = pids["Shared"]
    assert first == second
    assert isolated not in (first, last)
    assert len(set(pids["Fresh"])) == 2
    pids = workers(TORCHCONTINUOUS_ISOLATION="process")
    assert len(set(pids["Shared"])) == 4


def test_rpc_uses_workers_up(suites):
    suites.write(
        """
        import torch.distributed.rpc as rpc

        class Test(Spawning):
            def setUp(self):
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                super().setUp()
            def test_1(self): torch.tc_used = True
            def test_2(self):
                self.assertTrue(torch.tc_used)
                options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}")
                rpc.init_rpc(f"w{self.rank}", rank=self.rank, world_size=2,
                             rpc_backend_options=options)
                self.assertEqual(rpc.rpc_sync(f"w{1 - self.rank}", abs, args=(-3,)), 3)
                rpc.shutdown()
            def test_3(self): self.assertFalse(hasattr(torch, "tc_used"))
        """
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}, run.output
    assert "StateLeakWarning" not in run.output


def test_a_subclass_has_workers_of_its_own(suites):
    suites.write(
        """
        class Parent(Spawning):
            pids = []
            def test_1(self): print("worker", type(self).__name__, self.rank, os.getpid())

        class Child(Parent):
            world_size = 3
        """
    )
    run = suites.unittest("test_it")
    lines = {tuple(x.split()[3:]) for x in run.output.splitlines() if "] worker" in x}
    assert len(lines) == 5, run.output
    assert len({line[-1] for line in lines}) == 5


def test_classes_that_run_in_the_parent_are_left_alone(suites):
    suites.write(
        """
        class Test(MultiProcContinuousTest):
            def test_nothing_spawned(self): pass
            @property
            def world_size(self): return 0

        class Plain(ContinuousMixin, MultiProcessTestCase):
            def test_plain(self): raise ValueError("not run: stock spawns nothing, and passes")
        """
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}, run.output


def test_unspawned_results_are_json():
    # The data that the conformance run compares with is whole.
    from test.conformance import HERE, SUITES

    counts = {
        suite: len(json.loads((HERE / "data" / name).read_text())["tests"])
        for suite, (_, name) in SUITES.items()
    }
    assert counts == {"distributed": 285, "rpc": 436}


def test_compile_caches_per_rank(suites):
    suites.write(
        """
        from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
        shared = cache_dir()

        class TestShared(Spawning):
            def test_1_shared(self):
                self.assertEqual(cache_dir(), shared)

        class TestOwn(Spawning):
            compile_cache_per_rank = True
            def look(self):
                own = os.path.join(shared, f"rank{self.rank}")
                self.assertEqual(cache_dir(), own)
                self.assertTrue(triton_cache_dir(0).startswith(own + os.sep))
            test_2_own = test_3_own_again = look
        """
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}, run.output
    assert len(run.cases) == 3
    assert "StateLeakWarning" not in run.output
