"""The compiler gate: the shipped kernels under RADV's compiler for RDNA4, on a machine without the card."""

from .compiler import compile_variants, isa_text, missing
from .gates import table, violations
from .variants import FAMILIES, UNEQUAL_SHAPES, USUAL, Spec, encode_specs, specs_for, unequal_specs

__all__ = [
    "FAMILIES",
    "UNEQUAL_SHAPES",
    "USUAL",
    "Spec",
    "compile_variants",
    "encode_specs",
    "isa_text",
    "missing",
    "specs_for",
    "table",
    "unequal_specs",
    "violations",
]
