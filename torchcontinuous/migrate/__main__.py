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
    modes.add_argument(
        "--verify",
        action="store_true",
        help="run each file on stock, write the changes, and run it migrated: forwards, reversed "
        "and shuffled; classes that differ are isolated, or left on stock",
    )
    verify = parser.add_argument_group("with --verify")
    verify.add_argument(
        "--resume", action="store_true", help="go on with a verification that was interrupted"
    )
    verify.add_argument(
        "--report",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="write the table to a file: Markdown, or JSON if it ends in .json; may be repeated",
    )
    verify.add_argument(
        "--runner",
        choices=("unittest", "pytest"),
        default="unittest",
        help="what runs the files (default: %(default)s)",
    )
    verify.add_argument("--seed", type=int, default=0, help="of the shuffle (default: %(default)s)")
    verify.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="that one run of a file may take (default: %(default)g)",
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
    if given.verify and given.revert:
        parser.error("--verify is for the way there: give it without --revert")
    if not given.verify and (given.resume or given.report):
        parser.error("--resume and --report belong to --verify")
    from torchcontinuous.migrate import _command

    try:
        return _command.run(given)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
