"""The compiler gate: the shipped kernels under RADV's compiler for gfx1201, on a machine without the card."""

from .compiler import compile_variants
from .gates import table, violations
from .graph import graph_programs, graph_violations
from .variants import USUAL, Spec, specs_for

__all__ = [
    "USUAL",
    "Spec",
    "compile_variants",
    "graph_programs",
    "graph_violations",
    "specs_for",
    "table",
    "violations",
]
