"""Supervision: the workers of one class, generation after generation.

Collectives tie ranks together, so a broken rank breaks its generation, and the next test gets a
new one.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torchcontinuous import _context, _report
from torchcontinuous._counts import counts
from torchcontinuous._generation import EXIT_SECONDS, Generation, Job
from torchcontinuous._launcher import Launcher
from torchcontinuous._messages import ProcessContext
from torchcontinuous._report import TEST_ERROR_EXIT_CODE, Ending, Leak, RankReport

#: Once the outcome is settled (a rank raised), how long its peers may still report what they saw.
PEER_GRACE_SECONDS = 0.3

#: The same after a failed test, whose next one is waiting.
BROKEN_EXIT_SECONDS = 1.0


class State(Enum):
    """The state of a pool."""

    EMPTY = "no workers"
    IDLE = "workers wait for a test"
    BUSY = "workers run a test"
    CLOSED = "closed"


#: From each state, those that may follow it.
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.EMPTY: frozenset({State.IDLE, State.CLOSED}),
    State.IDLE: frozenset({State.BUSY, State.EMPTY}),
    State.BUSY: frozenset({State.IDLE, State.EMPTY}),
    State.CLOSED: frozenset(),
}


@dataclass(frozen=True)
class Codes:
    """What the test declared about exit codes, as stock reads it after the test has ended."""

    expected: int = 0
    unchecked: bool = False
    every_rank_counts: bool = False
    skips: frozenset[int] = frozenset()

    @property
    def declared(self) -> bool:
        """Whether a death is declared: then exit codes are those of real processes."""
        return self.unchecked or self.expected != 0

    def settles(self, report: RankReport) -> bool:
        """Whether this rank's end settles the outcome, so that its peers need not go on."""
        code = report.exit_code
        if code == TEST_ERROR_EXIT_CODE:
            return True
        if self.every_rank_counts and report.ending is Ending.DIED:
            return True
        if self.unchecked or code in self.skips:
            return False
        return code != self.expected and (report.rank == 0 or self.every_rank_counts)


@dataclass
class Ticket:
    """A test that was dispatched: who runs it, and what came of it.

    ``leaks``: what its workers' tests left changed (test, rank, change).
    ``foreign_join``: it is joined by the class's own code, which looks at exit codes.
    """

    pool: Pool
    job: Job
    sequence: int
    pids: tuple[int, ...]
    ran_before: tuple[str, ...]
    leaks: Sequence[tuple[Job, int, Leak]] = ()
    reports: list[RankReport] | None = None
    output: list[tuple[bytes, bytes]] = field(default_factory=list)
    elapsed: float = 0.0
    lost: bool = False
    foreign_join: bool = False

    @property
    def left_before(self) -> list[tuple[str, int, Leak]]:
        """What earlier tests (name, rank) had left changed in its workers."""
        return [
            (job.test_name, rank, leak) for job, rank, leak in self.leaks if job is not self.job
        ]

    @property
    def refused(self) -> bool:
        """Whether a worker did not run it, since an earlier test had used it up."""
        return any(report.refused for report in self.reports or ())


