"""The compiler gate: the shipped kernels under RADV's compiler for RDNA4, on a machine without the card."""

from .compiler import compile_variants, isa_text, missing
from .gates import table, violations
from .variants import FAMILIES, Spec

__all__ = ["FAMILIES", "Spec", "compile_variants", "isa_text", "missing", "table", "violations"]
