"""The arithmetic of a request's rows."""

from typing import Final, Literal, get_args

from ..kernels.matrix import MATRIX_VECTORS
from ..shapes import AttnShape

Arithmetic = Literal["canonical", "fused", "integer", "matrix", "matrix-prefill"]
ARITHMETICS: Final[tuple[Arithmetic, ...]] = get_args(Arithmetic)
EXACT: Final[tuple[Arithmetic, ...]] = ("canonical", "fused", "integer")  # with one result on every device


def on_matrices(arithmetic: Arithmetic, q_len: int, shape: AttnShape) -> bool:
    """Whether matrix units attend a request of ``q_len`` rows, for "integer" if the device has such units."""
    if arithmetic in ("matrix-prefill", "integer"):
        return q_len * shape.group >= MATRIX_VECTORS
    return arithmetic == "matrix"
