"""Plots of what was measured, as SVG and PNG; needs matplotlib (the extra ``[bench]``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import arms, sweeps
from benchmarks.comparison import Comparison

FORMATS = ("svg", "png")

#: One colour for each arm on every plot, apart also for those who do not tell red from green.
_COLOURS = {
    arms.STOCK: "#666666",
    arms.TORCH: "#E69F00",
    arms.NONE: "#0072B2",
    arms.GROUP: "#56B4E9",
    arms.PROCESS: "#CC79A7",
}

_LABELS = {
    arms.STOCK: "stock",
    arms.TORCH: "torch's continuous class",
    arms.NONE: 'ours, "none"',
    arms.GROUP: 'ours, "group"',
    arms.PROCESS: 'ours, "process"',
}


def missing() -> str | None:
    """What keeps plots from being drawn, with its remedy."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"no plots: {error} (pip install '.[bench]')"
    return None


def draw(folder: Path, comparison: Comparison, points: Sequence[sweeps.Point]) -> list[str]:
    """Draw whatever was measured; the names of the plots, each there in every format."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = []

    def plot(name: str, fill: Callable[[Any], bool], width: float) -> None:
        figure = Figure(figsize=(width, 4.5), layout="constrained")
        if fill(figure.subplots()):
            for suffix in FORMATS:
                # No date, no random ids: the same figures give the same file.
                metadata = {"Date": None} if suffix == "svg" else None
                figure.savefig(folder / f"{name}.{suffix}", dpi=120, metadata=metadata)
            drawn.append(name)

    matplotlib.rcParams["svg.hashsalt"] = "torchcontinuous"
    count = len({run.suite for run in comparison.runs})
    plot("suites", partial(_suites, comparison=comparison), max(6.0, 0.8 * count + 2))
    for name, kind, what, unit, label in (
        ("tests", sweeps.BY_TESTS, "seconds", 1.0, "seconds of the file"),
        ("world_size", sweeps.BY_WORLD_SIZE, "test_seconds", 1.0, "seconds for one more test"),
        ("memory", sweeps.BY_WORLD_SIZE, "memory", 1e6, "MB held in a test"),
    ):
        x_label = "no-op tests in a file" if kind == sweeps.BY_TESTS else "ranks"
        plot(
            name,
            partial(
                _curves,
                points=points,
                kind=kind,
                what=what,
                unit=unit,
                x_label=x_label,
                y_label=label,
            ),
            6.5,
        )
    return drawn


def _suites(axes: Any, comparison: Comparison) -> bool:
    """Bars of each suite by arm; a suite that an arm did not run whole has none there."""
    suites = list(dict.fromkeys(run.suite for run in comparison.runs))
    shown = [arm for arm in comparison.arms if any(comparison.seconds(s, arm) for s in suites)]
    width = 0.8 / max(1, len(shown))
    for number, arm in enumerate(shown):
        bars = [
            (place + (number - (len(shown) - 1) / 2) * width, seconds)
            for place, suite in enumerate(suites)
            if (seconds := comparison.seconds(suite, arm)) is not None
        ]
        places, heights = zip(*bars, strict=True)
        axes.bar(places, heights, width, color=_COLOURS[arm], label=_LABELS[arm])
    axes.set_yscale("log")
    axes.set_ylabel("seconds of the file")
    axes.set_xticks(range(len(suites)), suites, rotation=45, ha="right")
    if shown:
        axes.legend(fontsize="small")
    return bool(shown)


def _curves(
    axes: Any,
    points: Sequence[sweeps.Point],
    kind: str,
    what: str,
    unit: float,
    x_label: str,
    y_label: str,
) -> bool:
    shown = False
    ticks: set[int] = set()
    for arm in _COLOURS:
        curve = sweeps.curve(points, kind, arm, what)
        if curve:
            values = [value / unit for value in curve.values()]
            axes.plot(list(curve), values, "o-", color=_COLOURS[arm], label=_LABELS[arm])
            ticks |= curve.keys()
            shown = True
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if shown:
        axes.legend(fontsize="small")
    return shown
