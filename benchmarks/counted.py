"""``python -m unittest`` on a suite; then the totals of the run, as JSON in a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import unittest
from pathlib import Path

from torchcontinuous._counts import counts


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("totals", type=Path, help="the file to write")
    parser.add_argument("suite", help="what to run, as for unittest")
    parsed = parser.parse_args()
    program = unittest.main(module=None, argv=[parser.prog, parsed.suite], exit=False)
    parsed.totals.write_text(json.dumps(dataclasses.asdict(counts)))
    return 0 if program.result.wasSuccessful() else 1


if __name__ == "__main__":
    raise SystemExit(main())
