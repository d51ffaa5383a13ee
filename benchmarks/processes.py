"""A Python process of its own for each measurement, with a deadline, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Where processes run: ``python -m`` finds both packages there, installed or not.
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ended:
    """A process that has ended; ``code`` is None where it was killed at its deadline."""

    code: int | None
    output: str
    seconds: float


def run_python(*arguments: str, environ: Mapping[str, str], timeout: float) -> Ended:
    """Run ``python ARGUMENTS``, and kill it and its children after ``timeout`` seconds."""
    # To a file: a pipe's end of file would wait for every child that holds it.
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
            code, seconds = process.returncode, time.perf_counter() - began
        finally:
            _kill(process)
        log.seek(0)
        return Ended(code, log.read().decode(errors="replace"), seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that has not ended, and its session: stock's workers outlive their parent."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
