"""What goes wrong while a suite runs: time-outs, deaths, the nursery; nothing hangs or poisons."""

import time

import pytest


def test_a_time_out_shows_where_each_rank_was(suites):
    """Also of a rank that is blocked in a C++ collective."""
    suites.write(
        """
        class Test(Spawning):
            world_size = 3

            def in_collective(self):
                dist.all_reduce(torch.ones(1))

            def in_python(self):
                while True:
                    pass

            def test_1(self): pass
            def test_2_hangs(self):
                self.init()
                if self.rank == 1:
                    self.in_python()
                self.in_collective()
            def test_3(self): self.init(); dist.barrier()
        """
    )
    run = suites.pytest("test_it.py", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=2)
    assert list(run.outcomes().values()) == ["passed", "failed", "passed"], run.output
    text = run.cases["test_2_hangs"].text
    for rank in (0, 1, 2):
        assert f"Process {rank} terminated or timed out after" in text
    summary = next(line for line in text.splitlines() if "Where the ranks were" in line)
    assert "ranks 0, 2 waited in all_reduce (test_it.py:" in summary
    assert "in in_python." in summary
    stacks = text.replace(summary, "")
    assert stacks.count("in all_reduce") == 2
    assert stacks.count("in in_collective") == 2
    assert stacks.count("in in_python") == 1
    suites.assert_nothing_left()


def test_a_stopped_rank_is_named_as_not_answering(suites):
    suites.write(
        """
        import signal

        class Test(Spawning):
            def test_1_stops(self):
                if self.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
            def test_2(self): self.init(); dist.barrier()
        """
    )
    run = suites.pytest("test_it.py", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=2)
    assert list(run.outcomes().values()) == ["failed", "passed"], run.output
    assert "the rank did not answer" in run.cases["test_1_stops"].text
    suites.assert_nothing_left()


def test_a_hanging_exit_is_a_time_out_at_process_level(suites):
    suites.write(
        """
        import threading

        class Test(Spawning):
            isolation = "process"
            def test_1_hangs(self):
                threading.Thread(target=time.sleep, args=(999,)).start()
            def test_2(self): pass
        """
    )
    run = suites.pytest("test_it.py", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=2)
    assert list(run.outcomes().values()) == ["failed", "passed"], run.output
    assert "timed out" in run.cases["test_1_hangs"].text
    suites.assert_nothing_left()


def test_ranks_that_disagree(suites):
    source = """
        class Test(Spawning):
            def test_1_skip(self):
                if self.rank == 0:
                    self.skipTest("only here")
            def test_2_dies(self):
                if self.rank == 1:
                    os._exit(4)
    """
    suites.write(source)
    run = suites.pytest("test_it.py")
    assert list(run.outcomes().values()) == ["skipped", "passed"], run.output
    assert "rank 0 skipped, rank 1 did not" in run.output
    assert "rank 1 died with exit code 4, unseen by stock" in run.output
    run = suites.pytest("test_it.py", TORCHCONTINUOUS_STRICT=1)
    assert list(run.outcomes().values()) == ["failed", "failed"], run.output


def test_the_nursery_dies_under_a_test(suites):
    """The generation is given up and the test runs again, without a leak warning."""
    suites.write(
        """
        import signal

        class Test(Spawning):
            def test_1(self): pass
            def test_2(self):
                flag = os.environ["TC_FLAG"]
                if self.rank == 0 and not os.path.exists(flag):
                    open(flag, "w").close()
                    os.kill(os.getppid(), signal.SIGKILL)
                    time.sleep(20)
            def test_3(self): pass
            def test_4(self):
                if self.rank == 0:
                    os.kill(os.getppid(), signal.SIGKILL)
                    time.sleep(20)
            def test_5(self): pass
        """
    )
    run = suites.pytest("test_it.py", TC_FLAG=suites.folder / "flag")
    outcomes = ["passed", "passed", "passed", "failed", "passed"]
    assert list(run.outcomes().values()) == outcomes, run.output
    assert "StateLeakWarning" not in run.output
    assert "the nursery died" in run.cases["test_4"].text
    suites.assert_nothing_left()


