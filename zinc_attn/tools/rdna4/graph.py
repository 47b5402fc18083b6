"""The gate of the graph's kernels: wave32, no spills, no scratch memory, and no more LDS than a workgroup may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...graph.programs import PROGRAMS
from ...limits import WAVE
from .compiler import compile_programs

MOST: Final = {"Spilled VGPRs": 0, "Spilled SGPRs": 0, "Scratch size": 0, "LDS size": 32 << 10}


def graph_violations() -> Iterator[str]:
    """One sentence per broken gate."""
    made = compile_programs([(kernel.decl, spec) for kernel, spec in PROGRAMS])
    for (kernel, spec), one in zip(PROGRAMS, made, strict=True):
        yield from broken(f"{kernel.name} {list(spec)}", one)


def broken(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    """What a program breaks, of its name and ``compile_programs``' answer."""
    for what, most in MOST.items():
        if one["statistics"][what] > most:
            yield f"{name}: {one['statistics'][what]} {what}, at most {most} allowed"
    if int(one["wave"]) != WAVE:
        yield f"{name}: wave{one['wave']}, wave{WAVE} needed"
