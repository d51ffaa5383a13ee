"""What every probe is: a class of 4 gloo ranks on the arm's base, and notes from its workers."""

# mypy: allow-subclassing-any

from __future__ import annotations

import json
import os
import time

from benchmarks.base import CLASS_STYLE, GroupTest

__all__ = ["CLASS_STYLE", "NOTES", "Probe"]

#: Names the file that workers write their notes to.
NOTES = "BENCH_NOTES"


class Probe(GroupTest):
    def note(self, event: str, value: float) -> None:
        """Write down what this worker alone knows; one write, so that ranks do not mix."""
        line = json.dumps({"event": event, "rank": self.rank, "value": value}) + "\n"
        descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def note_moment(self, event: str) -> None:
        """Note that something happens now. The monotonic clock is the whole system's on Linux."""
        self.note(event, time.monotonic())
