"""What float64 says of a call, and whether the output of matrix arithmetic is within the bound of its roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...canonical.matrix_bound import matrix_bound
from .bits import F32, Output, Place, Rows, by_kv_head, compare, first_place, last_elements

F64 = NDArray[np.float64]


class Truth(NamedTuple):
    """out (..., q_heads, v_head_dim) and lse (..., q_heads) of a call in float64, and the bound of each."""

    out: F64
    lse: F64
    out_bound: F64
    lse_bound: F64

    def share(self, got: Output) -> float:
        """The largest error over its bound; infinite for a NaN. ``got`` may have more heads in front."""
        return max(self.out_share(got.out), float(_shares(got.lse, self.lse, self.lse_bound).max(initial=0.0)))

    def out_share(self, out: F32) -> float:
        """``share`` of out alone."""
        return float(_shares(out, self.out, self.out_bound).max(initial=0.0))

    def beyond(self, got: Output, of: Place = ()) -> str | None:
        """The first element beyond its bound, in words; None where all are within. of: indices in front of its own."""
        bounded = ("out", got.out, self.out, self.out_bound), ("lse", got.lse, self.lse, self.lse_bound)
        for name, array, want, bound in bounded:
            wrong = _shares(array, want, bound) > 1
            if wrong.any():
                at, index = first_place(wrong, array.shape)
                return (
                    f"{name}[{', '.join(map(str, (*of, *index)))}]: got {array[index]:.9g}, expected {want[at]:.9g} "
                    f"within {bound[at]:.3g}; {int(wrong.sum()):,} of {wrong.size:,} elements are beyond the bound"
                )
        return None


def _shares(got: F32, want: F64, bound: F64) -> F64:
    """Each error over its bound, of the last elements of every axis; infinite for a NaN."""
    mine = last_elements(got, want.shape)
    with np.errstate(invalid="ignore"):
        found = np.where(mine == want, 0.0, np.abs(mine - want) / np.maximum(bound, np.finfo(np.float64).tiny))
    return np.where(np.isnan(found), np.inf, found)


Expected = Output | Truth  # what a call must give: these bits, or numbers within a bound


def fault(got: Output, want: Expected, of: Place = ()) -> str | None:
    """The first element of ``got`` that is not as it must be, in words; None where all are. of: as in ``beyond``."""
    if isinstance(want, Truth):
        return want.beyond(got, of)
    found = compare(got, want)
    return replace(found, index=(*of, *found.index)).text() if found else None


def truth(
    q: F32, k: Rows, v: Rows, dtype: str, kv_heads: int | None = None, masking: Mapping[str, Any] | None = None
) -> Truth:
    """What float64 says of the query heads of the last ``kv_heads`` KV heads; arguments as in ``bits.oracle``."""

    def bounded(*call: Any, **options: Any) -> tuple[F64, ...]:
        return (*reference.attention(*call, **options), *matrix_bound(*call, **options))

    return Truth(*by_kv_head(bounded, q, k, v, dtype, kv_heads, masking))
