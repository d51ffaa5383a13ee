"""However a run ends, nothing stays: no worker, no nursery, no temporary file."""

import os
import signal
import socket
import subprocess
import time

import pytest

from test.conftest import marked_processes
from torchcontinuous import _nursery

SUITE = """
    import multiprocessing, subprocess

    class Test(Spawning):
        def test_1(self): self.init(); dist.barrier()
        def test_2(self):
            subprocess.Popen(["sleep", "300"])  # A child that a killed worker leaves.
            self.init()
            open(os.environ["TC_READY"] + str(self.rank), "w").close()
            time.sleep(60)
        def test_3(self): pass
"""


def start(suites, *arguments, **environ):
    suites.write(SUITE)
    ready = suites.folder / "ready"
    process = suites.start(
        *(arguments or ("-m", "unittest", "-v", "test_it")), TC_READY=ready, **environ
    )
    deadline = time.monotonic() + 60
    while not all((suites.folder / f"ready{rank}").exists() for rank in (0, 1)):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_parent_is_killed_during_a_test(suites, number, method):
    process = start(suites, TORCHCONTINUOUS_START_METHOD=method)
    process.send_signal(number)
    process.communicate(timeout=10)

    def left():
        # Spawned workers end, but nothing is there to end what a test had started.
        found = marked_processes(suites.mark)
        return [p for p in found if method == "fork" or p.name() != "sleep"]

    deadline = time.monotonic() + 3
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left() == []
    assert [file for file in suites.temp.iterdir() if "torchcontinuous" in file.name] == []


def test_a_nursery_whose_parent_ended_before_it_began_ends_at_once(suites):
    """Not only when it has imported torch, seconds later."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        ended = subprocess.run(
            _nursery.command_line(theirs.fileno(), (), ()),
            env=suites.environment(PYTHONPROFILEIMPORTTIME=1),
            pass_fds=[theirs.fileno()],
            cwd=suites.folder,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "torchcontinuous._nursery" in imported
    assert not any(name.startswith("torch.") for name in imported)


def test_the_parent_is_killed_while_the_nursery_starts(suites):
    suites.write(SUITE)
    for delay in (0.1, 0.5, 1.0, 1.5):
        process = suites.start("-m", "unittest", "test_it", TC_READY="/nonexistent/x")
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=10)
        suites.assert_nothing_left(within=3)


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_ctrl_c_stops_the_run_at_once(suites, runner):
    arguments = {
        "unittest": ("-m", "unittest", "-v", "test_it"),
        "pytest": ("-m", "pytest", "-p", "no:cacheprovider", "test_it.py"),
    }
    process = start(suites, *arguments[runner])
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert time.monotonic() - began < 10
    assert "KeyboardInterrupt" in output
    assert process.returncode != 0
    assert "test_3" not in output.replace("ready", "")
    suites.assert_nothing_left()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('at the end')", 1),
        ("os._exit(4)", 4),
        ("pass", 0),
    ],
)
def test_the_parent_ends_with_a_pool_alive(suites, ending, code):
    suites.write(
        f"""
        class Test(Spawning):
            def test_1(self): print("ran", self.rank)

        if __name__ == "__main__":
            Test("test_1").run()  # No runner: nobody ends the class.
            {ending}
        """
    )
    run = suites.python("test_it.py")
    assert run.code == code, run.output
    assert "[rank 1] ran 1" in run.output
    if ending.startswith("os._exit"):
        time.sleep(2)
        assert marked_processes(suites.mark) == []
    else:
        suites.assert_nothing_left()


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_workers_end_with_their_class(suites, runner):
    suites.write(
        """
        import psutil

        class TestA(Spawning):
            def test_1(self): pass

            @classmethod
            def tearDownClass(cls): pass  # Without super().

        class TestB(MultiProcContinuousTest):
            world_size = 0
            def test_2(self): pass
            def setUp(self):
                # A nursery and a template, no worker.
                assert len(psutil.Process().children(recursive=True)) == 2
                super().setUp()
        """
    )
    run = suites.unittest("test_it") if runner == "unittest" else suites.pytest("test_it.py")
    assert run.code == 0, run.output


def test_imported_and_never_used(suites):
    """The nursery that was started early ends with its parent, at once."""
    began = time.monotonic()
    run = suites.python("-c", "from torchcontinuous import MultiProcContinuousTest; print('x')")
    assert run.output == "x\n"
    assert time.monotonic() - began < 60
    suites.assert_nothing_left()


def test_a_fork_of_the_parent_leaves_the_workers_alone(suites):
    suites.write(
        """
        class Test(Spawning):
            def setUp(self):
                super().setUp()
                pid = os.fork()
                if pid == 0:
                    import atexit
                    atexit._run_exitfuncs()  # Those of the parent's pools, if it could.
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0

            def test_1(self): self.init(); dist.barrier()
            def test_2(self): self.init(); dist.barrier()

        class Style(MultiProcContinuousTest):
            world_size = 2
            @classmethod
            def backend_str(cls): return "gloo"
            def setUp(self):
                super().setUp()
                pid = os.fork()
                if pid == 0:
                    import atexit
                    atexit._run_exitfuncs()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            def test_3(self): dist.barrier(); self.assertTrue(os.path.exists(self.rdvz_file))
            def test_4(self): dist.barrier(); self.assertTrue(os.path.exists(self.rdvz_file))
        """
    )
    run = suites.pytest("test_it.py", "-p", "no:faulthandler")
    assert list(run.outcomes().values()).count("passed") == 4, run.output
    suites.assert_nothing_left()


def test_descriptors_threads_and_processes_stay_flat(suites):
    suites.write(
        """
        import psutil

        class Test(Spawning):
            def setUp(self):
                me = psutil.Process()
                seen = (me.num_fds(), me.num_threads(), len(me.children(recursive=True)))
                print("SEEN", *seen)
                super().setUp()
            def check(self): self.init(); dist.barrier()

        for _number in range(40):
            def _test(self): self.check()
            setattr(Test, f"test_{_number:02}", _test)
        """
    )
    run = suites.unittest("test_it")
    assert run.code == 0, run.output
    seen = [line.split()[1:] for line in run.output.splitlines() if "SEEN" in line]
    assert len(seen) == 40
    assert seen[5:20] == seen[25:]
    suites.assert_nothing_left()


def test_environment_is_not_left_in_place():
    assert not any(name.startswith("TORCHCONTINUOUS_") for name in os.environ)
