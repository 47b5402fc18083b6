"""What the compiler made of each variant, the gates that every variant must keep, and the table of them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from ... import limits
from ...kernels.sizes import attend_sizes
from ..cost import CARDS
from .variants import Spec

RDNA4: Final = CARDS["r9700"]  # its register file and wave slots are every RDNA4 chip's
LDS_PER_SIMD, LDS_STEP = 32 << 10, 1 << 10  # a compute unit of two SIMDs has 64 KiB

MATRIX_LDS_BYTES: Final = 64 << 10  # so that two compute units hold two workgroups with matrix units
MAX_LDS_BYTES: Final = 4096  # of a workgroup; pass 1's is shared_bytes
# (kernel name prefix, head_dim and v_head_dim up to, VGPRs up to): the first row that fits a variant holds for it.
VGPR_GATES: Final = (
    ("attend_matrix_", limits.MAX_HEAD_DIM, 256),  # 6 waves per SIMD
    ("attend_", 256, 120),  # 12
    ("attend_", limits.MAX_HEAD_DIM, 192),  # 8
    ("encode_", limits.MAX_HEAD_DIM, 192),  # 8, as many as its LDS leaves
    ("merge", limits.MAX_HEAD_DIM, 120),  # 12, of workgroups of 8
)
# Issue cycles per key of workgroups with 64 query vectors.
LEAF_GATES: Final = {
    f"attend_matrix_q8_0:{dims}:64:integer": most for dims, most in ((64, 160), (128, 256), (256, 440))
}
SHARED_GATE: Final = 256  # of more than 8 query vectors, where each wave has twice the work per byte: 5, of which 4 fit


@dataclass(frozen=True)
class VariantReport:
    """What the compiler made of one variant. Sizes are in bytes; ``statistics`` has every number as RADV names it.

    qk, pv: issue cycles per key of the two main loops (scores, values), None where they were not recognized beyond
    doubt. wmma: instructions of the matrix units in the program's text. leaf: of a program with them, issue cycles of a
    workgroup per key, None where they were not recognized.
    """

    spec: Spec
    wave: int
    statistics: Mapping[str, int]
    qk: float | None
    pv: float | None
    wmma: int = 0
    leaf: float | None = None

    @property
    def vgprs(self) -> int:
        return self.statistics["VGPRs"]

    @property
    def spills(self) -> int:
        """Spilled vector and scalar registers."""
        return self.statistics["Spilled VGPRs"] + self.statistics["Spilled SGPRs"]

    @property
    def lds_bytes(self) -> int:
        return self.statistics["LDS size"]

    @property
    def waves_per_simd(self) -> int:
        """Waves that the chip's registers hold. RADV's 'Subgroups per SIMD' assumes a file of 1024."""
        return RDNA4.waves(self.vgprs)

    @property
    def waves_per_simd_lds(self) -> float:
        """Waves per SIMD that the LDS holds, on average over a CU."""
        steps = -(-self.lds_bytes // LDS_STEP)
        return min(RDNA4.wave_slots, self.spec.waves * LDS_PER_SIMD / (steps * LDS_STEP)) if steps else RDNA4.wave_slots

    @property
    def issue_per_key(self) -> float | None:
        """Issue cycles of the main loops per key and KV head, over all head chunks."""
        return self.leaf if self.qk is None or self.pv is None else self.spec.chunks * (self.qk + self.pv)


def _lds_gate(spec: Spec) -> int:
    """LDS bytes that a workgroup may have, in the steps in which they are allocated."""
    if spec.call == "attend_matrix":
        return MATRIX_LDS_BYTES
    if spec.call == "attend":
        sizes = attend_sizes(spec.shape, spec.heads, spec.dtype)
        unused = 0 if spec.arithmetic == "integer" else 4 * sizes["VALUE_POWERS"]
        return -(-(sizes["SHARED_BYTES"] - unused) // LDS_STEP) * LDS_STEP
    return MAX_LDS_BYTES


def violations(reports: Iterable[VariantReport]) -> list[str]:
    """One sentence per broken gate."""
    found = []
    for r in reports:
        dims = max(r.spec.head_dim, r.spec.v_head_dim)
        gate = next(n for p, dim, n in VGPR_GATES if r.spec.kernel.startswith(p) and dims <= dim)
        for what, got, most in (
            ("spilled registers", r.spills, 0),
            ("scratch bytes", r.statistics["Scratch size"], 0),
            ("LDS bytes", r.lds_bytes, _lds_gate(r.spec)),
            ("VGPRs", r.vgprs, SHARED_GATE if r.spec.call == "attend" and r.spec.heads > 8 else gate),
        ):
            if got > most:
                found.append(f"{r.spec.name}: {got} {what}, at most {most} allowed")
        if not r.wmma and r.spec.call == "attend_matrix":
            found.append(f"{r.spec.name}: no instruction of the matrix units")
        if (r.leaf or inf) > (cycles := LEAF_GATES.get(r.spec.name, inf)):
            found.append(f"{r.spec.name}: {r.leaf} issue cycles a key, at most {cycles} allowed")
        if r.wave != limits.WAVE:
            found.append(f"{r.spec.name}: wave{r.wave}, wave{limits.WAVE} needed")
    return found


_RADV: Final = {  # columns of the table that are RADV's own numbers
    "code": "Code size",
    "instr": "Instructions",
    **{name: name for name in ("VALU", "VOPD", "VMEM", "SMEM")},
    "latency": "Latency",
    "sub/SIMD": "Subgroups per SIMD",
}


def table(reports: Sequence[VariantReport]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line per variant.

    sub/SIMD is RADV's figure, for 1024 registers; waves is for the chip's 1536, wavesLDS for its LDS. QK, PV and
    issue/key are issue cycles per key and KV head.
    """
    columns = ["kernel", "dim", "heads", "wave", "VGPR", "SGPR", "spill", "LDS", *_RADV]
    lines = []
    for r in reports:
        cells: list[Any] = [r.spec.kernel + r.spec.said, r.spec.dims, r.spec.heads, r.wave]
        cells += [r.vgprs, r.statistics["SGPRs"], r.spills, r.lds_bytes]
        cells += [r.statistics.get(name, "-") for name in _RADV.values()]
        cells += [r.waves_per_simd, f"{r.waves_per_simd_lds:.1f}"]
        issue = [None if x is None else x * r.spec.chunks for x in (r.qk, r.pv)]
        cells += ["-" if x is None else f"{x:.0f}" for x in (*issue, r.issue_per_key)]
        lines.append([str(cell) for cell in cells])
    return [*columns, "waves", "wavesLDS", "QK", "PV", "issue/key"], lines
