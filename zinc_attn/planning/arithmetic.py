"""The arithmetic of a request's rows."""

from typing import Final, Literal, get_args

from ..errors import DTypeError
from ..kernels.matrix import MATRIX_VECTORS
from ..shapes import AttnShape
from ..storage import STORAGE, storage_types

Arithmetic = Literal["canonical", "fused", "integer", "matrix", "matrix-prefill"]
ARITHMETICS: Final[tuple[Arithmetic, ...]] = get_args(Arithmetic)
EXACT: Final[tuple[Arithmetic, ...]] = ("canonical", "fused", "integer")  # with one result on every device


def check_types(arithmetic: Arithmetic, dtype: str) -> None:
    """DTypeError for "integer" with types of K or V whose values are no integers times a scale."""
    if arithmetic == "integer" and (others := [kind for kind in storage_types(dtype) if not kind.integers]):
        raise DTypeError(
            f"arithmetic: got 'integer' with a cache of {others[0].name}, expected types with an integer "
            f"times a scale: {', '.join(name for name, kind in STORAGE.items() if kind.integers)}"
        )


def on_matrices(arithmetic: Arithmetic, q_len: int, shape: AttnShape) -> bool:
    """Whether matrix units attend a request of ``q_len`` rows, for "integer" if the device has such units."""
    if arithmetic in ("matrix-prefill", "integer"):
        return q_len * shape.group >= MATRIX_VECTORS
    return arithmetic == "matrix"