class Pool:
    """The workers of one class at one world size."""

    _numbers = itertools.count(1)

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._state = State.EMPTY
        self._generation: Generation | None = None
        self._sequences = itertools.count(1)
        self._late_output: list[tuple[bytes, bytes]] = []
        self._late_leaks: list[tuple[Job, int, Leak]] = []
        self._replacing = False

    @property
    def state(self) -> State:
        """Where the pool is in its life."""
        return self._state

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RuntimeError(f"a pool cannot go from {self._state.name} to {state.name}")
        self._state = state

    def dispatch(self, job: Job) -> Ticket:
        """Have every rank run ``job``, in workers that fit it; new ones where they must be.

        Raises:
            StartError: no workers could be started.
        """
        context = _context.capture_context()
        if self._state is State.BUSY:
            self.cancel()
        generation = self._generation
        if generation is not None:
            generation.watch(0)  # A worker may have died meanwhile, or say that it cannot go on.
            used = bool(generation.tests)
            unfit = generation.dead or generation.used_up
            if unfit or (used and (job.fresh or not generation.fits(context))):
                self._end(EXIT_SECONDS)
        generation = self._generation or self._start(job, context)
        ticket = Ticket(
            self,
            job,
            next(self._sequences),
            tuple(m.process.pid for m in generation.members),
            tuple(generation.tests),
            generation.leaks,
        )
        generation.send(job, ticket.sequence, context)
        self._move(State.BUSY)
        return ticket

    def _start(self, job: Job, context: ProcessContext) -> Generation:
        number = next(self._numbers)
        crew = self._launcher.launch(number, job.world_size, job.test_class, context)
        self._generation = Generation(number, job.world_size, crew, context)
        counts.workers += job.world_size
        counts.generations += 1
        counts.replaced += self._replacing
        self._replacing = True
        self._move(State.IDLE)
        return self._generation

    def collect(self, ticket: Ticket, timeout: float, codes: Codes) -> Ticket:
        """Wait for a dispatched test, ``timeout`` seconds from when its workers are ready."""
        generation = self._generation
        assert generation is not None
        assert self._state is State.BUSY
        began = time.monotonic()
        try:
            deadline = self._collect(generation, began, timeout, codes)
            if ticket.job.fresh or (codes.declared and _all_zero(generation.reports)):
                self._collect_exit_codes(generation, deadline, codes)
        except BaseException:
            # Ctrl-C, or the runner's own time-out: nobody will ask for this test again.
            ticket.output = self._abort(generation)
            raise
        ticket.elapsed = time.monotonic() - began
        ticket.lost = generation.lost()
        ticket.reports = [generation.reports[rank] for rank in range(generation.world_size)]
        _count(ticket.reports)
        if ticket.job.fresh or generation.dead or any(r.used_up for r in ticket.reports):
            generation.end(BROKEN_EXIT_SECONDS)
            ticket.output = generation.take_output()
            self._forget()
        else:
            ticket.output = generation.take_output()
            for report in ticket.reports:
                if report.leaks:
                    generation.note_leaks(ticket.job, report.rank, report.leaks)
            if not _may_keep_group(ticket.reports):
                generation.kept_group += 1
            self._move(State.IDLE)
        return ticket

    def _collect(self, generation: Generation, began: float, timeout: float, codes: Codes) -> float:
        """Wait until every rank has a report, its own or one made for it; the test's deadline."""
        settled: float | None = None
        dismissed: set[int] = set()
        started = generation.all_started
        test_deadline = began + timeout
        while True:
            self._report_the_dead(generation)
            if not generation.unfinished:
                return test_deadline
            if not started and generation.all_started:
                started = True
                test_deadline = time.monotonic() + timeout
            if any(map(codes.settles, generation.reports.values())):
                settled = settled or time.monotonic() + PEER_GRACE_SECONDS
                self._dismiss(generation, codes, dismissed)
            deadline = test_deadline if started else generation.start_deadline
            if settled is not None and settled < deadline:
                deadline = settled
            if time.monotonic() < deadline:
                generation.watch(deadline)
                continue
            ending = Ending.KILLED if deadline == settled else Ending.TIMED_OUT
            self._give_up(generation, ending)
            return test_deadline

    @staticmethod
    def _dismiss(generation: Generation, codes: Codes, dismissed: set[int]) -> None:
        """Let ranks that failed end, so that peers which wait for them see it, as on stock.

        Not while every failure is an assertion: a peer's broken connection would make an error of
        it, and say nothing new.
        """
        failed = [
            r
            for r in generation.reports.values()
            if r.exit_code not in {0, *codes.skips} or r.ending is Ending.DIED
        ]
        if all(r.failure is not None and r.failure.is_assertion for r in failed):
            return
        ranks = {r.rank for r in failed} - dismissed
        generation.tell_to_exit(codes.declared, ranks)
        dismissed |= ranks

    @staticmethod
    def _report_the_dead(generation: Generation) -> None:
        for rank, code in generation.dead.items():
            if rank not in generation.reports:
                generation.reports[rank] = RankReport(
                    rank, Ending.DIED, code, used_up="its process died"
                )

    @staticmethod
    def _give_up(generation: Generation, ending: Ending) -> None:
        """Report on the ranks that have not, and kill them."""
        late = generation.unfinished
        for report in _look(generation, ending):
            generation.reports[report.rank] = report
        generation.kill(late)

    @staticmethod
    def _collect_exit_codes(generation: Generation, deadline: float, codes: Codes) -> None:
        """Let the workers end, and take the exit codes of their processes for the reports'."""
        generation.tell_to_exit(full=codes.declared)
        while generation.living and time.monotonic() < deadline:
            generation.watch(deadline)
        late = generation.living
        stacks = generation.stacks(late)
        generation.kill(late)
        slow = {m.rank for m in late}
        for rank, report in generation.reports.items():
            code = generation.dead.get(rank)
            if report.ending is not Ending.REPORTED:
                continue
            if rank in slow:
                generation.reports[rank] = dataclasses.replace(
                    report, ending=Ending.TIMED_OUT, exit_code=None, stack=stacks.get(rank, "")
                )
            elif code != report.exit_code:
                generation.reports[rank] = dataclasses.replace(
                    report, ending=Ending.DIED, exit_code=code, failure=None
                )

    def _running(self, ticket: Ticket) -> Generation | None:
        """The generation that runs this very test, or None."""
        generation = self._generation
        if self._state is not State.BUSY or generation is None:
            return None
        return generation if generation.sequence == ticket.sequence else None

    def describe(self, skips: Mapping[int, str]) -> str | None:
        """Where the ranks of the test that runs now are, with their stacks; None if none runs."""
        generation = self._generation
        if self._state is not State.BUSY or generation is None or generation.job is None:
            return None
        dead = {
            rank: RankReport(rank, Ending.DIED, code)
            for rank, code in generation.dead.items()
            if rank not in generation.reports
        }
        running = {report.rank: report for report in _look(generation, Ending.TIMED_OUT)}
        reports = {**running, **dead, **generation.reports}
        return _report.describe_running(
            generation.job.test_id,
            [reports[rank] for rank in sorted(reports)],
            skips,
            time.monotonic() - generation.sent_at,
        )

    def report_of(self, ticket: Ticket, rank: int) -> RankReport | None:
        """A rank's report so far, without waiting for it; one made for it if it is dead."""
        generation = self._running(ticket)
        if generation is None:
            # Given up: nobody collected it.
            return RankReport(rank, Ending.KILLED, -signal.SIGTERM)
        generation.watch(0)
        self._report_the_dead(generation)
        return generation.reports.get(rank)

    def is_finished(self, ticket: Ticket) -> bool:
        """Whether collecting the test would not wait."""
        generation = self._running(ticket)
        if generation is None:
            return False
        generation.watch(0)
        return not generation.unfinished

    def wait_for(self, ticket: Ticket, rank: int, seconds: float) -> None:
        """Wait until a rank has reported or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            generation = self._running(ticket)
            if generation is None or self.report_of(ticket, rank) is not None:
                return
            generation.watch(deadline)

    def terminate(self, ticket: Ticket, rank: int) -> None:
        """Send the process of a rank that runs a test SIGTERM."""
        generation = self._running(ticket)
        if generation is not None:
            generation.members[rank].process.terminate()

    def kill(self, ticket: Ticket, rank: int) -> None:
        """Kill the process of a rank that runs a test."""
        generation = self._running(ticket)
        if generation is not None:
            generation.kill([generation.members[rank]])

    def forget(self) -> None:
        """In a fork of this process: close what belongs to the parent."""
        if self._generation is not None:
            self._generation.close()
            self._generation = None

    def cancel(self) -> list[tuple[bytes, bytes]]:
        """Give up a test that was dispatched and will not be collected; the ranks' output."""
        if self._state is not State.BUSY or self._generation is None:
            return []
        return self._abort(self._generation)

    def _abort(self, generation: Generation) -> list[tuple[bytes, bytes]]:
        generation.kill(generation.living)
        output = generation.take_output()
        self._forget()
        return output

    def _end(self, seconds: float) -> None:
        if self._generation is not None:
            self._generation.end(seconds)
            self._late_output += self._generation.take_output()
            self._forget()

    def _forget(self) -> None:
        assert self._generation is not None
        self._late_leaks += self._generation.late_leaks
        self._generation.close()
        self._generation = None
        self._move(State.EMPTY)

    def take_late_leaks(self) -> list[tuple[Job, int, Leak]]:
        """What was found left behind after the reports on its tests, since the last time."""
        found, self._late_leaks = self._late_leaks, []
        if self._generation is not None and self._generation.late_leaks:
            found += self._generation.late_leaks
            self._generation.late_leaks = []
        return found

    def close(self) -> list[tuple[bytes, bytes]]:
        """End the workers, at the end of the class; what they wrote since their last test."""
        if self._state is State.CLOSED:
            return []
        self.cancel()
        self._end(EXIT_SECONDS)
        self._move(State.CLOSED)
        return self._late_output


def _look(generation: Generation, ending: Ending) -> list[RankReport]:
    """A report, of this ending, on each rank that has given none: where it is, if it answers."""
    late = generation.unfinished
    silent = {member.rank: generation.silent(member.rank) for member in late}
    stacks = generation.stacks(late)
    return [
        RankReport(
            rank,
            ending,
            None,
            used_up=ending.value,
            stack=stacks.get(rank, ""),
            silent=seconds,
        )
        for rank, seconds in silent.items()
    ]


def _may_keep_group(reports: Sequence[RankReport]) -> bool:
    """Whether every rank's process group came out of the test alike, and fit for another."""
    states = [report.group for report in reports]
    return all(
        state is not None
        and state.spent is None
        and states[0] is not None
        and state.numbers == states[0].numbers
        for state in states
    )


def _count(reports: Sequence[RankReport]) -> None:
    groups = [report.group for report in reports if report.group is not None]
    counts.tests += 1
    counts.groups_made += max((group.made for group in groups), default=0)
    counts.groups_reused += max((group.reused for group in groups), default=0)


def _all_zero(reports: Mapping[int, RankReport]) -> bool:
    return all(report.exit_code == 0 for report in reports.values())
