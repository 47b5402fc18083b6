"""The compiler gate: the shipped kernels under the compilers of GPUs that are not here. docs/compilers.md says how."""

from .compiler import compile_variants, layout_for
from .gates import table, violations
from .graph import graph_programs, graph_violations
from .targets import TARGETS, Compiler
from .variants import USUAL, Spec, specs_for

__all__ = [
    "TARGETS", "USUAL", "Compiler", "Spec", "compile_variants", "graph_programs", "graph_violations", "layout_for",
    "specs_for", "table", "violations",
]  # fmt: skip
