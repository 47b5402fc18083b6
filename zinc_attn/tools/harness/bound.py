"""What float64 says of a call, and whether the output of matrix arithmetic is within the bound of its roundings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...cache.rows import stored
from ...canonical.matrix_bound import matrix_bound
from .bits import F32, Output, compare
from .inputs import NUMPY_DTYPES

F64 = NDArray[np.float64]
_PER_HEAD: Final = ("sinks", "alibi")


class Truth(NamedTuple):
    """out (..., q_heads, v_head_dim) and lse (..., q_heads) of a call in float64, and the bound of each."""

    out: F64
    lse: F64
    out_bound: F64
    lse_bound: F64

    def share(self, got: Output) -> float:
        """The largest error over its bound; infinite for a NaN. ``got`` may have more heads in front."""
        return max(float(part.max(initial=0.0)) for part in self._parts(got))

    def out_share(self, out: F32) -> float:
        """``share`` of out alone."""
        return float(_shares(out, self.out, self.out_bound).max(initial=0.0))

    def beyond(self, got: Output) -> str | None:
        """The first element beyond its bound, in words; None where all are within."""
        truths = (self.out, self.out_bound), (self.lse, self.lse_bound)
        for name, array, share, (want, bound) in zip(got._fields, got, self._parts(got), truths, strict=True):
            if not np.any(share > 1):
                continue
            at = np.unravel_index(int((share > 1).argmax()), share.shape)
            first = tuple(size - wanted for size, wanted in zip(array.shape, want.shape, strict=True))
            index = tuple(int(i) + begin for i, begin in zip(at, first, strict=True))
            return (
                f"{name}[{', '.join(map(str, index))}]: got {array[index]:.9g}, expected {want[at]:.9g} within "
                f"{bound[at]:.3g}; {int((share > 1).sum()):,} of {share.size:,} elements are beyond the bound"
            )
        return None

    def _parts(self, got: Output) -> tuple[F64, F64]:
        """The errors of out and lse over their bounds, for the last rows and heads, which are those of the truth."""
        return _shares(got.out, self.out, self.out_bound), _shares(got.lse, self.lse, self.lse_bound)


def _shares(got: F32, want: F64, bound: F64) -> F64:
    """Each error over its bound, of the last elements of every axis; infinite for a NaN."""
    mine = got[tuple(slice(size - wanted, None) for size, wanted in zip(got.shape, want.shape, strict=True))]
    with np.errstate(invalid="ignore"):
        found = np.where(mine == want, 0.0, np.abs(mine - want) / np.maximum(bound, np.finfo(np.float64).tiny))
    return np.where(np.isnan(found), np.inf, found)


Expected = Output | Truth  # what a call must give: these bits, or numbers within a bound


def fault(got: Output, want: Expected) -> str | None:
    """The first element of ``got`` that is not as it must be, in words; None where all are."""
    if isinstance(want, Truth):
        return want.beyond(got)
    found = compare(got, want)
    return found.text() if found else None


def truth(
    q: F32,
    k: NDArray[Any],
    v: NDArray[Any],
    dtype: str,
    kv_heads: int | None = None,
    masking: Mapping[str, Any] | None = None,
) -> Truth:
    """What float64 says of the query heads of the last ``kv_heads`` KV heads; arguments as in ``bits.oracle``."""
    held = k.shape[1]
    group, options, parts = q.shape[-2] // held, dict(masking or {}), []
    by_head = {name: options[name] for name in _PER_HEAD if options.get(name) is not None}
    for head in range(held - (held if kv_heads is None else kv_heads), held):
        served = slice(head * group, (head + 1) * group)
        rows, keys, values = q[..., served, :], k[:, head : head + 1], v[:, head : head + 1]
        if dtype not in NUMPY_DTYPES:
            keys, values = stored(keys, values, dtype)
        options |= {name: x[served] for name, x in by_head.items()}
        out, lse = reference.attention(rows, keys, values, **options)
        parts.append((out, lse, *matrix_bound(rows, keys, values, **options)))
    axes = (-2, -1, -2, -1)
    return Truth(
        *(np.concatenate(column, axis=axis) for column, axis in zip(zip(*parts, strict=True), axes, strict=True))
    )
