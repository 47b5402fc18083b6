"""The figures of compiled programs, the gates that they must keep, and the table of pass 1, pass 2 and encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

from ... import limits
from ...kernels.sizes import attend_sizes
from ..cost.cards import RDNA4
from .targets import RADV, TARGETS, Compiler
from .variants import Spec

LDS_PER_SIMD, LDS_STEP = 32 << 10, 1 << 10  # a compute unit of two SIMDs has 64 KiB

MATRIX_LDS_BYTES: Final = 64 << 10  # two compute units then hold two workgroups with matrix units
MAX_LDS_BYTES: Final = 4096  # of a workgroup; pass 1's is shared_bytes
# The most registers and, after a slash, spills of each class of programs, by target and Mesa. Without a slash no spills
# and no scratch memory are allowed. matrix, wide: pass 1 on matrix units, and of more than 256 dimensions. shared: of
# more than 8 query vectors. vec: mul_mat_vec of one column. graph: every other kernel of a graph; no registers gate.
_GATES: Final = """
target    Mesa  matrix  attend  wide    shared  encode  merge  vec   graph
gfx1201   25    256     120     192     256     192     120    96    -
gfx1201   26    256     120     192     256     192     120    96    -/3
gfx1151   25    -       120     192     192     -       120    96    -
gfx1151   26    -       120     192     192     -       120    96    -/3
gfx1100   25    -       120     192     216     -       120    96    -
gfx1100   26    -       120     192     192     -       120    96    -/2
gfx1030   25    -       128     128     208     -       128    80    -
gfx1030   26    -       128     128     176     -       128    128   -/2
turing    26    -       128     128/1   -       -       88     136   -
ampere    26    -       128     128/1   -       -       88     136   -
ada       26    -       128     128/1   -       -       88     136   -
hopper    26    -       128     128/1   -       -       88     136   -
blackwell 26    -       128     128/1   -       -       88     136   -
bmg       26    -       -/33    -       -       -       -      -/55  -/61
lnl       26    -       -/33    -       -       -       -      -/55  -/61
ptl       26    -       -       -       -       -       -      -     -
dg2       26    -       -/267   -/628   -       -       -      -/481 -/1815
"""
_HEAD, *_LINES = (line.split() for line in _GATES.strip().splitlines())


def _gate(cell: str) -> tuple[float, int]:
    """(registers, spills)."""
    registers, _, spills = cell.partition("/")
    return inf if registers == "-" else int(registers), int(spills or 0)


GATES: Final = {
    (target, int(mesa)): dict(zip(_HEAD[2:], map(_gate, cells), strict=True)) for target, mesa, *cells in _LINES
}
# Issue cycles per key of workgroups with 64 query vectors, of gfx1201.
LEAF_GATES: Final = {
    f"attend_matrix_q8_0:{dims}:64:integer": most for dims, most in ((64, 160), (128, 256), (256, 440))
}


class Compiled(NamedTuple):
    """The figures of a compiled program. Sizes are in bytes; ``statistics`` has every number as the driver names it.

    spilled: AMD's vector and scalar registers, elsewhere spills and fills. shared: None where the driver does not tell.
    cycles: the driver's own estimate for a wave. waves: as many as the registers of a SIMD hold, None where unknown;
    with null hardware, RADV's 'Subgroups per SIMD' assumes a file of 1024 registers.
    """

    name: str
    mesa: int
    wave: int
    registers: int
    spilled: tuple[int, ...]
    scratch: int
    shared: int | None
    instructions: int
    cycles: int
    waves: int | None
    statistics: Mapping[str, int]

    @classmethod
    def read(cls, answer: Mapping[str, Any], compiler: Compiler) -> Compiled:
        """The figures in a worker's answer."""
        statistics, family, driver = answer["statistics"], compiler.target.family, compiler.target.driver
        registers, scratch, instructions, cycles = (statistics[name] for name in driver.figures)
        spilled, waves = tuple(statistics[name] for name in driver.spills), family and family.waves(registers)
        shared, told = statistics.get(driver.shared), (compiler.name, answer["mesa"], int(answer["wave"]))
        return cls(*told, registers, spilled, scratch, shared, instructions, cycles, waves, statistics)

    def broken(self, name: str, kind: str, shared: float, lanes: int = limits.WAVE) -> Iterator[str]:
        """One sentence per gate of a class that the program called ``name`` breaks; shared: the most shared memory."""
        registers, spills = GATES.get((self.name, self.mesa), {}).get(kind, (inf, 0))
        for what, got, most in (
            ("spilled registers", sum(self.spilled), spills),
            ("scratch bytes", self.scratch if not spills else 0, 0),
            ("LDS bytes", self.shared or 0, shared),
            ("registers", self.registers, registers),
        ):
            if got > most:
                yield f"{name}: {got} {what}, at most {most:g} allowed"
        if self.wave != lanes:
            yield f"{name}: wave{self.wave}, wave{lanes} needed"


