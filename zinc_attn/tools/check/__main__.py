"""``python -m zinc_attn.tools.check --make-record``: write the record of the oracle's digests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..harness.files import write_file
from .cases import Case
from .record import RECORD, make_record


def main(argv: Sequence[str] | None = None, sets: Mapping[str, Sequence[Case]] | None = None) -> int:
    """Write the record that the package has. ``sets`` are the cases, see ``make_record``."""
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.tools.check", description="Write the committed record.")
    parser.add_argument(
        "--make-record",
        metavar="FILE",
        nargs="?",
        type=Path,
        const=RECORD,
        required=True,
        help="where to write it (default: %(const)s)",
    )
    args = parser.parse_args(argv)

    def say(what: str, done: int, total: int) -> None:
        print(f"{done}/{total} {what}", file=sys.stderr)

    write_file(args.make_record, make_record(say, sets).encode(), "choose another file with --make-record")
    return 0


if __name__ == "__main__":
    sys.exit(main())
