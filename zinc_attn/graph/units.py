"""The tiles of products by int8 matrix units, for Python and C. No tile changes a bit."""

from typing import Final

from ..kernels.formulas import Formulas
from ..kernels.matrix import MatrixFragment
from ..limits import WAVE
from .constants import SUPERBLOCK
from .declarations import MUL_MAT_UNITS
from .pieces import TYPES

# Constants of MUL_MAT_UNITS from facts of a type of weights, the shape of a product of matrices, the invocations of a
# subgroup, and whether the device is a CPU and the product too small to fill a card with large workgroups.
UNITS_RULE: Final = Formulas(
    {
        "SERVED": ("HALVES == 0 or MAT_K <= 16", "a product of 32 values has both sums of a type of halves"),
        "SUMS": ("2 if MINIMUM == 1 and VALUES == SUPERBLOCK else 1", "of an output: that of the minima, too"),
        "OWN_ROWS": ("2", ""),
        "OWN_COLUMNS": ("2 if SUMS == 2 or ON_CPU == 1 else 4", "whose sums a subgroup's registers hold"),
        "ACROSS": ("2 if ON_CPU == 1 or SMALL == 1 else 4", "subgroups that share columns of x"),
        "DOWN": ("2", "and rows of w"),
        "TILE_ROWS": ("MAT_M * OWN_ROWS * ACROSS", ""),
        "TILE_COLUMNS": ("MAT_N * OWN_COLUMNS * DOWN", ""),
        "WORKGROUP_SIZE": ("SUBGROUP * ACROSS * DOWN", ""),
    },
    ("VALUES", "HALVES", "MINIMUM", "MAT_M", "MAT_N", "MAT_K", "SUBGROUP", "ON_CPU", "SMALL"),
    {"SUPERBLOCK": SUPERBLOCK},
)


def tile_of_units(kind: str, mat: MatrixFragment, subgroup: int = WAVE, on_cpu: bool = False) -> tuple[int, ...] | None:
    """Constants of MUL_MAT_UNITS between type and add, for a large product; None where the units lack the type."""
    weights = TYPES[kind]
    facts = weights.values, int(weights.halves), int(weights.minimum), *mat, subgroup, int(on_cpu), 0
    values = {**UNITS_RULE.values(*facts), **dict(zip(UNITS_RULE.inputs, facts, strict=True))}
    return tuple(values[name.upper()] for name in MUL_MAT_UNITS.decl.spec[1:-2]) if values["SERVED"] else None
