"""What others published of the same change: seconds of whole files on stock, and on reused workers.

Facts from pull requests to PyTorch (their numbers are given). They ran on machines with GPUs and
this project's figures come from CPUs, so that only ratios can be compared, and those roughly.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import tables


@dataclass(frozen=True)
class Published:
    """One published measurement.

    Attributes:
        what: the tests.
        cases: how many, where that was told.
        before: seconds on stock.
        after: seconds on reused workers.
        source: where it was published.
        comparable: suites of ours that are of the same kind.
    """

    what: str
    cases: int | None
    before: float
    after: float
    source: str
    comparable: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """How many times less."""
        return self.before / self.after


_FSDP1 = ("fsdp1", "fsdp1_wrapping")
_FSDP2 = ("fsdp2", "fsdp2_state")
_DTENSOR = ("dtensor", "dtensor_mesh", "dtensor_ops", "dtensor_placements", "dtensor_views")
_CHECKPOINT = ("checkpoint", "checkpoint_training")


def _of_pytorch(number: int) -> str:
    return f"PyTorch pull request {number}"


PUBLISHED = (
    Published("FSDP1, 27 files", None, 3673.35, 1077.27, _of_pytorch(173689), _FSDP1),
    # "over 9 min".
    Published("test_wrap.py", None, 540.0, 38.0, "PyTorch pull requests", ("wrap",)),
    Published("FSDP DTensor state dict", None, 364.94, 45.89, _of_pytorch(173728), _FSDP2),
    Published("HSDP DTensor state dict", None, 230.00, 110.75, _of_pytorch(173728), _FSDP2),
    Published("replicate", None, 699.07, 303.88, _of_pytorch(173842), ("ddp",)),
    Published("DTensor API", 20, 62.112, 10.946, _of_pytorch(197649), _DTENSOR),
    Published("core DTensor", 58, 170.2, 13.4, _of_pytorch(197656), _DTENSOR),
    Published("tensor parallel API", 32, 96.2, 10.4, _of_pytorch(197658), ("tensor_parallel",)),
    Published("FSDP, freezing weights", 32, 201.734, 6.429, _of_pytorch(197645), _FSDP1),
    Published("FSDP, comm hooks", 28, 177.839, 8.830, _of_pytorch(197643), _FSDP1),
    Published(
        "checkpoint, state-dict utilities", 7, 37.399, 6.117, _of_pytorch(197647), _CHECKPOINT
    ),
    Published("checkpoint, resharding", 10, 105.7, 62.0, _of_pytorch(197666), _CHECKPOINT),
    Published(
        "checkpoint, filesystem on gloo", 10, 29.648, 6.894, _of_pytorch(197683), _CHECKPOINT
    ),
    Published("51 conversions of September 2026", None, 2881.0, 722.0, "PyTorch pull requests"),
)


#: What has to be said beside the table.
NOTE = (
    'Published figures, measured on GPUs, beside ours at level "none", from a CPU: only ratios can '
    "be compared."
)


def table(ratios: dict[str, float], all_of_them: bool = True) -> str:
    """The published measurements beside the ratios that were measured here.

    Args:
        ratios: by suite, how many times less it took here.
        all_of_them: also those of which no suite of the kind was measured here.
    """
    rows = []
    for one in PUBLISHED:
        ours = [f"{suite} {ratios[suite]:.1f}x" for suite in one.comparable if suite in ratios]
        if not ours and not all_of_them:
            continue
        rows.append(
            [
                one.what,
                str(one.cases or ""),
                f"{one.before:.1f}",
                f"{one.after:.1f}",
                f"{one.ratio:.1f}x",
                ", ".join(ours),
                one.source,
            ]
        )
    header = ["published", "cases", "before (s)", "after (s)", "ratio", "here", "source"]
    return tables.render(header, rows)
