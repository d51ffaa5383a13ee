"""A *generation*: the workers that started together, one a rank, as their supervisor sees them."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_handles
from typing import Any

from torchcontinuous import _context, _settings
from torchcontinuous._launcher import Crew, Member
from torchcontinuous._messages import (
    BodyEnded,
    ClassReference,
    Exit,
    Finished,
    GroupAgreed,
    GroupWanted,
    LeftBehind,
    Passed,
    ProcessContext,
    Run,
    Started,
    Style,
    TearDown,
)
from torchcontinuous._report import Leak, RankReport
from torchcontinuous.errors import ChannelError

#: How long workers that have nothing to do may take to end before they are killed.
EXIT_SECONDS = 5.0

#: How long a rank may take to begin, and go on, with writing its Python stacks.
STACK_SECONDS = 2.0
STACK_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """One test to be run by every rank."""

    test_class: ClassReference
    test_name: str
    file_name: str
    world_size: int
    style: Style = "stock"
    level: str = "none"
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """Whether it has to have workers of its own."""
        return self.level == "process"

    @property
    def test_id(self) -> str:
        """The test's id, as unittest writes it."""
        return f"{self.test_class.module}.{self.test_class.qualname}.{self.test_name}"


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
    """Workers that started together: what they run, which of them reported, which are dead."""

    def __init__(self, number: int, world_size: int, crew: Crew, context: ProcessContext) -> None:
        self.number = number
        self.world_size = world_size
        self.members = crew.members
        self.tests: list[str] = []
        self.context = self._first = context
        self.dead: dict[int, int | None] = {}  # rank: exit code
        self.reports: dict[int, RankReport] = {}
        self.start_deadline = time.monotonic() + _settings.start_timeout()
        self._crew = crew
        self._started: dict[int, Started] = {}
        self.sequence = 0
        #: What its tests left changed: test, rank, and what it was.
        self.leaks: list[tuple[Job, int, Leak]] = []
        #: The part of it that came after the test's own report.
        self.late_leaks: list[tuple[Job, int, Leak]] = []
        #: Whether a worker will refuse the next test.
        self.used_up = False
        self._jobs: dict[int, Job] = {}
        #: Which of its default process groups may still be handed out.
        self.kept_group = 0
        #: When each rank last wrote or reported something, on time.monotonic()'s clock.
        self._heard_at: dict[int, float] = {}
        self.sent_at = 0.0
        #: Ranks that wait for every other's body to end.
        self._waiting: dict[int, Member] = {}
        self._waiter = _Waiter()
        #: Ranks that wait for every other to ask for a default process group.
        self._wanted: dict[int, tuple[Member, GroupWanted]] = {}
        self._rendezvous: str | None = None
        self._store: str | None = None
        self._store_memory: int | None = None
        self._pid = os.getpid()
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
        if not _context.imports_alike(context, self._first):
            return False
        environ = context.environ
        if environ == self.context.environ:
            return True
        imports = (started.reads for started in self._started.values())
        return self._crew.fits(environ) and all(_context.fits(reads, environ) for reads in imports)

    def rendezvous_file(self) -> str:
        """The file by which a class-style group meets; it lives as long as the generation."""
        if self._rendezvous is None:
            descriptor, self._rendezvous = tempfile.mkstemp(prefix="torchcontinuous-")
            os.close(descriptor)
        return self._rendezvous

    def store_file(self) -> str:
        """The file of the store by which ranks make the default groups that are kept.

        On Linux in memory, and this process's own: it is gone with it, however that ends.
        """
        if self._store is None:
            if sys.platform == "linux":
                self._store_memory = os.memfd_create("torchcontinuous-store")
                self._store = f"/proc/{self._pid}/fd/{self._store_memory}"
            else:
                descriptor, self._store = tempfile.mkstemp(prefix="torchcontinuous-")
                os.close(descriptor)
        return self._store

    def send(self, job: Job, sequence: int, context: ProcessContext) -> None:
        """Have every rank run a test."""
        self.reports = {}
        self._waiting = {}
        self._wanted = {}
        self.sequence = sequence
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
            self.store_file() if job.level == "none" else None,
            self.kept_group if job.level == "none" else None,
            job.fresh,
            _settings.verbose(),
        )
        self.context = context
        self.tests.append(job.test_name)
        self._jobs[sequence] = job
        data = pickle.dumps(run)
        self.sent_at = time.monotonic()
        self._heard_at = dict.fromkeys(range(self.world_size), self.sent_at)
        for member in self.members:
            with contextlib.suppress(ChannelError):  # Dead: its sentinel tells.
                member.channel.send_bytes(data)

    def watch(self, deadline: float) -> None:
        """Wait for something to happen and take note of it, until ``deadline`` at the latest."""
        for member, what in self._waiter.wait(deadline - time.monotonic()):
            if what == "channel":
                self._receive(member, math.inf)  # It is there: no need to wait for it.
            elif what == "sentinel":
                self._bury(member)
            elif what.drain():
                self._heard_at[member.rank] = time.monotonic()
            else:
                self._waiter.remove(what)
        if self._waiting:
            self._let_tear_down()
        if len(self._wanted) == self.world_size:
            self._tell_what_is_wanted()

    def _receive(self, member: Member, deadline: float) -> None:
        if member.rank in self.dead:
            return
        try:
            message = member.channel.receive(deadline)
        except TimeoutError:
            return
        except (EOFError, ChannelError):
            # Closed by the test, or no longer to be trusted: this rank cannot report any more. If
            # it does not end by itself, it is killed with the generation.
            self._waiter.remove(member.channel.connection)
            return
        self._heard_at[member.rank] = time.monotonic()
        if isinstance(message, Passed):
            message = message.finished()
        if isinstance(message, Started) and message.generation == self.number:
            self._started[member.rank] = message
        elif isinstance(message, Finished) and (message.generation, message.sequence) == (
            self.number,
            self.sequence,
        ):
            self.reports[member.rank] = message.report
        elif isinstance(message, LeftBehind) and message.generation == self.number:
            self._note_late(member.rank, message)
        elif isinstance(message, BodyEnded) and (message.generation, message.sequence) == (
            self.number,
            self.sequence,
        ):
            self._waiting[member.rank] = member
        elif isinstance(message, GroupWanted) and message[:2] == (self.number, self.sequence):
            self._wanted[member.rank] = member, message

    def note_leaks(self, job: Job, rank: int, leaks: Iterable[Leak]) -> None:
        """Remember what a test left changed, for the report on a later one."""
        self.leaks += [(job, rank, leak) for leak in leaks]

    def _note_late(self, rank: int, message: LeftBehind) -> None:
        job = self._jobs.get(message.sequence)
        if job is not None:
            self.note_leaks(job, rank, message.leaks)
            self.late_leaks += [(job, rank, leak) for leak in message.leaks]
        self.used_up = self.used_up or message.used_up is not None

    def _let_tear_down(self) -> None:
        """Let ranks go on when every body has ended, or as soon as one no longer can."""
        every_one = len(self._waiting) == self.world_size
        if every_one or self.reports or self.dead:
            data = pickle.dumps(TearDown(self.sequence, every_one))
            for member in self._waiting.values():
                with contextlib.suppress(ChannelError):  # Dead: its sentinel tells.
                    member.channel.send_bytes(data)
            self._waiting = {}

    def _tell_what_is_wanted(self) -> None:
        """Tell the ranks whether they all asked for the same default process group."""
        keys = {message.key for _, message in self._wanted.values()}
        for member, message in self._wanted.values():
            if message.key is not None:
                with contextlib.suppress(ChannelError):  # Dead: its sentinel tells.
                    member.channel.send(GroupAgreed(message.number, len(keys) == 1))
        self._wanted = {}

    def _bury(self, member: Member) -> None:
        """Note the death of a rank, after what it had still to say."""
        if member.rank in self.dead:
            return
        while True:
            before = self._heard()
            self._receive(member, time.monotonic())
            if before == self._heard():
                break
        self._waiter.remove(member.process.sentinel)
        self._waiter.remove(member.channel.connection)
        self.dead[member.rank] = member.process.exit_code()

    def _heard(self) -> tuple[int, ...]:
        return len(self.reports), len(self._started), len(self.late_leaks), len(self._waiting)

    def silent(self, rank: int) -> float:
        """Seconds since a rank last wrote or reported something, or was sent its test."""
        return time.monotonic() - self._heard_at.get(rank, self.sent_at)

    @property
    def job(self) -> Job | None:
        """The test that it was sent last."""
        return self._jobs.get(self.sequence)

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

    def tell_to_exit(self, full: bool, ranks: Collection[int] | None = None) -> None:
        """Tell ranks (all that live, if none are named) to end as an interpreter ends."""
        for member in self.living:
            if ranks is not None and member.rank not in ranks:
                continue
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
        self.watch(0)  # What was written before a report is there with it.
        taken = []
        for member in self.members:
            stdout, stderr = ([c.take() for c in member.captures()] or [b"", b""])[:2]
            taken.append((stdout, stderr))
        return taken

    def close(self) -> None:
        """Let go of everything."""
        self._waiter.close()
        for member in self.members:
            member.close()
        files = [self._rendezvous]
        if self._store_memory is None:
            files.append(self._store)
        else:
            os.close(self._store_memory)
            self._store_memory = None
        # A fork of the parent closes what it was left, but the files are not its own.
        for file in filter(None, files if os.getpid() == self._pid else ()):
            with contextlib.suppress(OSError):
                os.remove(file)
