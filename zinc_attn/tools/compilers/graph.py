"""The gates of the graph's kernels, and those of gfx1201's issue slots and matrix units."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ...graph.constants import SUPERBLOCK
from ...graph.declarations import DELTA_NET, MUL_MAT_UNITS, MUL_MAT_VEC, SSM_SCAN, WEIGHT_TYPES, GraphKernel
from ...graph.pieces import GROUP, TYPES
from ...graph.programs import PROGRAMS
from ...limits import WAVE
from ...runtime.device import SPIRV
from ..cost import CARDS
from .compiler import HERE, compile_programs, layout_for
from .gates import Compiled
from .isa import matrix_cycles
from .targets import RADV, Compiler

MOST_SHARED: Final = 32 << 10  # bytes of a workgroup
# The part of the card's issue slots that the vector instructions of mul_mat_vec take while their superblocks of 32 rows
# come from memory, by columns; below 1 memory is the limit.
MOST_ISSUED: Final = {1: 0.2, 8: 0.9}
MOST_OF_GLU: Final = 0.25  # of programs with glu: a superblock of gate and of up, and the GLU once
LEAST_AHEAD: Final = 4096  # bytes of weights that a wave of mul_mat_vec loads before it uses the first
# Cycles of mul_mat_units for a block of 32 values of 32 rows and 64 columns; 300 are 163 TOPS of the card. An output of
# q6_K has two products, and an output of the others a minimum.
MOST_CYCLES: Final = {"q6_K": 345} | dict.fromkeys(("q4_1", "q5_1", "q2_K", "q4_K", "q5_K"), 395)
MOST_CYCLES_ELSE: Final = 285


def graph_programs(compiler: Compiler = HERE) -> list[tuple[GraphKernel, tuple[int, ...]]]:
    """The programs that the gate compiles: matrix units are AMD's; several rows of states a lane need a wave of 32."""
    units, whole = compiler.target.driver is RADV, layout_for(compiler).lanes == WAVE
    return [
        (kernel, spec)
        for kernel, spec in PROGRAMS
        if (SPIRV / kernel.decl.file).exists()
        and (units or "units" not in kernel.name)
        and (whole or kernel not in (DELTA_NET, SSM_SCAN) or spec[1] == 1)
    ]


def kind(kernel: GraphKernel, spec: Sequence[int]) -> str:
    """The class of programs that a gate names."""
    vector = kernel is MUL_MAT_VEC and spec[kernel.decl.spec.index("columns")] == 1
    return "vec" if vector else "graph"


def graph_violations(compiler: Compiler = HERE) -> Iterator[str]:
    """One sentence per broken gate."""
    programs, least = graph_programs(compiler), layout_for(compiler).lanes
    lanes = [kernel.decl.wave(spec, least) for kernel, spec in programs]
    jobs = [(kernel.decl, spec, wave) for (kernel, spec), wave in zip(programs, lanes, strict=True)]
    answers = compile_programs(jobs, compiler)
    for (kernel, spec), wave, answer in zip(programs, lanes, answers, strict=True):
        name, compiled = f"{kernel.name} {list(spec)}", Compiled.read(answer, compiler)
        yield from compiled.broken(name, kind(kernel, spec), MOST_SHARED, wave)
        if compiler.name != "gfx1201":
            continue
        if kernel is MUL_MAT_VEC:
            yield from _of_products(name, spec, answer)
        if kernel is MUL_MAT_UNITS:
            most = MOST_CYCLES.get(WEIGHT_TYPES[spec[0]], MOST_CYCLES_ELSE)
            if (cycles := unit_cycles(spec, answer["isa"])) > most:
                yield f"{name}: {cycles:.0f} cycles of a block, at most {most} allowed"


def unit_cycles(spec: Sequence[int], isa: str) -> float:
    """``matrix_cycles`` of a subgroup's matrices, for eight of them."""
    _, _, _, own_rows, own_columns, *_ = spec
    return matrix_cycles(isa) * 8 / (own_rows * own_columns)


def _of_products(name: str, spec: tuple[int, ...], answer: Mapping[str, Any]) -> Iterator[str]:
    constants = dict(zip(MUL_MAT_VEC.decl.spec, spec, strict=True))
    weights = TYPES[WEIGHT_TYPES[constants["type"]]]
    loaded = constants["ahead"] * GROUP * SUPERBLOCK // weights.values * weights.size  # bytes
    matrices, most = (2, MOST_OF_GLU) if constants["glu"] else (1, MOST_ISSUED[constants["columns"]])
    if (part := issued(matrices * loaded, answer)) > most:
        yield f"{name}: {part:.1%} of the issue slots, at most {most:.0%} allowed"
    if loaded < LEAST_AHEAD:
        yield f"{name}: {loaded} bytes of weights on their way, at least {LEAST_AHEAD} needed"


def issued(loaded: int, answer: Mapping[str, Any]) -> float:
    """The part of the card's issue slots that vector instructions take while ``loaded`` bytes come from memory."""
    card, seconds = CARDS["r9700"], loaded / CARDS["r9700"].bandwidth  # billionths
    return float(answer["statistics"]["VALU"] / (seconds * card.compute_units * card.family.simds * card.clock_ghz))