def test_signals_and_handlers_of_one_test_do_not_stop_the_next(suites):
    """A test that ignores every signal is still ended; so is what it leaves running."""
    suites.write(
        """
        import signal, subprocess

        class Test(Spawning):
            def test_1(self):
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                subprocess.Popen(["sleep", "300"])
                self.fail("so that the workers are replaced")
            def test_2(self): pass
        """
    )
    run = suites.pytest("test_it.py")
    assert list(run.outcomes().values()) == ["failed", "passed"], run.output
    suites.assert_nothing_left()


def test_start_method_spawn_gives_the_same(suites):
    suites.write(
        """
        class Test(Spawning):
            def test_1(self): self.init(); dist.barrier(); print("said by", self.rank)
            def test_2(self): self.fail("fails")
            def test_3(self): self.skipTest("why")
            @isolated("process")
            def test_4(self): pass
        """
    )
    run = suites.pytest("test_it.py", TORCHCONTINUOUS_START_METHOD="spawn")
    assert list(run.outcomes().values()) == ["passed", "failed", "skipped", "passed"], run.output
    assert "[rank 1] said by 1" in run.cases["test_1"].stdout
    assert run.cases["test_3"].message == "why"
    suites.assert_nothing_left()


def test_a_torch_without_a_name_that_is_needed(suites):
    code = (
        "import torch.testing._internal.common_distributed as stock\n"
        "del stock.MultiProcessTestCase\n"
        "import torchcontinuous\n"
        "try: torchcontinuous.MultiProcContinuousTest\n"
        "except ImportError as error: print(error)\n"
    )
    run = suites.python("-c", code)
    assert "has no torch.testing._internal.common_distributed.MultiProcessTestCase" in run.output
    assert "torchcontinuous needs torch 2.6 or newer" in run.output


def test_no_gloo_in_the_build(suites):
    suites.write(
        """
        dist.is_backend_available = lambda name: False

        class Test(MultiProcContinuousTest):
            world_size = 2
            def test_gloo(self): pass
        """
    )
    began = time.monotonic()
    run = suites.pytest("test_it.py")
    assert time.monotonic() - began < 60
    assert "needs the backend 'gloo', which this build of torch lacks" in run.output
    assert "test_it.Test" in run.cases["test_gloo"].text


def test_where_the_peers_of_a_failed_rank_were(suites):
    suites.write(
        """
        class Test(Spawning):
            def test_fails(self):
                self.init()
                if self.rank == 1:
                    self.fail("on purpose")
                dist.all_reduce(torch.ones(1))
        """
    )
    run = suites.pytest("test_it.py")
    text = run.cases["test_fails"].text
    peer = "was killed only because a peer failed, when it waited in all_reduce (test_it.py:"
    assert f"rank 0 {peer}" in text, run.output
    assert "in test_fails" in text.split(peer, 1)[1]
    suites.assert_nothing_left()


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_a_signal_tells_where_the_ranks_are(suites, runner):
    suites.write(
        """
        import signal

        class Test(Spawning):
            def test_1(self):
                self.init()
                if self.rank == 1:
                    time.sleep(1)
                    pid = int(os.environ["TC_PARENT"])
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(3)
                dist.all_reduce(torch.ones(1))
            def setUp(self):
                os.environ["TC_PARENT"] = str(os.getpid())
                super().setUp()
        """
    )
    arguments = ["test_it"]
    if runner == "pytest":
        arguments = ["-p", "torchcontinuous.pytest_plugin", "test_it.py"]
    run = suites.python("-m", runner, *arguments)
    assert run.code == 0, run.output
    assert "Test.test_1 has run for" in run.output
    assert "rank 1 at test_it.py:" in run.output
    assert "waited in all_reduce (test_it.py:" in run.output
    assert "s after it was last heard of" in run.output
    suites.assert_nothing_left()
