"""Suites that took the harness for something else than stock once: each was a fault here."""

COMMON = """
import threading, tempfile, multiprocessing

def decorated(fn):
    import functools
    @functools.wraps(fn)
    def wrapper(self): return fn(self)
    return wrapper
"""


def test_joins_starts_and_runs_of_a_class_s_own(suites):
    suites.write(
        COMMON
        + """
class JoinOwn(Spawning):
    def _join_processes(self, fn):
        for process in self.processes:
            process.join()
        self._check_return_codes(fn, 0)
    def test_join_own(self): pass

class JoinExit(Spawning):
    def _join_processes(self, fn):
        end = time.time() + 20
        while not all(p.exitcode is not None for p in self.processes):
            if time.time() > end: raise RuntimeError("no exit code in 20 s")
            time.sleep(0.05)
        self._check_return_codes(fn, 0)
    def test_join_exit(self): print("heard of", self.rank)
    def test_join_exit_fails(self): raise ValueError("seen")

class AliveBase(MultiProcessTestCase):
    world_size = 2
    def _join_processes(self, fn):
        end = time.time() + 20
        while any(p.is_alive() for p in self.processes):
            if time.time() > end: raise RuntimeError("alive after 20 s")
            time.sleep(0.05)
        super()._join_processes(fn)

class JoinAlive(ContinuousMixin, AliveBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_join_alive(self): pass

class OwnStart(MultiProcContinuousTest):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def _start_processes(self, proc):
        self.processes = []
        for rank in range(2):
            ours, theirs = torch.multiprocessing.Pipe()
            args = (rank, self._current_test_name(), self.file_name, theirs)
            process = proc(target=type(self)._run, args=args)
            process.start()
            self.pid_to_pipe[process.pid] = ours
            self.processes.append(process)
    def test_own_start(self): raise RuntimeError("must be seen")

class ForkContext(MultiProcContinuousTest):
    world_size = 2
    DATA = None
    def setUp(self):
        super().setUp()
        type(self).DATA = 42
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
    def test_fork_context(self): self.assertEqual(self.DATA, 42)

class StaticRun(Spawning):
    @staticmethod
    def _run(rank, test_name, file_name, pipe, **kw):
        test = StaticRun(test_name)
        test.rank, test.file_name = rank, file_name
        test.run_test(test_name, pipe)
    def test_static(self): pass

class Terminated(Spawning):
    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {self.test_terminate.__wrapped__: -15}
    def _join_processes(self, fn):
        time.sleep(1)
        for process in self.processes:
            process.terminate()
        super()._join_processes(fn)
    @decorated
    def test_terminate(self): time.sleep(60)

class Message(Spawning):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kw):
        pipe.send({"rank": rank})
        super()._run(rank, test_name, file_name, pipe, **kw)
    def _check_return_codes(self, fn, elapsed):
        got = [self.pid_to_pipe[p.pid].recv() for p in self.processes]
        self.assertEqual(got, [{"rank": 0}, {"rank": 1}])
        super()._check_return_codes(fn, elapsed)
    def test_message(self): pass
"""
    )
    run = suites.pytest("test_it.py")
    failing = {"test_join_exit_fails", "test_own_start"}
    assert {n for n, o in run.outcomes().items() if o != "passed"} == failing, run.output
    assert len(run.outcomes()) == 9
    assert "heard of 1" in run.cases["test_join_exit"].stdout
    suites.assert_nothing_left()


