"""The tiles of products by int8 matrix units. None of this shows in the bits."""

from __future__ import annotations

from typing import Final

from ..kernels.matrix import MatrixFragment
from ..limits import WAVE

HALVED: Final = ("q2_K", "q3_K", "q6_K")  # scales of 16 values: a product of 32 has two sums
TWO_SUMS: Final = ("q2_K", "q4_K", "q5_K")  # an output has that of the minima, too


def tile_of_units(kind: str, mat: MatrixFragment, subgroup: int = WAVE, on_cpu: bool = False) -> tuple[int, ...] | None:
    """Constants of MUL_MAT_UNITS between type and add, for a large product; None where a shape has not the type.

    A subgroup has as many matrices as its registers hold sums of. native/ggml/products.cpp has the same rule.
    """
    if kind in HALVED and mat.k > 16:
        return None
    across, own = (2, 2) if on_cpu else (4, 2), (2, 2) if on_cpu or kind in TWO_SUMS else (2, 4)
    return mat.m * own[0] * across[0], mat.n * own[1] * across[1], *own, subgroup * across[0] * across[1], *mat
