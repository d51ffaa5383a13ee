"""Tables that read well on a terminal and are Markdown too, for a pull request."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table; the first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rules = [
        "-" * (width + 1) + ("-" if number < left else ":") for number, width in enumerate(widths)
    ]
    return "\n".join([line(header), f"|{'|'.join(rules)}|", *map(line, rows)])
