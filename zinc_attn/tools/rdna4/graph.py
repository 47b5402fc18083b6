"""The gate of the graph's kernels: wave32, no spills, no scratch memory, and no more LDS than a workgroup may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...graph.constants import SUPERBLOCK
from ...graph.declarations import MUL_MAT_VEC, WEIGHT_TYPES
from ...graph.pieces import GROUP, TYPES
from ...graph.programs import PROGRAMS
from ...limits import WAVE
from ..cost import CARDS
from .compiler import compile_programs

MOST: Final = {"Spilled VGPRs": 0, "Spilled SGPRs": 0, "Scratch size": 0, "LDS size": 32 << 10}

# Vector instructions of mul_mat_vec, whose program makes a superblock of 32 rows, as a part of what the card issues
# while that superblock comes from memory, by its columns: below 1 memory is the limit.
MOST_ISSUED: Final = {1: 0.21, 8: 0.9}
MOST_ISSUED_BY_TABLE: Final = 0.28  # of one column where values come from a table: iq4_nl, iq4_xs, mxfp4


def graph_violations() -> Iterator[str]:
    """One sentence per broken gate."""
    made = compile_programs([(kernel.decl, spec) for kernel, spec in PROGRAMS])
    for (kernel, spec), one in zip(PROGRAMS, made, strict=True):
        name = f"{kernel.name} {list(spec)}"
        yield from broken(name, one)
        if kernel is MUL_MAT_VEC and (part := issued(spec[0], one)) > most_issued(*spec[:2]):
            yield f"{name}: {part:.0%} of the issue slots, at most {most_issued(*spec[:2]):.0%} allowed"


def most_issued(kind: int, columns: int) -> float:
    by_table = columns == 1 and WEIGHT_TYPES[kind] in ("iq4_nl", "iq4_xs", "mxfp4")
    return MOST_ISSUED_BY_TABLE if by_table else MOST_ISSUED[columns]


def issued(kind: int, one: Mapping[str, Any]) -> float:
    """The part of the card's issue slots that vector instructions take; kind: an index of WEIGHT_TYPES."""
    card, weights = CARDS["r9700"], TYPES[WEIGHT_TYPES[kind]]
    seconds = GROUP * SUPERBLOCK // weights.values * weights.size / card.bandwidth  # billionths
    return float(one["statistics"]["VALU"] / (seconds * card.compute_units * card.simds * card.clock_ghz))


def broken(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    """What a program breaks, of its name and ``compile_programs``' answer."""
    for what, most in MOST.items():
        if one["statistics"][what] > most:
            yield f"{name}: {one['statistics'][what]} {what}, at most {most} allowed"
    if int(one["wave"]) != WAVE:
        yield f"{name}: wave{one['wave']}, wave{WAVE} needed"
