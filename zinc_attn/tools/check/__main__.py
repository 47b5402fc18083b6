"""``python -m zinc_attn.tools.check --make-record [FILE]``: write the record of the oracle's digests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..harness.files import write_file
from ..harness.progress import Progress, Steps
from .cases import Case
from .judge import oracle_output
from .record import RECORD, make_entry, record_text


def main(argv: Sequence[str] | None = None, sets: Mapping[str, Sequence[Case]] | None = None) -> int:
    """Write the record. ``sets`` are the cases, see ``make_record``."""
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.tools.check", description="Write the record of digests.")
    parser.add_argument("--make-record", metavar="FILE", nargs="?", type=Path, const=RECORD, required=True)
    path = parser.parse_args(argv).make_record
    text = make_record(lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr), sets)
    write_file(path, text.encode(), "choose another file with --make-record")
    return 0


def make_record(progress: Progress | None = None, sets: Mapping[str, Sequence[Case]] | None = None) -> str:
    """The text of a record file by the oracle alone, with an entry per set of cases.

    sets: the cases by the name of their set; None: the quick set and the default cases, as they are committed.
    """
    sets = {"quick": Case.quick(), "default": Case.default()} if sets is None else sets
    wanted = list(dict.fromkeys(case for cases in sets.values() for case in cases))
    steps, made = Steps(progress, len(wanted)), dict[Case, str]()
    for case in wanted:
        steps.begin(str(case))
        made[case] = oracle_output(case, case.data()).digest()
    entries = []
    for name, cases in sets.items():
        by = {"device": "NumPy float32 oracle", "runtime": "reference.emulate", "set": name, "numpy": np.__version__}
        entries.append(make_entry({str(case): made[case] for case in cases}, **by))
    return record_text(entries)


if __name__ == "__main__":
    sys.exit(main())
