"""Reading a compiled program: its innermost loops, and the cycles in which it issues, per key."""

import re
from collections import Counter
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF

_BLOCK: Final = re.compile(r"BB(\d+):?$")
_OPCODE: Final = re.compile(r"(?:^|= |\s)((?:v|s|ds|buffer|global|flat|scratch|tbuffer|image)_[a-z]\w*)")
_TARGET: Final = re.compile(r"\bBB(\d+)\b")
_VECTOR_LOAD: Final = re.compile(r"(?:buffer|global)_load_(?:dword|b\d)")
# Instructions without an issue slot beside vector work: waits, and scalar ALU work, which other waves' work hides.
_FREE: Final = re.compile(r"s_(?!load|buffer_load)")
# Cycles of a 16 x 16 x 16 product of int8, from the 383 TOPS that AMD gives for 128 units at 2.92 GHz; and of float16.
_CYCLES: Final = {"v_wmma_i32": 8, "v_wmma_f32": 16}


def _parsed(isa: str) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """(block, opcode) of every instruction, a dual-issued pair is one; and (block, target) of every jump."""
    block = -1
    code: list[tuple[int, str]] = []  # (block, opcode)
    jumps: list[tuple[int, int]] = []
    for line in isa.splitlines():
        text = line.split("//")[0].split(";")[0].strip()
        if label := _BLOCK.match(text):
            block = int(label[1])
        elif (match := _OPCODE.search(text)) and block >= 0:
            code.append((block, match[1]))
            if match[1].startswith(("s_branch", "s_cbranch")) and (target := _TARGET.search(text[match.end() :])):
                jumps.append((block, int(target[1])))
    return code, jumps


def matrix_cycles(isa: str) -> int:
    """Issue cycles of vector work in a program's block with matrix products, or in the shorter of two such blocks."""
    code, _ = _parsed(isa)
    cycles = Counter[int]()
    for block, op in code:
        cycles[block] += _CYCLES.get(op[:10], op.startswith("v_"))
    return min(cycles[block] for block, op in code if op.startswith("v_wmma_"))


def leaf_cycles(isa: str) -> float | None:
    """Issue cycles of a wave for a leaf of keys, of a program with matrix units whose loop over leaves has no inner
    loop: from the loop's begin to the end of the last product's block. None for other programs.
    """
    code, jumps = _parsed(isa)
    products = [block for block, op in code if op.startswith("v_wmma_")]
    loops = [(to, block) for block, to in jumps if to <= block and to <= max(products)]
    begin, end = max((loop for loop in loops if loop[0] <= min(products)), default=(0, 0))
    if end < max(products) or any(begin < to for to, _ in loops):
        return None
    part = [op for block, op in code if begin <= block <= max(products) and not _FREE.match(op)]
    return float(sum(_CYCLES.get(op[:10], 1) for op in part))


def innermost_loops(isa: str) -> list[tuple[list[str], bool]]:
    """(opcodes, straight) per innermost loop, in program order.

    A loop is the code that a backward branch spans. straight: no part is conditional, so that each trip runs all of it.
    """
    code, jumps = _parsed(isa)
    ends: dict[int, int] = {}  # first block to last block
    for block, to in jumps:
        if to <= block:
            ends[to] = max(block, ends.get(to, block))
    inner = [(begin, end) for begin, end in sorted(ends.items()) if not any(begin < b <= end for b in ends)]
    return [
        (
            [op for block, op in code if begin <= block <= end],
            not any(begin <= block < to <= end for block, to in jumps),
        )
        for begin, end in inner
    ]


def main_loops(isa: str, trips: tuple[float, ...]) -> tuple[float | None, float | None]:
    """Issue cycles per key of pass 1's score loop and value loops; trips: of the loops per leaf.

    The score loop is the only innermost loop that loads vectors and reads no LDS (the query comes by scalar loads). A
    value loop does both; arithmetic "integer" has another such loop before it, over the scales. None where the loops
    are not as many as ``trips``, or a loop has a conditional part.
    """
    scores, values = list[float | None](), list[float | None]()
    for loop, straight in innermost_loops(isa):
        if any(map(_VECTOR_LOAD.match, loop)):
            issued = values if any(op.startswith(("ds_read", "ds_load")) for op in loop) else scores
            issued.append(float(sum(not _FREE.match(op) for op in loop)) if straight else None)
    return _per_key(scores, trips[:1]), _per_key(values, trips[1:])


def _per_key(issued: list[float | None], trips: tuple[float, ...]) -> float | None:
    whole = [cycles * trip / KEYS_PER_LEAF for cycles, trip in zip(issued, trips, strict=False) if cycles is not None]
    return sum(whole) if len(whole) == len(issued) == len(trips) else None
