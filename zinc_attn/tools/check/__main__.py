"""``python -m zinc_attn.tools.check``: print the record of the oracle's digests, as the package has it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ...planning.arithmetic import EXACT
from .cases import Case
from .outcome import oracle_output
from .record import make_entry, record_text


def make_record(sets: Mapping[str, Sequence[Case]]) -> str:
    """The text of a record file by the oracle alone, with an entry per set of cases, which are given by its name."""
    made: dict[Case, str] = {}
    for case in dict.fromkeys(case for cases in sets.values() for case in cases):
        print(case, file=sys.stderr)
        made[case] = oracle_output(case, case.data()).digest()
    by = {"device": "NumPy float32 oracle", "runtime": "reference.emulate"}
    entries = [
        make_entry({str(case): made[case] for case in cases}, {**by, "set": name}) for name, cases in sets.items()
    ]
    return record_text(entries)


if __name__ == "__main__":
    sets: dict[str, list[Case]] = {}
    for arithmetic in EXACT:
        of = "" if arithmetic == "canonical" else f" {arithmetic}"
        sets |= {f"quick{of}": Case.quick(arithmetic), f"default{of}": Case.default(arithmetic)}
    print(make_record(sets), end="")
