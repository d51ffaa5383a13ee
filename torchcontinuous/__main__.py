"""``python -m torchcontinuous``: what helps with a suite, besides running it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchcontinuous import _bisect, _order
from torchcontinuous.errors import TorchContinuousError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchcontinuous",
        description="What helps with a suite, besides running it.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command")
    bisect = commands.add_parser(
        "bisect",
        allow_abbrev=False,
        help="find the earlier tests that make a test fail in used workers",
        description="Find the smallest set of earlier tests of its class that makes a test fail "
        "in used workers, though it passes in fresh ones. Exit status: 0 found, 1 not found, 2 bad "
        "arguments, 130 interrupted. The tests are run as unittest runs them: without pytest's "
        "fixtures and conftest files.",
    )
    bisect.add_argument(
        "id", help="package.module.Class.test_name, or path/to/test_file.py::Class::test_name"
    )
    before = bisect.add_mutually_exclusive_group()
    before.add_argument(
        "--from",
        dest="earlier",
        nargs="+",
        default=[],
        metavar="ID",
        help="the tests that ran before it, in that order, by id or name; default: those of its "
        "class, in unittest's order",
    )
    before.add_argument(
        "--order",
        type=_order.checked_order,
        default="forwards",
        help=f"in which the class's tests ran: {_order.ORDERS}",
    )
    bisect.add_argument(
        "-v", "--verbose", action="store_true", help="show what the tests print, and tracebacks"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    del sys.argv[1:]  # Not options of the suite, which would see them.
    try:
        return _bisect.bisect(given.id, given.earlier, given.order, given.verbose)
    except TorchContinuousError as error:
        print(f"{parser.prog} {given.command}: error: {error}", file=sys.stderr)
        return _bisect.MISUSED
    except KeyboardInterrupt:
        return _bisect.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
