"""The wire: what goes between parent and worker, and between parent and nursery.

Every command and reply of a worker carries its *generation* (which set of workers) and, where it
is about a test, its *sequence number*, so that a late reply is known for what it is. Nothing here
assumes that the two ends share a machine, except the nursery's messages at the end: those are
about operating-system processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchcontinuous._report import Ending, GroupState, Leak, RankReport

Style = Literal["stock", "class"]


@dataclass(frozen=True)
class ClassReference:
    """Where workers find a test class: module, that module's file, qualified name.

    ``before_import``: a function (module, name, arguments) that is called before the module is
    imported, or None.
    """

    module: str
    file: str | None
    qualname: str
    before_import: tuple[str, str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class ProcessContext:
    """What a fresh interpreter would have taken over from its parent."""

    environ: Mapping[str, str]
    directory: str | None
    path: tuple[str, ...]
    argv: tuple[str, ...]
    umask: int


@dataclass(frozen=True)
class Start:
    """The parent's first message to a worker.

    ``preparation`` is what ``multiprocessing.spawn`` prepares a fresh interpreter with, or None
    where that was done before the fork. ``module`` is imported before the worker says Started.
    """

    generation: int
    rank: int
    world_size: int
    module: ClassReference
    context: ProcessContext
    preparation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """Run one test. ``context`` is None where it is the same as for the test before.

    ``kept_group`` is the number of the default process groups that may still be handed out, None
    where the test has to have one of its own. Groups that outlive a test meet in files: the kept
    ones in ``store_file``, a class-style class's own in ``rendezvous_file``.
    ``last``: the worker runs no other test after it.
    ``guard_first``: the report is to hold all that the state guard finds, though the parent could
    go on without the part that is put back.
    """

    generation: int
    sequence: int
    test_class: ClassReference
    test_name: str
    file_name: str
    style: Style = "stock"
    keywords: Mapping[str, Any] = field(default_factory=dict)
    context: ProcessContext | None = None
    rendezvous_file: str | None = None
    store_file: str | None = None
    kept_group: int | None = None
    last: bool = False
    guard_first: bool = False


@dataclass(frozen=True)
class Exit:
    """End, with the exit code of the last test. ``full``: as slowly as an interpreter ends."""

    full: bool = False


@dataclass(frozen=True)
class Started:
    """A worker is ready for its first test.

    ``reads``: environment variables that it looked up while it imported the test module itself,
    with their values before and after.
    """

    generation: int
    rank: int
    reads: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)


class GroupWanted(NamedTuple):
    """A rank's test asks for a default process group, described by ``key``, and waits for the other
    ranks to ask, too. With None it takes no kept one, and waits for no answer."""

    generation: int
    sequence: int
    number: int
    key: str | None


class GroupAgreed(NamedTuple):
    """Whether all ranks ask for the same, to one that waits since its GroupWanted ``number``."""

    number: int
    alike: bool


@dataclass(frozen=True)
class BodyEnded:
    """A rank's test body did not fail; its ``tearDown`` waits for those of all ranks."""

    generation: int
    sequence: int


@dataclass(frozen=True)
class TearDown:
    """To a rank whose body has ended: whether to run ``tearDown``, or to leave it out because
    another rank's body never will."""

    sequence: int
    run: bool


@dataclass(frozen=True)
class Finished:
    """A rank's report of one test."""

    generation: int
    sequence: int
    report: RankReport


class Passed(NamedTuple):
    """The same for a test that ended well and left nothing to tell. Most do, and a plain tuple is
    read and written several times as fast."""

    generation: int
    sequence: int
    rank: int
    group: tuple[Any, ...] | None

    def finished(self) -> Finished:
        """As the message that it stands for."""
        group = None if self.group is None else GroupState(*self.group)
        report = RankReport(self.rank, Ending.REPORTED, 0, group=group)
        return Finished(self.generation, self.sequence, report)


def finished(generation: int, sequence: int, report: RankReport) -> Finished | Passed:
    """The message for a report."""
    group = report.group
    if report == RankReport(report.rank, Ending.REPORTED, 0, group=group):
        fields = None if group is None else tuple(vars(group).values())
        return Passed(generation, sequence, report.rank, fields)
    return Finished(generation, sequence, report)


@dataclass(frozen=True)
class LeftBehind:
    """What the state guard found after a test was reported on; nothing is sent where that is
    nothing. A worker that cannot go on (``used_up``) refuses the next test, if there is one."""

    generation: int
    sequence: int
    leaks: tuple[Leak, ...]
    used_up: str | None


# Between the parent and a nursery or template.


@dataclass(frozen=True)
class ForkTemplate:
    """Fork a template for ``module``. One descriptor follows: its control connection."""

    module: ClassReference
    preparation: Mapping[str, Any]
    context: ProcessContext


@dataclass(frozen=True)
class ForkWorker:
    """Fork a worker. Its descriptors follow: commands, stdout, stderr, stack dumps."""

    rank: int
    parent_pid: int


@dataclass(frozen=True)
class Kill:
    """Kill the worker ``pid`` and what it started."""

    pid: int


@dataclass(frozen=True)
class ForkServerReady:
    """A nursery or template is up.

    ``reads``: environment variables that were read while it imported, with their values before
    and after (None: not set). ``unsafe``: why it must not fork workers, else None.
    """

    reads: Mapping[str, tuple[str | None, str | None]]
    unsafe: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Forked:
    """A worker or template was forked. One descriptor follows: its pidfd."""

    pid: int


@dataclass(frozen=True)
class ForkFailed:
    """The fork failed."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """A worker ended."""

    pid: int
    exit_code: int
