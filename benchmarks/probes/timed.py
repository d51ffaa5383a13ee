"""Run ``many``, and write how long each of its tests took, in seconds, as the parent sees it."""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any

from benchmarks.probes.names import PARENT


class _Timed(unittest.TextTestResult):
    """Notes each test's seconds, from its name being known to the next thing the runner does."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.perf_counter()

    def stopTest(self, test: unittest.TestCase) -> None:
        self.seconds[test.id().rpartition(".")[2]] = time.perf_counter() - self._began
        super().stopTest(test)


def main() -> int:
    os.environ[PARENT] = str(os.getpid())
    tests = unittest.defaultTestLoader.loadTestsFromName("benchmarks.probes.many")
    result: Any = unittest.TextTestRunner(resultclass=_Timed).run(tests)
    Path(sys.argv[1]).write_text(json.dumps(result.seconds))
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
