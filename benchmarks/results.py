"""What a run of the suites measured, written down: ``results.json`` and ``results.md``."""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import arms, plots, published, sweeps, tables
from benchmarks.comparison import Comparison


def machine() -> dict[str, Any]:
    """What the figures were taken on, and with."""
    import torch

    from torchcontinuous import __version__

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchcontinuous": __version__,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write(
    folder: Path,
    comparison: Comparison,
    points: Sequence[sweeps.Point],
    arguments: Sequence[str],
    drawn: Sequence[str] = (),
) -> None:
    """Write both files, of whatever was measured so far; ``drawn`` are names of plots."""
    folder.mkdir(parents=True, exist_ok=True)
    about = machine()
    runs = [
        {
            "suite": run.suite,
            "arm": run.arm,
            "exit_status": run.code,
            "seconds": run.seconds,
            "whole": run.whole,
            "outcomes": run.outcomes,
        }
        for run in comparison.runs
    ]
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    swept = [asdict(point) for point in points]
    data = {"command": command, "machine": about, "runs": runs, "sweeps": swept}
    _replace(folder / "results.json", json.dumps(data, indent=1) + "\n")
    _replace(folder / "results.md", as_markdown(comparison, points, about, command, drawn))


def _replace(file: Path, text: str) -> None:
    """Write a file whole or not at all: Ctrl-C may come at any time."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    os.replace(new, file)


def as_markdown(
    comparison: Comparison,
    points: Sequence[sweeps.Point],
    about: dict[str, Any],
    command: str,
    drawn: Sequence[str] = (),
) -> str:
    """The table, what it was measured on, and what others published."""
    parts = [
        f"`{command}`, {about['time']}: {about['processor']}, {about['cores']} cores, "
        f"{about['memory_bytes'] / 1e9:.0f} GB, {about['system']}, Python {about['python']}, "
        f"torch {about['torch']}.",
        tables.render(*comparison.table()) if comparison.runs else "Nothing was measured.",
        *(f"- {problem}" for problem in comparison.problems()),
        *([sweeps.report(points)] if points else []),
        *(f"![{name}]({name}.{plots.FORMATS[0]})" for name in drawn),
    ]
    ratios = comparison.ratios(arms.NONE)
    if ratios:
        parts += [published.NOTE, published.table(ratios)]
    return "\n\n".join(parts) + "\n"
