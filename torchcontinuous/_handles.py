"""What stock's suites find in ``self.processes`` and ``self.pid_to_pipe`` of a running test."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torchcontinuous._pool import Ticket
from torchcontinuous._report import RankReport


class RankProcess:
    """One rank of one test, with as much of ``multiprocessing.Process`` as stock's suites use."""

    def __init__(self, ticket: Ticket, rank: int, collect: Callable[[], None]) -> None:
        self._collect = collect
        self._ticket = ticket
        self._rank = rank
        self.pid = ticket.pids[rank]
        self.name = f"process {rank}"

    @property
    def exitcode(self) -> int | None:
        """The exit code that the rank's own process would have had; None while it runs.

        While the test is joined by stock's loop (under a class's own ``_join_processes``), asking
        waits for it: that loop would sleep between its looks.
        """
        if self._ticket.reports is None and self._ticket.foreign_join:
            self._collect()
        report = self._report()
        return None if report is None else report.exit_code

    def _report(self) -> RankReport | None:
        if self._ticket.reports is None and self._ticket.pool.is_finished(self._ticket):
            self._collect()  # Does not wait: every rank has reported.
        if self._ticket.reports is not None:
            return self._ticket.reports[self._rank]
        return self._ticket.pool.report_of(self._ticket, self._rank)

    def is_alive(self) -> bool:
        """Whether the rank still runs the test."""
        return self._report() is None

    def terminate(self) -> None:
        """Send the rank's process SIGTERM, if it still runs the test."""
        if self._report() is None:
            self._ticket.pool.terminate(self._ticket, self._rank)

    def kill(self) -> None:
        """Kill the rank's process, if it still runs the test."""
        if self._report() is None:
            self._ticket.pool.kill(self._ticket, self._rank)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the test: at most ``timeout`` seconds, or until the test's own time-out."""
        if timeout is None:
            if self._ticket.reports is None:
                self._collect()
            return
        self._ticket.pool.wait_for(self._ticket, self._rank, timeout)
        self._report()


class RankPipe:
    """The parent's end of the pipe that the rank's ``_run`` was given."""

    def __init__(self, ticket: Ticket, rank: int) -> None:
        self._ticket = ticket
        self._rank = rank
        self._read = 0
        self.closed = False

    def _messages(self) -> list[Any]:
        if self._ticket.reports is None:
            return []
        report = self._ticket.reports[self._rank]
        messages: list[Any] = [pickle.loads(message) for message in report.pipe]
        if not messages and report.failure is not None:
            messages.append(report.failure.traceback)
        if report.stack:
            messages.append(report.stack)
        return messages

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is a message."""
        return self._read < len(self._messages())

    def recv(self) -> Any:
        """The next message; EOFError if there is none."""
        messages = self._messages()
        if self._read >= len(messages):
            raise EOFError
        self._read += 1
        return messages[self._read - 1]

    def send(self, message: object) -> None:
        """Stock asks for a traceback in this way; a late rank's is there already."""

    def close(self) -> None:
        """Close; harmless when repeated."""
        self.closed = True
