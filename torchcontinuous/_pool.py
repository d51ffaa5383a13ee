"""Supervision: the workers of one class, generation after generation.

A *generation* is a set of workers that started together, one a rank. Collectives tie them
together, so a broken rank breaks its generation, and the next test gets a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import selectors
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import wait as wait_for_handles
from typing import Any

from torchcontinuous import _context, _settings
from torchcontinuous._launcher import Crew, Launcher, Member
from torchcontinuous._messages import (
    ClassReference,
    Exit,
    Finished,
    ProcessContext,
    Run,
    Started,
    Style,
)
from torchcontinuous._report import TEST_ERROR_EXIT_CODE, Ending, RankReport
from torchcontinuous.errors import ChannelError

#: Once the outcome is settled (a rank raised), how long its peers may still report what they saw.
PEER_GRACE_SECONDS = 0.5

#: How long workers that have nothing to do may take to end before they are killed.
EXIT_SECONDS = 5.0

#: The same after a failed test, whose next one is waiting.
BROKEN_EXIT_SECONDS = 1.0

#: How long a rank may take to begin, and go on, with writing its Python stacks.
STACK_SECONDS = 2.0
STACK_PAUSE_SECONDS = 0.1


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
class Job:
    """One test to be run by every rank."""

    test_class: ClassReference
    test_name: str
    file_name: str
    world_size: int
    style: Style = "stock"
    fresh: bool = False
    keywords: Mapping[str, Any] = field(default_factory=dict)


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
        if self.unchecked or code in self.skips:
            return False
        return code != self.expected and (report.rank == 0 or self.every_rank_counts)


@dataclass
class Ticket:
    """A test that was dispatched: who runs it, and what came of it."""

    pool: Pool
    job: Job
    sequence: int
    pids: tuple[int, ...]
    ran_before: tuple[str, ...]
    reports: list[RankReport] | None = None
    output: list[tuple[bytes, bytes]] = field(default_factory=list)
    elapsed: float = 0.0
    lost: bool = False


class _Waiter:
    """Waits on connections, process sentinels and output pipes together."""

    def __init__(self) -> None:
        self._selector = None if sys.platform == "win32" else selectors.DefaultSelector()
        self._objects: dict[Any, object] = {}

    def add(self, source: Any, key: object) -> None:
        if self._selector is None:
            self._objects[source] = key
        else:
            self._selector.register(source, selectors.EVENT_READ, key)

    def remove(self, source: Any) -> None:
        self._objects.pop(source, None)
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)

    def wait(self, seconds: float) -> list[Any]:
        """The keys of what is ready, at the latest after ``seconds``."""
        seconds = max(0.0, seconds)
        if self._selector is None:
            ready: list[Any] = wait_for_handles(list(self._objects), seconds)
            return [self._objects[source] for source in ready]
        return [key.data for key, _ in self._selector.select(seconds)]

    def close(self) -> None:
        if self._selector is not None:
            self._selector.close()


class Generation:
    """The workers that started together, as their supervisor sees them."""

    def __init__(self, number: int, world_size: int, crew: Crew, context: ProcessContext) -> None:
        self.number = number
        self.world_size = world_size
        self.members = crew.members
        self.tests: list[str] = []
        self.context = context
        self.dead: dict[int, int | None] = {}  # rank: exit code
        self.reports: dict[int, RankReport] = {}
        self.start_deadline = time.monotonic() + _settings.start_timeout()
        self._crew = crew
        self._started: dict[int, Started] = {}
        self._sequence = 0
        self._waiter = _Waiter()
        self._rendezvous: str | None = None
        for member in self.members:
            self._waiter.add(member.channel.connection, (member, "channel"))
            self._waiter.add(member.process.sentinel, (member, "sentinel"))
            for capture in member.captures():
                self._waiter.add(capture, (member, capture))

    @property
    def all_started(self) -> bool:
        """Whether every rank that lives is ready for tests."""
        return len(self._started.keys() | self.dead.keys()) == self.world_size

    @property
    def unfinished(self) -> list[Member]:
        """Members that owe a report and can still give one."""
        gone = self.reports.keys() | self.dead.keys()
        return [m for m in self.members if m.rank not in gone]

    @property
    def living(self) -> list[Member]:
        """Members whose process has not ended."""
        return [m for m in self.members if m.rank not in self.dead]

    def fits(self, context: ProcessContext) -> bool:
        """Whether a fresh interpreter under ``context`` would have imported the same."""
        environ = context.environ
        imports = (started.reads for started in self._started.values())
        return self._crew.fits(environ) and all(_context.fits(reads, environ) for reads in imports)

    def rendezvous_file(self) -> str:
        """The file by which a class-style group meets; it lives as long as the generation."""
        if self._rendezvous is None:
            descriptor, self._rendezvous = tempfile.mkstemp(prefix="torchcontinuous-")
            os.close(descriptor)
        return self._rendezvous

    def send(self, job: Job, sequence: int, context: ProcessContext) -> None:
        """Have every rank run a test."""
        self.reports = {}
        self._sequence = sequence
        run = Run(
            self.number,
            sequence,
            job.test_class,
            job.test_name,
            job.file_name,
            job.style,
            job.keywords,
            None if context == self.context else context,
            self.rendezvous_file() if job.style == "class" else None,
        )
        self.context = context
        self.tests.append(job.test_name)
        data = pickle.dumps(run)
        for member in self.members:
            with contextlib.suppress(ChannelError):  # Dead: its sentinel tells.
                member.channel.send_bytes(data)

    def watch(self, deadline: float) -> None:
        """Wait for something to happen and take note of it, until ``deadline`` at the latest."""
        for member, what in self._waiter.wait(deadline - time.monotonic()):
            if what == "channel":
                self._receive(member)
            elif what == "sentinel":
                self._bury(member)
            elif not what.drain():
                self._waiter.remove(what)

    def _receive(self, member: Member) -> None:
        if member.rank in self.dead:
            return
        try:
            message = member.channel.receive(time.monotonic())
        except TimeoutError:
            return
        except (EOFError, ChannelError):
            # Closed by the test, or no longer to be trusted: this rank cannot report any more. If
            # it does not end by itself, it is killed with the generation.
            self._waiter.remove(member.channel.connection)
            return
        if isinstance(message, Started) and message.generation == self.number:
            self._started[member.rank] = message
        elif (
            isinstance(message, Finished)
            and (message.generation, message.sequence) == (self.number, self._sequence)
        ):
            self.reports[member.rank] = message.report

    def _bury(self, member: Member) -> None:
        """Note the death of a rank, after what it had still to say."""
        if member.rank in self.dead:
            return
        while True:
            before = (len(self.reports), len(self._started))
            self._receive(member)
            if before == (len(self.reports), len(self._started)):
                break
        self._waiter.remove(member.process.sentinel)
        self._waiter.remove(member.channel.connection)
        self.dead[member.rank] = member.process.exit_code()

    def lost(self) -> bool:
        """Whether a rank's end cannot be judged, since the nursery died with it."""
        return any(m.process.lost and self.dead.get(m.rank, 0) is None for m in self.members)

    def stacks(self, members: list[Member]) -> dict[int, str]:
        """The Python stacks of the members that can still answer, by rank."""
        found: dict[int, str] = {}
        asked = [m for m in members if m.dump is not None and m.process.dump_stacks()]
        deadline = time.monotonic() + STACK_SECONDS
        for member in asked:
            assert member.dump is not None
            pause = deadline
            while wait_for_handles([member.dump.descriptor], max(0, pause - time.monotonic())):
                if not member.dump.drain():
                    break
                pause = min(deadline, time.monotonic() + STACK_PAUSE_SECONDS)
            found[member.rank] = member.dump.take().decode(errors="backslashreplace")
        return found

    def tell_to_exit(self, full: bool) -> None:
        """Tell every rank to end as an interpreter ends."""
        for member in self.living:
            with contextlib.suppress(ChannelError):
                member.channel.send(Exit(full))

    def kill(self, members: list[Member]) -> None:
        """Kill members and wait for their end."""
        for member in members:
            member.process.kill()
        deadline = time.monotonic() + EXIT_SECONDS
        ranks = {m.rank for m in members}
        while ranks - self.dead.keys() and time.monotonic() < deadline:
            self.watch(deadline)

    def end(self, seconds: float) -> None:
        """End every worker: those with nothing to do by their own exit, the others at once."""
        self.kill(self.unfinished if self.tests else [])
        self.tell_to_exit(full=False)
        deadline = time.monotonic() + seconds
        while self.living and time.monotonic() < deadline:
            self.watch(deadline)
        self.kill(self.living)

    def take_output(self) -> list[tuple[bytes, bytes]]:
        """Each rank's stdout and stderr since the last time."""
        taken = []
        for member in self.members:
            for capture in member.captures():
                capture.drain()
            stdout, stderr = ([c.take() for c in member.captures()] or [b"", b""])[:2]
            taken.append((stdout, stderr))
        return taken

    def close(self) -> None:
        """Let go of everything."""
        self._waiter.close()
        for member in self.members:
            member.close()
        if self._rendezvous is not None:
            with contextlib.suppress(OSError):
                os.remove(self._rendezvous)


