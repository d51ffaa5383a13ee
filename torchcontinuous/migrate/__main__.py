"""The command: ``torchcontinuous-migrate``, ``python -m torchcontinuous.migrate``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

DONE, FOUND, MISUSED, INTERRUPTED = 0, 1, 2, 130

#: What the extra brings, by module.
_NEEDED = ("libcst", "pathspec")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcontinuous-migrate",
        allow_abbrev=False,
        description="Change the parent class of torch.distributed tests from torch's to "
        "torchcontinuous's. Without an option: print the changes and a judgement of each class, "
        "and write nothing. Exit status: 0 done, 1 differences or findings (a class that cannot "
        "be migrated; with --check, anything to migrate), 2 bad input (the rest is done).",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        help="files, and folders (all *.py in them that no .gitignore leaves out)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--write", action="store_true", help="write the changes")
    modes.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if there is a change"
    )
    parser.add_argument(
        "--revert", action="store_true", help="the way back: from torchcontinuous's to torch's"
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="MODULE.CLASS",
        help="a class of another package that derives from torch's; may be repeated",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"{parser.prog}: error: {' and '.join(missing)} not found: "
            "pip install 'torchcontinuous[migrate]'",
            file=sys.stderr,
        )
        return MISUSED
    for base in given.base:
        if "." not in base.strip("."):
            parser.error(f"--base: give a class with its module, not {base!r}")
    from torchcontinuous.migrate import _command

    try:
        return _command.run(given)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
