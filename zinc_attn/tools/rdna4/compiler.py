"""RADV's compiler for gfx1201, without the card.

Mesa 25.0 offers 'Null hardware (RADV GFX1201)', which compiles pipelines and runs nothing. Environment variables choose
it, so ``worker`` does the compiling in child processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ...canonical.constants import CHUNK, KEYS_PER_LEAF
from ...errors import KernelError, NoVulkanError
from ...kernels.declarations import KernelDecl
from ...kernels.sizes import attend_sizes, chunks_ahead
from ...runtime.device import SPIRV
from .gates import VariantReport
from .isa import leaf_cycles, main_loops
from .variants import Spec, all_specs

ICD_FOLDERS: Final = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
NEEDED_MESA: Final = (
    "RADV of Mesa 25.0 to 25.2 (older ones do not know the chip, newer ones want a shim, see docs/cli.md)"
)
PACKAGE_ROOT: Final = Path(__file__).parents[3]
WORKER: Final = (sys.executable, "-m", f"{__package__}.worker")
Program = tuple[KernelDecl, tuple[int, ...]]  # a kernel and its specialization constants


def compile_variants(specs: Sequence[Spec] | None = None) -> list[VariantReport]:
    """Compile ``specs``, by default ``all_specs()``. NoVulkanError: nothing can be; KernelError: it refuses one."""
    wanted = all_specs() if specs is None else list(specs)
    count = max(1, min(len(wanted), os.cpu_count() or 1))
    shares = [[spec.program() for spec in wanted[i::count]] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(compile_programs, shares))
    return [_read(spec, made[i % count][i // count]) for i, spec in enumerate(wanted)]


def compile_programs(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """{"wave", "statistics", "isa"} per program, from one child process."""
    jobs = []
    for decl, spec in programs:
        jobs.append((str(SPIRV / decl.file), len(decl.bindings), decl.constants(spec), decl.fused(spec), False))
    given = "".join(json.dumps(job) + "\n" for job in jobs)
    ran = subprocess.run(WORKER, input=given, env=environment(), capture_output=True, text=True, check=False)
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if "conformant" not in line]
        raise NoVulkanError(f"compiling for gfx1201 needs {NEEDED_MESA}; here: {said[-1] if said else 'it died'}")
    return [read_answer(line) for line in ran.stdout.splitlines()]


def read_answer(line: str) -> dict[str, Any]:
    """The worker's answer to a job. KernelError: RADV refuses the program."""
    made: dict[str, Any] = json.loads(line)
    if "refused" in made:
        raise KernelError(made["refused"])
    return made


def _read(spec: Spec, one: Mapping[str, Any]) -> VariantReport:
    """A worker's answer for one variant."""
    wmma = len(re.findall(r"\bv_wmma_", one["isa"]))
    loops = main_loops(one["isa"], _trips(spec)) if spec.call == "attend" else (None, None)
    leaf = leaf_cycles(one["isa"]) if spec.call == "attend_matrix" and wmma else None
    per_key = leaf and leaf * spec.waves / KEYS_PER_LEAF
    return VariantReport(spec, int(one["wave"]), one["statistics"], *loops, wmma, per_key)


def _trips(spec: Spec) -> tuple[float, ...]:
    """Trips of the main loops per leaf. Their source forbids to unroll them: a trip is what pass 1 has in flight."""
    ahead = chunks_ahead("discrete", spec.shape.k_dim)
    sizes = attend_sizes(spec.shape, spec.heads, spec.dtype)
    powers = (KEYS_PER_LEAF / sizes["POWER_KEYS"],) if spec.arithmetic == "integer" else ()
    values = sizes["VALUE_PASSES"] * KEYS_PER_LEAF / sizes["KEYS_AHEAD"]
    return spec.shape.k_dim / (CHUNK * ahead), *powers, values


def environment() -> Mapping[str, str]:
    """The environment in which the loader offers RADV alone, and RADV the chip alone."""
    chosen = os.environ.get("ZINC_ATTN_RADV_ICD")  # for a Mesa unpacked beside the system's
    paths = [Path(chosen)] if chosen else [p for d in ICD_FOLDERS for p in sorted(Path(d).glob("radeon_icd*.json"))]
    icd = next((str(p) for p in paths if p.is_file()), None)
    if icd is None:
        where = chosen or f"radeon_icd*.json in {', '.join(ICD_FOLDERS)}"
        raise NoVulkanError(f"there is no {where}: install mesa-vulkan-drivers with {NEEDED_MESA}")
    dropped = ("VK_ADD_DRIVER_FILES", "VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE", "VK_INSTANCE_LAYERS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("RADV_")}
    return kept | {
        "RADV_FORCE_FAMILY": "gfx1201",
        "VK_ICD_FILENAMES": icd,
        "VK_DRIVER_FILES": icd,
        "MESA_SHADER_CACHE_DISABLE": "true",  # statistics exist only for what is compiled now
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE_ROOT), kept.get("PYTHONPATH")))),
    }