class Pool:
    """The workers of one class at one world size."""

    _numbers = itertools.count(1)

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._state = State.EMPTY
        self._generation: Generation | None = None
        self._sequences = itertools.count(1)
        self._late_output: list[tuple[bytes, bytes]] = []

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
            generation.watch(0)  # A worker may have died meanwhile.
            used = bool(generation.tests)
            if generation.dead or (used and (job.fresh or not generation.fits(context))):
                self._end(EXIT_SECONDS)
        generation = self._generation or self._start(job, context)
        ticket = Ticket(
            self,
            job,
            next(self._sequences),
            tuple(m.process.pid for m in generation.members),
            tuple(generation.tests),
        )
        generation.send(job, ticket.sequence, context)
        self._move(State.BUSY)
        return ticket

    def _start(self, job: Job, context: ProcessContext) -> Generation:
        number = next(self._numbers)
        crew = self._launcher.launch(number, job.world_size, job.test_class, context)
        self._generation = Generation(number, job.world_size, crew, context)
        self._move(State.IDLE)
        return self._generation

    def collect(self, ticket: Ticket, timeout: float, codes: Codes) -> Ticket:
        """Wait for a dispatched test, ``timeout`` seconds from when its workers are ready."""
        generation = self._generation
        assert generation is not None and self._state is State.BUSY
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
        if ticket.job.fresh or generation.dead or any(r.used_up for r in ticket.reports):
            generation.end(BROKEN_EXIT_SECONDS)
            ticket.output = generation.take_output()
            self._forget()
        else:
            ticket.output = generation.take_output()
            self._move(State.IDLE)
        return ticket

    def _collect(
        self, generation: Generation, began: float, timeout: float, codes: Codes
    ) -> float:
        """Wait until every rank has a report, its own or one made for it; the test's deadline."""
        settled: float | None = None
        started = generation.all_started
        test_deadline = began + timeout
        while True:
            self._report_the_dead(generation)
            if not generation.unfinished:
                return test_deadline
            if not started and generation.all_started:
                started = True
                test_deadline = time.monotonic() + timeout
            if settled is None and any(map(codes.settles, generation.reports.values())):
                settled = time.monotonic() + PEER_GRACE_SECONDS
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
        stacks = generation.stacks(late) if ending is Ending.TIMED_OUT else {}
        for member in late:
            generation.reports[member.rank] = RankReport(
                member.rank, ending, None, used_up=ending.value, stack=stacks.get(member.rank, "")
            )
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

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a rank lives."""
        if self._generation is None:
            return False
        self._generation.watch(0)
        return rank not in self._generation.dead

    def terminate(self, rank: int) -> None:
        """Kill the process of a rank that runs a test."""
        if self._generation is not None:
            self._generation.kill([self._generation.members[rank]])

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
        self._generation.close()
        self._generation = None
        self._move(State.EMPTY)

    def close(self) -> list[tuple[bytes, bytes]]:
        """End the workers, at the end of the class; what they wrote since their last test."""
        if self._state is State.CLOSED:
            return []
        self.cancel()
        self._end(EXIT_SECONDS)
        self._move(State.CLOSED)
        return self._late_output


def _all_zero(reports: Mapping[int, RankReport]) -> bool:
    return all(report.exit_code == 0 for report in reports.values())
