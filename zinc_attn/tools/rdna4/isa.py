"""Reading a compiled program: its innermost loops, and the instructions that it issues per key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF

_BLOCK: Final = re.compile(r"BB(\d+):?$")
_OPCODE: Final = re.compile(r"(?:^|= |\s)((?:v|s|ds|buffer|global|flat|scratch|tbuffer|image)_[a-z]\w*)")
_TARGET: Final = re.compile(r"\bBB(\d+)\b")
_VECTOR_LOAD: Final = re.compile(r"(?:buffer|global)_load_(?:dword|b\d)")
_KINDS: Final = {  # the field of ``Issue`` that counts an opcode, by its begin; the first that fits
    "v_": "valu",
    "ds_": "lds",
    "s_load": "smem",
    "s_buffer_load": "smem",
    **dict.fromkeys(("s_wait", "s_delay_alu", "s_clause", "s_nop"), ""),  # no issue slot of their own
    "s_": "salu",
    "": "vmem",
}


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


def main_loops(isa: str, trips: tuple[float, float]) -> tuple[Issue | None, Issue | None]:
    """(score loop, value loop) of pass 1 per key; trips: of both loops per leaf.

    The score loop is the only innermost loop that loads vectors and reads no LDS (the query comes by scalar loads), the
    value loop the only one that does both. None where it is not one, or has a conditional part.
    """
    groups: tuple[list[Issue | None], list[Issue | None]] = ([], [])
    for loop, straight in innermost_loops(isa):
        if any(_VECTOR_LOAD.match(op) for op, _ in loop):
            reads_lds = any(op.startswith(("ds_read", "ds_load")) for op, _ in loop)
            groups[reads_lds].append(_issue(loop, trips[reads_lds] / KEYS_PER_LEAF) if straight else None)
    qk, pv = (g[0] if len(g) == 1 else None for g in groups)
    return qk, pv


def _issue(loop: Sequence[tuple[str, bool]], trips_per_key: float) -> Issue:
    """What the instructions of one trip are per key."""
    kinds = [next(kind for begin, kind in _KINDS.items() if op.startswith(begin)) for op, _ in loop]
    counts = {kind: kinds.count(kind) for kind in ("valu", "smem", "vmem", "lds", "salu")}
    counts["vopd"] = sum(dual for (_, dual), kind in zip(loop, kinds, strict=True) if kind == "valu")
    return Issue(**{kind: n * trips_per_key for kind, n in counts.items()})
