"""Compiling for a GPU that is not here: ``worker`` does it in child processes, whose environment offers the GPU."""

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from ...canonical.constants import CHUNK, KEYS_PER_LEAF
from ...errors import KernelError, NoVulkanError
from ...kernels.declarations import PRIMITIVES, KernelDecl
from ...kernels.families import Layout, layout_of
from ...kernels.sizes import attend_sizes, chunks_ahead
from ...runtime.device import SPIRV
from .gates import Compiled, VariantReport
from .isa import leaf_cycles, main_loops
from .targets import HOW, Compiler
from .variants import Spec, all_specs

HERE = Compiler()
# A kernel, its specialization constants, and where they are not 32 the invocations of a wave.
Program = tuple[KernelDecl, tuple[int, ...]] | tuple[KernelDecl, tuple[int, ...], int]


def compile_variants(specs: Sequence[Spec] | None = None, compiler: Compiler = HERE) -> list[VariantReport]:
    """Compile ``specs``, by default ``all_specs``. NoVulkanError: nothing can be; KernelError: it refuses one."""
    wanted = all_specs(compiler.name, layout_for(compiler)) if specs is None else list(specs)
    count = max(1, min(len(wanted), os.cpu_count() or 1))
    shares = [[(*spec.program(), spec.lanes) for spec in wanted[i::count]] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(partial(compile_programs, compiler=compiler), shares))
    return [_read(spec, answers[i % count][i // count], compiler) for i, spec in enumerate(wanted)]


def compile_programs(programs: Sequence[Program], compiler: Compiler = HERE) -> list[dict[str, Any]]:
    """{"wave", "statistics", "isa"} per program, from one child process; isa is RADV's alone."""
    jobs = []
    for decl, spec, *lanes in programs:
        path, constants = str(SPIRV / decl.file), decl.constants(spec)
        jobs.append((path, len(decl.bindings), constants, decl.fused(spec), False, *lanes))
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    ran = subprocess.run(**compiler.process(), input=lines, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if "conformant" not in line]
        raise NoVulkanError(f"compiling for {compiler.name}: {said[-1] if said else 'the driver died'}; {HOW}")
    return [read_answer(line) for line in ran.stdout.splitlines()]


@cache
def layout_for(compiler: Compiler) -> Layout:
    """The layout of pass 1 in the target's registers, which depends on Mesa's version, too."""
    (answer,) = compile_programs([(PRIMITIVES, ())], compiler)
    return layout_of("discrete", compiler.target.driver.vendor, answer["mesa"], compiler.target.subgroup)


def read_answer(line: str) -> dict[str, Any]:
    """The worker's answer to a job. KernelError: RADV refuses the program."""
    answer: dict[str, Any] = json.loads(line)
    if "refused" in answer:
        raise KernelError(answer["refused"])
    return answer


def _read(spec: Spec, answer: Mapping[str, Any], compiler: Compiler) -> VariantReport:
    isa = answer["isa"]
    wmma = len(re.findall(r"\bv_wmma_", isa)) if isa else None
    loops = main_loops(isa, _trips(spec)) if spec.call == "attend" else (None, None)
    leaf = leaf_cycles(isa) if spec.call == "attend_matrix" and wmma else None
    per_key = leaf and leaf * spec.waves / KEYS_PER_LEAF
    return VariantReport(Compiled.read(answer, compiler), spec, *loops, wmma, per_key)


def _trips(spec: Spec) -> tuple[float, ...]:
    """Trips of the main loops per leaf. Their source forbids to unroll them: a trip is what pass 1 has in flight."""
    ahead = chunks_ahead("discrete", spec.shape.k_dim, spec.layout)
    sizes = attend_sizes(spec.shape, spec.heads, spec.dtype, spec.layout)
    powers = (KEYS_PER_LEAF / sizes["POWER_KEYS"],) if spec.arithmetic == "integer" else ()
    values = sizes["VALUE_PASSES"] * KEYS_PER_LEAF / sizes["KEYS_AHEAD"]
    return spec.shape.k_dim / (CHUNK * ahead), *powers, values
