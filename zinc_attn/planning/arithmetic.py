"""Which arithmetic the rows of a request have."""

from __future__ import annotations

from typing import Final, Literal, get_args

from ..kernels.matrix import MATRIX_VECTORS
from ..shapes import AttnShape

Arithmetic = Literal["canonical", "fused", "integer", "matrix", "matrix-prefill"]
ARITHMETICS: Final[tuple[Arithmetic, ...]] = get_args(Arithmetic)
EXACT: Final[tuple[Arithmetic, ...]] = ("canonical", "fused", "integer")  # those with one result on every device


def on_matrices(arithmetic: Arithmetic, q_len: int, shape: AttnShape) -> bool:
    """Whether the rows of a request of ``q_len`` rows go to the matrix units, of "integer" where a device has them."""
    if arithmetic in ("matrix-prefill", "integer"):
        return q_len * shape.group >= MATRIX_VECTORS
    return arithmetic == "matrix"
