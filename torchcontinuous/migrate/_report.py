"""The table for the pull request, and progress while it is made."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcontinuous.migrate import _files
from torchcontinuous.migrate._verify import Row, totals

_HEADINGS = ("file", "cases", "before s", "after s", "saved", "ratio", "level", "notes")


def table(rows: Sequence[Row]) -> str:
    """As Markdown, with totals."""
    lines = [_cells(_files.shown(row.path), row) for row in rows]
    lines.append(_cells("**total**", totals(rows)))
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if 0 < number < 6 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + ":" if 0 < number < 6 else "-" * width
        for number, width in enumerate(widths)
    ]
    return "".join(f"{text}\n" for text in (line(_HEADINGS), line(rule), *map(line, lines)))


def _cells(name: str, row: Row) -> tuple[str, ...]:
    notes = "; ".join(row.notes).replace("|", "\\|").replace("\n", " ")
    if row.after is None:
        return name, str(row.cases), f"{row.before:.1f}", "-", "-", "-", _levels(row), notes
    saved = f"{100 * (1 - row.after / row.before):.0f} %" if row.before else "-"
    ratio = f"{row.before / row.after:.1f}x" if row.after else "-"
    after = f"{row.after:.1f}"
    return name, str(row.cases), f"{row.before:.1f}", after, saved, ratio, _levels(row), notes


def _levels(row: Row) -> str:
    return ", ".join(row.levels)


def write(path: Path, rows: Sequence[Row]) -> None:
    """As Markdown, or as JSON where the name ends so."""
    text = json.dumps(as_json(rows), indent=2) + "\n" if path.suffix == ".json" else table(rows)
    path.write_text(text)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """For programs."""
    return {
        "files": [_fields(_files.shown(row.path), row) for row in rows],
        "total": _fields("total", totals(rows)),
    }


def _fields(name: str, row: Row) -> dict[str, Any]:
    after = row.after
    return {
        "file": name,
        "cases": row.cases,
        "before_seconds": round(row.before, 3),
        "after_seconds": None if after is None else round(after, 3),
        "saved_seconds": None if after is None else round(row.before - after, 3),
        "ratio": round(row.before / after, 3) if after else None,
        "levels": row.levels,
        "notes": row.notes,
    }


class Progress:
    """Where the runs are: one line that is written over on a terminal, a line a run elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._started = time.monotonic()
        self._shown = 0

    def running(self, what: str, done: int, planned: int | None, left: float | None) -> None:
        """While a file runs: how many of its tests are done; seconds that are left in all."""
        if not self._terminal:
            return
        of = f"/{planned}" if planned is not None else ""
        elapsed = _duration(time.monotonic() - self._started)
        rest = f", about {_duration(left)} left" if left is not None else ""
        line = f"{what}: {done}{of} tests; {elapsed} elapsed{rest}"
        print(f"\r{line.ljust(self._shown)}", end="", flush=True)
        self._shown = len(line)

    def ended(self, line: str) -> None:
        """When a file has run."""
        start = "\r" if self._terminal else ""
        print(f"{start}{line.ljust(self._shown)}", flush=True)
        self._shown = 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
