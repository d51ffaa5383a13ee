"""Supervision in memory: generations whose ranks are scripts in threads, no process started."""

import os
import threading
import time
from multiprocessing import Pipe

import pytest

from torchcontinuous import _pool
from torchcontinuous._channel import Channel
from torchcontinuous._generation import Job
from torchcontinuous._launcher import Crew, Member
from torchcontinuous._messages import ClassReference, Exit, Finished, Run, Started
from torchcontinuous._output import Capture
from torchcontinuous._pool import TRANSITIONS, Codes, Pool, State
from torchcontinuous._report import Ending, Failure, RankReport

FAILURE = Failure("ValueError", "x", "Traceback", False)


class FakeProcess:
    """A process whose end is the closing of a pipe."""

    lost = False

    def __init__(self, pid):
        self.pid = pid
        self.sentinel, self._alive = os.pipe()
        self.code = None
        self.killed = False
        self._lock = threading.Lock()

    def end(self, code):
        with self._lock:
            if self._alive is not None:
                self.code = code
                os.close(self._alive)
                self._alive = None

    def exit_code(self):
        return self.code

    def kill(self):
        self.killed = True
        self.end(-9)

    def terminate(self):
        self.end(-15)

    def dump_stacks(self):
        return False

    def close(self):
        self.end(-9)
        os.close(self.sentinel)


class Rank:
    """The worker's side: runs ``script(rank, run)`` for each test, in a thread."""

    def __init__(self, number, rank, script):
        ours, theirs = Pipe()
        self.number, self.rank, self.script = number, rank, script
        self.channel = Channel(theirs)
        self.process = FakeProcess(1000 * number + rank)
        self.output = Capture()
        self.member = Member(
            rank, self.process, Channel(ours, 1.0), self.output, Capture(), Capture()
        )
        self.exits = []
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        try:
            self.channel.send(Started(self.number, self.rank))
            while True:
                command = self.channel.receive(float("inf"))
                if isinstance(command, Exit):
                    self.exits.append(command)
                    return self.process.end(0)
                assert isinstance(command, Run)
                self.script(self, command)
        except Exception:
            return

    def report(self, command, code=0, **rest):
        report = RankReport(self.rank, Ending.REPORTED, code, **rest)
        self.channel.send(Finished(command.generation, command.sequence, report))


class Launcher:
    def __init__(self, script):
        self.script = script
        self.generations = []
        self.fits = True

    def launch(self, number, world_size, module, context):
        ranks = [Rank(number, rank, self.script) for rank in range(world_size)]
        self.generations.append(ranks)
        return Crew([r.member for r in ranks], lambda environ: self.fits)


def job(name="test_x", **rest):
    return Job(ClassReference("m", "m.py", "C"), name, "file", rest.pop("world_size", 2), **rest)


def make(script):
    launcher = Launcher(script)
    return launcher, Pool(launcher)


def run(pool, the_job, timeout=5.0, codes=None):
    return pool.collect(pool.dispatch(the_job), timeout, codes or Codes(skips=frozenset({86})))


def codes_of(ticket):
    return [r.exit_code for r in ticket.reports]


def passing(rank, command):
    rank.report(command)


def test_workers_are_reused_and_end_with_the_class():
    launcher, pool = make(passing)
    first, second = run(pool, job("test_1")), run(pool, job("test_2"))
    assert first.pids == second.pids
    assert (first.ran_before, second.ran_before) == ((), ("test_1",))
    assert pool.state is State.IDLE
    pool.close()
    assert pool.state is State.CLOSED
    assert all(len(r.exits) == 1 and not r.process.killed for r in launcher.generations[0])
    pool.close()  # Harmless.


def test_transition_table():
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.CLOSED] == frozenset()  # Absorbing.
    _, pool = make(passing)
    with pytest.raises(RuntimeError, match="EMPTY to BUSY"):
        pool._move(State.BUSY)
    pool.close()
    with pytest.raises(RuntimeError, match="CLOSED"):
        pool.dispatch(job())


def test_each_test_at_process_level_has_fresh_workers():
    launcher, pool = make(passing)
    run(pool, job(level="process"))
    run(pool, job(level="process"))
    assert len(launcher.generations) == 2
    assert pool.state is State.EMPTY
    pool.close()


def test_fresh_workers_exit_codes_count():
    def dies_at_exit(rank, command):
        rank.report(command)
        rank.channel.receive(float("inf"))
        rank.process.end(-6 if rank.rank == 0 else 0)

    _, pool = make(dies_at_exit)
    ticket = run(pool, job(level="process"))
    assert codes_of(ticket) == [-6, 0]
    assert ticket.reports[0].ending is Ending.DIED
    # And at level "none" where the death is declared.
    _, pool = make(dies_at_exit)
    assert codes_of(run(pool, job(), codes=Codes(expected=-6))) == [-6, 0]
    pool.close()


