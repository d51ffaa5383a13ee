"""``python -m torchcontinuous``: run suites with no edit, and search for the origin of a leak."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchcontinuous import _bisect, _order, _running
from torchcontinuous.errors import TorchContinuousError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_running.PROGRAM} bisect",
        allow_abbrev=False,
        description="Find the smallest set of earlier tests of its class that makes a test fail "
        "in used workers, though it passes in fresh ones. Exit status: 0 found, 1 not found, 2 bad "
        "arguments, 130 interrupted. The tests are run as unittest runs them: without pytest's "
        "fixtures and conftest files.",
    )
    parser.add_argument(
        "id", help="package.module.Class.test_name, or path/to/test_file.py::Class::test_name"
    )
    before = parser.add_mutually_exclusive_group()
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
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what the tests print, and tracebacks"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests, or the command that is named; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["bisect"]:
        return _running.run(given)
    parser = _parser()
    parsed = parser.parse_args(given[1:])
    del sys.argv[1:]  # Not options of the suite, which would see them.
    try:
        return _bisect.bisect(parsed.id, parsed.earlier, parsed.order, parsed.verbose)
    except TorchContinuousError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return _bisect.MISUSED
    except KeyboardInterrupt:
        return _bisect.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
