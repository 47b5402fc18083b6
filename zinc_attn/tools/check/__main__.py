"""``python -m zinc_attn.tools.check --make-record [FILE]``: write the record of the oracle's digests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..harness.files import write_file
from .cases import Case
from .record import RECORD, make_record


def main(argv: Sequence[str] | None = None, sets: Mapping[str, Sequence[Case]] | None = None) -> int:
    """Write the record. ``sets`` are the cases, see ``make_record``."""
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.tools.check", description="Write the record of digests.")
    parser.add_argument("--make-record", metavar="FILE", nargs="?", type=Path, const=RECORD, required=True)
    path = parser.parse_args(argv).make_record
    text = make_record(lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr), sets)
    write_file(path, text.encode(), "choose another file with --make-record")
    return 0


if __name__ == "__main__":
    sys.exit(main())
