"""Tables of slips: under a file, what breaks, a text that the file has once, its replacement, and the failing test."""

from pathlib import Path
from typing import NamedTuple


class Slip(NamedTuple):
    file: str
    breaks: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return self.breaks


def slips(table: str) -> list[Slip]:
    """Of lines ``FILE`` and, under each, ``WHAT BREAKS: TEXT → REPLACEMENT @ TEST``."""
    found, file = [], ""
    for line in table.strip().splitlines():
        breaks, is_slip, rest = line.partition(": ")
        change, _, test = rest.rpartition(" @ ")
        if is_slip:
            found.append(Slip(file, breaks, *change.split(" → "), test))
        else:
            file = line
    return found


def check_table(found: list[Slip], root: Path) -> None:
    """Each text occurs once, and names differ."""
    for slip in found:
        assert (root / slip.file).read_text().count(slip.old) == 1, slip
    assert len({slip.breaks for slip in found}) == len(found) >= 40