def test_a_failure_replaces_the_generation():
    def failing(rank, command):
        rank.report(command, 10, failure=FAILURE, used_up="failed")

    launcher, pool = make(failing)
    assert codes_of(run(pool, job())) == [10, 10]
    launcher.script = passing
    assert codes_of(run(pool, job())) == [0, 0]
    assert len(launcher.generations) == 2
    assert all(r.exits for r in launcher.generations[0])  # Told to exit, not killed.
    pool.close()


def test_peers_of_a_failed_rank_get_a_short_grace(monkeypatch):
    monkeypatch.setattr(_pool, "PEER_GRACE_SECONDS", 0.2)

    def one_fails(rank, command):
        if rank.rank == 0:
            rank.report(command, 10, failure=FAILURE, used_up="failed")
        elif rank.rank == 1:
            time.sleep(0.05)
            rank.report(command, 10, failure=FAILURE, used_up="failed")

    _, pool = make(one_fails)
    ticket = run(pool, job(world_size=3), timeout=60)
    assert codes_of(ticket) == [10, 10, None]
    assert ticket.reports[2].ending is Ending.KILLED
    assert ticket.elapsed < 10
    pool.close()


def test_failed_ranks_end_so_that_peers_see_it():
    """A peer that waits for a failed rank gets its own error, as on stock, at once."""
    launcher, pool = make(lambda rank, command: chain(rank, command))

    def chain(rank, command):
        if rank.rank > 0:  # Blocked in a collective until the rank before ends.
            before = launcher.generations[-1][rank.rank - 1]
            while not before.exits:
                time.sleep(0.005)
        rank.report(command, 10, failure=FAILURE, used_up="failed")

    ticket = run(pool, job(world_size=3), timeout=60)
    assert codes_of(ticket) == [10, 10, 10]
    pool.close()


def test_an_assertion_is_not_turned_into_an_error_by_its_peers(monkeypatch):
    monkeypatch.setattr(_pool, "PEER_GRACE_SECONDS", 0.1)
    assertion = Failure("AssertionError", "x", "Traceback", True)

    def one_asserts(rank, command):
        if rank.rank == 0:
            rank.report(command, 10, failure=assertion, used_up="failed")

    launcher, pool = make(one_asserts)
    ticket = run(pool, job(), timeout=60)
    assert ticket.reports[1].ending is Ending.KILLED
    assert launcher.generations[0][1].exits == []
    pool.close()


def test_another_ranks_undeclared_death_ends_nothing(monkeypatch):
    monkeypatch.setattr(_pool, "PEER_GRACE_SECONDS", 0.05)

    def dies(rank, command):
        if rank.rank == 1:
            return rank.process.end(-11)
        time.sleep(0.4)  # Longer than the grace: stock would wait for rank 0.
        rank.report(command)

    launcher, pool = make(dies)
    ticket = run(pool, job())
    assert codes_of(ticket) == [0, -11]
    launcher.script = passing
    run(pool, job())
    assert len(launcher.generations) == 2
    pool.close()
    # In class style it does.
    _, pool = make(dies)
    ticket = run(pool, job(), codes=Codes(every_rank_counts=True))
    assert ticket.reports[0].ending is Ending.KILLED
    pool.close()


def test_time_out_names_the_late_and_kills_them():
    def one_hangs(rank, command):
        if rank.rank == 0:
            rank.report(command)

    launcher, pool = make(one_hangs)
    ticket = run(pool, job(), timeout=0.2)
    assert [r.ending for r in ticket.reports] == [Ending.REPORTED, Ending.TIMED_OUT]
    assert launcher.generations[0][1].process.killed
    assert pool.state is State.EMPTY
    pool.close()


def test_a_report_before_a_death_counts():
    def reports_and_dies(rank, command):
        rank.report(command)
        rank.process.end(-9)

    launcher, pool = make(reports_and_dies)
    assert codes_of(run(pool, job())) == [0, 0]
    launcher.script = passing
    assert run(pool, job()).ran_before == ()
    pool.close()


def test_a_death_between_tests_is_seen_before_the_next():
    launcher, pool = make(passing)
    run(pool, job())
    launcher.generations[0][1].process.end(-9)
    ticket = run(pool, job())
    assert codes_of(ticket) == [0, 0]
    assert ticket.ran_before == ()
    pool.close()


