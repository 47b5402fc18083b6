"""The compiler gate: the shipped kernels under RADV's compiler for RDNA4, on a machine without the card."""

from .command import add_arguments, main, run
from .compiler import compile_variants, isa_text, missing
from .gates import VariantReport, table, violations
from .isa import Issue, main_loops
from .variants import FAMILIES, Spec, default_specs, specs_for

__all__ = [
    "FAMILIES",
    "Issue",
    "Spec",
    "VariantReport",
    "add_arguments",
    "compile_variants",
    "default_specs",
    "isa_text",
    "main",
    "main_loops",
    "missing",
    "run",
    "specs_for",
    "table",
    "violations",
]
