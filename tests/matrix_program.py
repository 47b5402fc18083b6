"""What a leaf costs a wave of attend_matrix in gfx1201's program: counted in the compiler's text, not modeled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import NamedTuple

import numpy as np

from zinc_attn import AttnShape
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.dispatches import MatrixVariant
from zinc_attn.kernels.matrix import matrix_workgroup
from zinc_attn.runtime.device import SPIRV
from zinc_attn.tools.cost import CARDS
from zinc_attn.tools.cost.matrix import PIECE, RDNA4_UNITS, TILE, MatrixGroup
from zinc_attn.tools.rdna4 import compiler

_BLOCK = re.compile(r"BB(\d+):?$")
_OPCODE = re.compile(r"(?:^|= |\s)((?:v|s|ds|buffer|global|scratch)_[a-z]\w*)")
_TARGET = re.compile(r"\bBB(\d+)\b")
_ISSUED = ("v_", "ds_", "buffer_", "global_", "scratch_", "s_load", "s_buffer_load")
LDS_CYCLES = {"b128": 4, "b64": 2, "b32": 1, "b16": 1, "d16": 1, "hi": 1}  # of 32 lanes at 128 bytes a clock
SHAPES = ("64/8/256", "32/8/128", "9/3/64", "8/2/192", "8/2/96")  # 8 heads or more, for any number of vectors


class LeafCount(NamedTuple):
    """Of a wave and a leaf. waits: for shared memory (ds), memory (load) and scalar loads (km)."""

    issue: int
    products: int
    lds: int
    lds_waits: int
    memory_waits: int
    scalar_waits: int
    barriers: int


def leaf_count(isa: str, score_trips: int) -> LeafCount:
    """The loop over leaves up to its last product; a loop inside with products has ``score_trips`` trips."""
    at, code, ends = -1, list[tuple[int, str]](), dict[int, int]()
    for line in isa.splitlines():
        text = line.split("//")[0].split(";")[0].strip()
        if label := _BLOCK.match(text):
            at = int(label[1])
        elif (found := _OPCODE.search(text)) and at >= 0:
            code.append((at, found[1]))
            branches = found[1].startswith(("s_branch", "s_cbranch"))
            to = _TARGET.search(text[found.end() :]) if branches else None
            if to and int(to[1]) <= at:
                ends[int(to[1])] = max(at, ends.get(int(to[1]), at))
    products = [block for block, op in code if "wmma" in op]
    loops = [(a, b) for a, b in ends.items() if a <= products[-1] <= b]
    begin = min(loops)[0]
    inner = {(a, b): any(a <= block <= b for block in products) for a, b in ends.items() if a > begin}
    total = np.zeros(len(LeafCount._fields), int)
    for block, op in code:
        if not begin <= block <= products[-1]:
            continue
        trips = 1
        for (a, b), multiplies in inner.items():
            if a <= block <= b:
                trips *= score_trips if multiplies else 0
        total += trips * np.array(_counts(op))
    return LeafCount(*total.tolist())


def _counts(op: str) -> tuple[int, ...]:
    """LeafCount's fields of one instruction."""
    lds = op.startswith("ds_")
    issues = op.startswith(_ISSUED) and "wmma" not in op
    kind = op.rsplit("_", 1)[-1]
    return (
        int(issues),
        int("wmma" in op),
        (LDS_CYCLES.get(kind, 1) * (2 if "2" in op.split("_")[1] else 1)) if lds else 0,
        int(op in ("s_wait_dscnt", "s_wait_loadcnt_dscnt")),
        int(op in ("s_wait_loadcnt", "s_wait_loadcnt_dscnt")),
        int(op == "s_wait_kmcnt"),
        int(op == "s_barrier_wait"),
    )


def compiled(groups: list[MatrixGroup]) -> list[dict[str, object]]:
    """The worker's answer for float16 programs of these workgroups."""
    jobs = []
    for group in groups:
        _, constants = MatrixVariant(group.shape, "f16", TILE, group.workgroup, 64).program()
        jobs.append([str(SPIRV / kernels.MATRIX.file), len(kernels.MATRIX.bindings), True, list(constants)])
    ran = subprocess.run(
        [sys.executable, "-m", "zinc_attn.tools.rdna4.worker"],
        input=json.dumps({"family": "gfx1201", "jobs": jobs}),
        env=dict(compiler._environment("gfx1201")),
        capture_output=True,
        text=True,
        check=True,
    )
    made: list[dict[str, object]] = json.loads(ran.stdout)["made"]
    return made


def counted(shapes: tuple[str, ...] = SHAPES) -> list[tuple[MatrixGroup, LeafCount, int]]:
    """(workgroup, counts, registers) of shapes with 64, 32 and 16 vectors; programs that spill are left out."""
    card = CARDS["r9700"]
    groups = []
    for text in shapes:
        shape = AttnShape.parse(text)
        for vectors in (64, 32, 16):
            wide = AttnShape(vectors, 1, shape.k_dim, shape.v_dim)
            workgroup = matrix_workgroup(wide, RDNA4_UNITS, "discrete", vectors)
            assert workgroup is not None
            groups.append(MatrixGroup.of(card, wide, workgroup, 1))
    found = []
    for group, one in zip(groups, compiled(groups), strict=True):
        stats = one["statistics"]
        assert isinstance(stats, dict)
        count = leaf_count(str(one["isa"]), -(-group.shape.k_dim // PIECE))
        if not stats["Spilled VGPRs"]:
            found.append((group, count, int(stats["VGPRs"])))
    return found


def fitted(rows: list[tuple[MatrixGroup, LeafCount, int]], field: str) -> tuple[float, ...]:
    """MatrixCounts that come nearest to a field of LeafCount, by relative errors."""
    terms = np.array([group.parts for group, _, _ in rows])
    want = np.array([float(getattr(count, field)) for _, count, _ in rows])
    found = np.linalg.lstsq(terms / want[:, None], np.ones(len(want)), rcond=None)[0]
    return tuple(round(float(x), 1) for x in found)


if __name__ == "__main__":
    made = counted()
    for group, count, vgprs in made:
        print(group.shape, group.workgroup, count, "VGPRs", vgprs)
    for name in ("issue", "lds", "lds_waits", "scalar_waits", "memory_waits"):
        print(name, fitted(made, name))