def test_late_and_foreign_replies_are_dropped():
    def confusing(rank, command):
        wrong = RankReport(rank.rank, Ending.REPORTED, 99)
        rank.channel.send(Finished(command.generation, command.sequence - 1, wrong))
        rank.channel.send(Finished(command.generation - 1, command.sequence, wrong))
        rank.channel.send("nonsense")
        rank.report(command)

    _, pool = make(confusing)
    for _ in range(3):
        assert codes_of(run(pool, job())) == [0, 0]
    pool.close()

    def late(rank, command):
        if command.sequence == 2:  # The reply to the first comes with the second's.
            rank.channel.send(
                Finished(command.generation, 1, RankReport(rank.rank, Ending.REPORTED, 99))
            )
        rank.report(command)

    _, pool = make(late)
    assert codes_of(run(pool, job())) == [0, 0]
    assert codes_of(run(pool, job())) == [0, 0]
    pool.close()


def test_a_rank_that_says_something_unreadable_is_given_up():
    def garbage(rank, command):
        if rank.rank == 1:
            rank.channel.send_bytes(b"garbage")
        else:
            rank.report(command)

    _, pool = make(garbage)
    ticket = run(pool, job(), timeout=0.3)
    assert ticket.reports[1].ending is Ending.TIMED_OUT
    pool.close()


def test_cancelled_and_never_joined():
    launcher, pool = make(lambda rank, command: None)
    pool.dispatch(job())
    pool.cancel()
    assert all(r.process.killed for r in launcher.generations[0])
    pool.dispatch(job())
    launcher.script = passing
    run(pool, job())  # Dispatching gives up what was never joined.
    assert len(launcher.generations) == 3
    pool.close()


def test_an_interrupt_while_waiting_kills_the_generation(monkeypatch):
    launcher, pool = make(lambda rank, command: None)
    ticket = pool.dispatch(job())

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.collect(ticket, 5, Codes())
    assert all(r.process.killed for r in launcher.generations[0])
    pool.close()


def test_workers_that_do_not_fit_are_replaced_if_used(monkeypatch):
    launcher, pool = make(passing)
    launcher.fits = False
    run(pool, job())
    run(pool, job())
    assert len(launcher.generations) == 1  # In the same environment they do fit.
    monkeypatch.setenv("TC_X", "1")
    run(pool, job())
    assert len(launcher.generations) == 2
    pool.close()


def test_the_context_is_sent_only_where_it_changed(monkeypatch):
    contexts = []

    def note(rank, command):
        if rank.rank == 0:
            contexts.append(command.context)
        rank.report(command)

    _, pool = make(note)
    for name in ("PYTEST_CURRENT_TEST", "TC_X"):
        monkeypatch.delenv(name, raising=False)
    run(pool, job())
    run(pool, job())
    monkeypatch.setenv("TC_X", "1")
    run(pool, job())
    run(pool, job())
    assert [c is None for c in contexts] == [True, True, False, True]
    assert contexts[2].environ["TC_X"] == "1"
    pool.close()


def test_output_goes_with_the_test_that_was_running():
    def writes(rank, command):
        os.write(rank.output_end, command.test_name.encode())
        rank.report(command)

    launcher = Launcher(writes)
    original = launcher.launch

    def launch(*arguments):
        crew = original(*arguments)
        for rank in launcher.generations[-1]:
            rank.output_end = rank.output.write_end
        return crew

    launcher.launch = launch
    pool = Pool(launcher)
    assert run(pool, job("test_1")).output == [(b"test_1", b"")] * 2
    assert run(pool, job("test_2")).output == [(b"test_2", b"")] * 2
    pool.close()


def test_a_slow_start_has_a_budget_of_its_own(monkeypatch):
    original = Rank._loop

    def slow(self):
        time.sleep(0.5)
        original(self)

    monkeypatch.setattr(Rank, "_loop", slow)
    _, pool = make(passing)
    assert codes_of(run(pool, job(), timeout=0.2)) == [0, 0]
    pool.close()
    monkeypatch.setattr(Rank, "_loop", lambda self: None)
    monkeypatch.setenv("TORCHCONTINUOUS_START_TIMEOUT", "0.2")
    _, pool = make(passing)
    ticket = run(pool, job(), timeout=60)
    assert [r.ending for r in ticket.reports] == [Ending.TIMED_OUT] * 2
    assert ticket.elapsed < 10
    pool.close()


def test_descriptors_do_not_grow():
    _, pool = make(passing)
    run(pool, job(level="process"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        run(pool, job(level="process"))
    # The scripts' own ends are theirs to close.
    assert len(os.listdir("/proc/self/fd")) - before <= 10 * 2 * 3
    pool.close()
