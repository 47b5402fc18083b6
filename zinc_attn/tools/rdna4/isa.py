"""Reading a compiled program: its innermost loops, and the instructions that it issues per key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...canonical import constants
from ...shapes import AttnShape

_BLOCK: Final = re.compile(r"BB(\d+):?$")
_OPCODE: Final = re.compile(r"(?:^|= |\s)((?:v|s|ds|buffer|global|flat|scratch|tbuffer|image)_[a-z]\w*)")
_TARGET: Final = re.compile(r"\bBB(\d+)\b")
_WIDTH: Final = re.compile(r"_load_(?:dword(?:x(\d))?|b(\d+))$")
_FREE: Final = ("s_wait", "s_delay_alu", "s_clause", "s_nop")  # no issue slot of their own


@dataclass(frozen=True)
class Issue:
    """Instructions that a wave issues per key of a leaf. A dual-issued pair counts as one ``valu`` and one ``vopd``."""

    valu: float
    vopd: float
    smem: float
    vmem: float
    lds: float
    salu: float

    @property
    def total(self) -> float:
        """Issue cycles per key, without scalar ALU work, which issues beside the vector work of other waves."""
        return self.valu + self.smem + self.vmem + self.lds


def innermost_loops(isa: str) -> list[tuple[list[tuple[str, bool]], bool]]:
    """(instructions, straight) per innermost loop, in program order; an instruction is (opcode, dual-issued).

    A loop is what a backward branch spans. straight: it has no conditional part, so that each trip runs all of it.
    """
    at = -1
    code: list[tuple[int, str, bool]] = []  # (block, opcode, dual-issued)
    jumps: list[tuple[int, int]] = []
    for line in isa.splitlines():
        text = line.split("//")[0].split(";")[0].strip()
        if label := _BLOCK.match(text):
            at = int(label[1])
        elif (found := _OPCODE.search(text)) and at >= 0:
            code.append((at, found[1], " :: " in text))
            if found[1].startswith(("s_branch", "s_cbranch")) and (target := _TARGET.search(text[found.end() :])):
                jumps.append((at, int(target[1])))
    ends: dict[int, int] = {}  # first block to last block
    for at, to in jumps:
        if to <= at:
            ends[to] = max(at, ends.get(to, at))
    inner = [(begin, end) for begin, end in sorted(ends.items()) if not any(begin < b <= end for b in ends)]
    return [
        (
            [(op, dual) for at, op, dual in code if begin <= at <= end],
            not any(begin <= at < to <= end for at, to in jumps),
        )
        for begin, end in inner
    ]


def main_loops(
    isa: str, shape: AttnShape, dtype_bytes: int, trips: tuple[float, float] | None = None
) -> tuple[Issue | None, Issue | None]:
    """(score loop, value loop) of pass 1 per key.

    The score loop is the only innermost loop that loads vectors and reads no LDS (the query comes by scalar loads), the
    value loop the only one that does both. Trips per leaf follow from the bytes that one trip loads, which accounts for
    unrolling: K of a leaf is 2 keys per lane, V one slice of 64 keys, in one pass or in several. trips: of both loops
    per leaf, where the bytes do not tell them, since what blocks share is loaded, too.
    """
    groups: tuple[list[Issue | None], list[Issue | None]] = ([], [])
    for loop, straight in innermost_loops(isa):
        if per_trip := sum(_load_bytes(op) for op, _ in loop):
            reads_lds = any(op.startswith(("ds_read", "ds_load")) for op, _ in loop)
            values = constants.KEYS_PER_LEAF * shape.value_slice if reads_lds else 2 * shape.k_dim
            per_leaf = values * dtype_bytes / per_trip if trips is None else trips[reads_lds]
            trips_per_key = per_leaf / constants.KEYS_PER_LEAF
            groups[reads_lds].append(_issue(loop, trips_per_key) if straight else None)
    qk, pv = (g[0] if len(g) == 1 else None for g in groups)
    return qk, pv


def _load_bytes(opcode: str) -> int:
    """Bytes per lane of a vector memory load; 0 for anything else."""
    width = _WIDTH.search(opcode) if opcode.startswith(("buffer_", "global_")) else None
    return 0 if width is None else int(width[2]) // 8 if width[2] else 4 * int(width[1] or 1)


def _issue(loop: Sequence[tuple[str, bool]], trips_per_key: float) -> Issue:
    """What the instructions of one trip are per key."""
    count = dict.fromkeys(("valu", "vopd", "smem", "vmem", "lds", "salu"), 0)
    for op, dual in loop:
        if op.startswith("v_"):
            count["valu"] += 1
            count["vopd"] += dual
        elif op.startswith("ds_"):
            count["lds"] += 1
        elif op.startswith(("s_load", "s_buffer_load")):
            count["smem"] += 1
        elif not op.startswith("s_"):
            count["vmem"] += 1
        elif not op.startswith(_FREE):
            count["salu"] += 1
    return Issue(**{kind: n * trips_per_key for kind, n in count.items()})
