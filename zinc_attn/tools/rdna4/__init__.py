"""The compiler gate: the shipped kernels under RADV's compiler for gfx1201, on a machine without the card."""

from ...graph.programs import PROGRAMS
from .compiler import compile_variants
from .gates import table, violations
from .graph import graph_violations
from .variants import USUAL, Spec, specs_for

__all__ = ["PROGRAMS", "USUAL", "Spec", "compile_variants", "graph_violations", "specs_for", "table", "violations"]
