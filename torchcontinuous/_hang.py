"""Who waits where, and who is missing: what the ranks' Python stacks say at a time-out."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: A line of what ``faulthandler`` writes, the most recent call first.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

#: Where the functions are that start a collective and wait for it.
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")

#: torch's folder of suites, and the files in it that are harness.
_SUITES = os.path.join("torch", "testing", "_internal", "")
_HARNESS = ("common_distributed.py", "common_utils.py")

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.sep + "torch" + os.sep


@dataclass(frozen=True)
class Place:
    """Where a rank is: the innermost line of the test's own, and the collective that it called
    there, or None."""

    file: str
    line: int
    function: str
    collective: str | None

    def __str__(self) -> str:
        where = f"{os.path.basename(self.file)}:{self.line}"
        if self.collective is not None:
            return f"waited in {self.collective} ({where})"
        return f"at {where} in {self.function}"


def place_of(stack: str) -> Place | None:
    """What a rank's Python stack says; None if no line of it is the test's own."""
    for frames in _threads(stack):
        collective = None
        for file, line, function in frames:
            if file.endswith(_C10D):
                collective = function  # The outermost of them: what the test called.
            elif _is_tests_own(file):
                return Place(file, int(line), function, collective)
    return None


def _threads(stack: str) -> Iterator[list[tuple[str, str, str]]]:
    """The frames of each thread, first of that which runs the test."""
    threads = [_FRAME.findall(part) for part in re.split(r"\n(?=Current thread|Thread )", stack)]
    yield from sorted(threads, key=lambda frames: all(name != "run_test" for *_, name in frames))


def _is_tests_own(file: str) -> bool:
    if file.startswith("<") or file.startswith(_PACKAGE):
        return False
    if _SUITES in file:
        return os.path.basename(file) not in _HARNESS
    if "site-packages" in file and _TORCH in file:
        return False
    return "site-packages" in file or not file.startswith(_STDLIB)


def own_part(stack: str) -> str:
    """A stack without the harness's frames around the test."""
    kept = []
    for line in stack.splitlines():
        found = _FRAME.match(line)
        if found and found[3] == "run_test":
            break
        kept.append(line)
    else:
        return stack
    return "\n".join(kept) + "\n"


def describe(places: Sequence[tuple[str, str]]) -> str:
    """One line on all ranks: ``ranks 0, 1 waited in all_reduce (test_x.py:41); rank 2 ...``.

    Args:
        places: for groups of ranks that are alike, their names and what is to be said of them.
    """
    return "Where the ranks were: " + "; ".join(f"{who} {what}" for who, what in places) + "."