def test_what_a_worker_does_to_its_process(suites):
    suites.write(
        COMMON
        + """
class Forks(Spawning):
    def wait(self, pid):
        end = time.time() + 15
        while time.time() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended: return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.fail("the fork did not end")
    def test_fork_exits(self):
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        self.assertEqual(self.wait(pid), 3)
    def test_fork_then_failure(self):
        # The fork's end is not the rank's report.
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        self.wait(pid)
        raise RuntimeError("genuine failure")
    def test_fork_raises(self):
        pid = os.fork()
        if pid == 0:
            raise ValueError("in the fork")
        self.assertEqual(self.wait(pid), 10)

class Session(Spawning):
    def test_setsid(self): os.setsid()
    def test_identity(self):
        identity = multiprocessing.current_process()._identity
        self.assertEqual(identity, (self.rank + 1,))

class HiddenDeath(Spawning):
    def test_1_leaves_a_bomb(self):
        def explode():
            time.sleep(0.6)
            os._exit(0)
        threading.Thread(target=explode, daemon=True).start()
    def test_2_genuine(self):
        # Exit code 0 of rank 0 would pass.
        time.sleep(1.5)
        raise RuntimeError("genuine failure")
"""
    )
    run = suites.pytest("test_it.py")
    failing = {"test_fork_then_failure", "test_2_genuine"}
    assert {n for n, o in run.outcomes().items() if o != "passed"} == failing, run.output
    assert len(run.outcomes()) == 7
    suites.assert_nothing_left()


def test_what_a_module_takes_from_its_process_on_import(suites):
    suites.write(
        COMMON
        + """
CONFIG = {k: v for k, v in os.environ.items() if k.startswith("TC_MODE")}
HERE = os.getcwd()
OUT = sys.stdout

class Environment(Spawning):
    def setUp(self):
        os.environ["TC_MODE"] = self._testMethodName
        super().setUp()
    def test_a(self): self.assertEqual(CONFIG["TC_MODE"], "test_a")
    def test_b(self): self.assertEqual(CONFIG["TC_MODE"], "test_b")

class Folder(Spawning):
    def setUp(self):
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        self.addCleanup(os.rmdir, folder)
        self.addCleanup(os.chdir, os.path.dirname(os.path.abspath(__file__)))
        super().setUp()
    def test_c(self): self.assertEqual(HERE, os.getcwd())
    def test_d(self): self.assertEqual(HERE, os.getcwd())

class Stream(Spawning):
    def test_stream(self):
        print("through the module", file=OUT)
        print("through sys")
"""
    )
    run = suites.pytest("test_it.py")
    assert set(run.outcomes().values()) == {"passed"}, run.output
    assert "StateLeakWarning" not in run.output
    lines = run.cases["test_stream"].stdout.splitlines()
    assert lines.count("[rank 0] through the module") == 1
    suites.assert_nothing_left()


def test_a_file_of_the_user_s_own_is_kept(suites):
    suites.write(
        COMMON
        + """
class SharedFile(MultiProcContinuousTest):
    world_size = 2
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        descriptor, cls.shared = tempfile.mkstemp()
        os.write(descriptor, b"fixture")
        os.close(descriptor)
    def setUp(self):
        super().setUp()
        os.unlink(self.file_name)
        self.file_name = self.shared
        self._spawn_processes()
    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        os.unlink(cls.shared)
    def test_a(self): self.assertEqual(open(self.file_name).read(), "fixture")
    def test_b(self): self.assertEqual(open(self.file_name).read(), "fixture")
"""
    )
    run = suites.unittest("test_it")
    assert run.code == 0, run.output
    suites.assert_nothing_left()


def test_a_second_attempt_that_gets_no_verdict_does_not_hide_the_first(suites):
    suites.write(
        COMMON
        + """
MARKS = os.environ["TC_MARKS"]

class Skips(Spawning):
    def setUp(self):
        mark = os.path.join(MARKS, self._testMethodName)
        if os.path.exists(mark):
            self.skipTest("resource used")
        open(mark, "w").close()
        super().setUp()
    def test_a(self): pass
    def test_b(self): raise RuntimeError("genuine failure")

class Raises(Spawning):
    def setUp(self):
        os.mkdir(os.path.join(MARKS, self._testMethodName))
        super().setUp()
    def test_c(self): pass
    def test_d(self): raise RuntimeError("genuine failure")
"""
    )
    marks = suites.folder / "marks"
    marks.mkdir()
    run = suites.pytest("test_it.py", TC_MARKS=marks)
    assert run.outcomes() == {
        "test_a": "passed",
        "test_b": "failed",
        "test_c": "passed",
        "test_d": "failed",
    }, run.output
    for name in ("test_b", "test_d"):
        assert "genuine failure" in run.cases[name].text
