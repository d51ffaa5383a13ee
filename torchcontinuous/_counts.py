"""What this process has used so far: for the summary of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Running totals of one test process.

    Attributes:
        tests: tests that were run by workers; a repeated one counts again.
        workers: worker processes that were started.
        generations: how often a class's workers were started together.
        replaced: generations that took the place of earlier ones of the same class.
        groups_made: process groups that tests made, sub-groups too, each counted once for all of
            its ranks.
        groups_reused: default process groups that a test was handed instead of making one.
        leaks: changes that tests left in their workers, put back or not, one for each test and
            probe.
        repeated: tests that were run again in fresh workers.
        leaked_into: those of them that then passed.
    """

    tests: int = 0
    workers: int = 0
    generations: int = 0
    replaced: int = 0
    groups_made: int = 0
    groups_reused: int = 0
    leaks: int = 0
    repeated: int = 0
    leaked_into: int = 0

    def describe(self) -> str:
        """All of it in one line."""
        parts = [
            f"{_some(self.tests, 'test')} run by {_some(self.workers, 'worker')} in "
            f"{_some(self.generations, 'generation')}, {self.replaced} of them in place of others",
            f"{_some(self.groups_made, 'process group')} made, {self.groups_reused} reused",
            f"{_some(self.leaks, 'leak')} found",
        ]
        if self.repeated:
            parts.append(
                f"{_some(self.repeated, 'test')} repeated in fresh workers, {self.leaked_into} of "
                "them because of a leak"
            )
        return "; ".join(parts)


def _some(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


#: Of this process.
counts = Counts()