@dataclass(frozen=True)
class VariantReport:
    """The figures of one compiled variant.

    qk, pv: issue cycles per key of the two main loops (scores, values), None where they were not recognized beyond
    doubt. wmma: instructions of the matrix units in the program's text, None without a text. leaf: of a program with
    them, issue cycles of a workgroup per key, None where they were not recognized.
    """

    compiled: Compiled
    spec: Spec
    qk: float | None
    pv: float | None
    wmma: int | None = 0
    leaf: float | None = None

    @property
    def waves_by_lds(self) -> float | None:
        """Waves per SIMD that the LDS of an AMD compute unit holds, on average."""
        if TARGETS[self.compiled.name].driver is not RADV:
            return None
        steps = -(-(self.compiled.shared or 0) // LDS_STEP)
        most = RDNA4.wave_slots
        return min(most, self.spec.waves * LDS_PER_SIMD / (steps * LDS_STEP)) if steps else most

    @property
    def issue_per_key(self) -> float | None:
        """Issue cycles of the main loops per key and KV head, over all head chunks."""
        return self.leaf if self.qk is None or self.pv is None else self.spec.chunks * (self.qk + self.pv)


def _lds_gate(spec: Spec) -> int:
    """LDS bytes that a workgroup may have, in the steps in which they are allocated."""
    if spec.call == "attend_matrix":
        return MATRIX_LDS_BYTES
    if spec.call == "attend":
        sizes = attend_sizes(spec.shape, spec.heads, spec.dtype, spec.layout, spec.lanes)
        unused = 0 if spec.arithmetic == "integer" else 4 * sizes["VALUE_POWERS"]
        return -(-(sizes["SHARED_BYTES"] - unused) // LDS_STEP) * LDS_STEP
    return MAX_LDS_BYTES


def violations(reports: Iterable[VariantReport]) -> Iterator[str]:
    """One sentence per broken gate."""
    for r in reports:
        yield from r.compiled.broken(r.spec.name, r.spec.kind, _lds_gate(r.spec), r.spec.lanes)
        if r.wmma == 0 and r.spec.call == "attend_matrix":
            yield f"{r.spec.name}: no instruction of the matrix units"
        if (r.leaf or inf) > (cycles := LEAF_GATES.get(r.spec.name, inf)):
            yield f"{r.spec.name}: {r.leaf} issue cycles a key, at most {cycles} allowed"


_RADV: Final = ("Code size", "VALU", "VOPD", "VMEM", "SMEM", "SGPRs", "Subgroups per SIMD")  # columns of RADV alone


def table(reports: Sequence[VariantReport]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line per variant, of one compiler.

    cycles is the driver's figure for a wave. waves: by registers; byLDS: by shared memory. QK, PV and issue/key are
    issue cycles per key and KV head, which are read in RADV's text.
    """
    radv = TARGETS[reports[0].compiled.name].driver is RADV
    columns = ["kernel", "dim", "heads", "wave", "registers", "spills", "scratch", "LDS", "instr", "cycles", "waves"]
    if radv:
        columns += ["byLDS", "QK", "PV", "issue/key", *(name.replace(" ", "-") for name in _RADV)]
    lines = []
    for r in reports:
        compiled, issue = r.compiled, [None if x is None else x * r.spec.chunks for x in (r.qk, r.pv)]
        spills = "+".join(map(str, compiled.spilled)) if any(compiled.spilled) else 0
        cells: list[Any] = [r.spec.kernel + r.spec.said, r.spec.dims, r.spec.heads, compiled.wave, compiled.registers]
        cells += [spills, compiled.scratch, compiled.shared, compiled.instructions, compiled.cycles, compiled.waves]
        if radv:
            cells += [r.waves_by_lds, *issue, r.issue_per_key, *(compiled.statistics.get(name) for name in _RADV)]
        lines.append(["-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    return columns, lines
