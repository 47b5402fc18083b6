"""The output of attention calls, the right output by the oracle or float64, and the first difference."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...cache.rows import stored, stored_scales
from ...canonical.constants import BIASES
from ...canonical.matrix_bound import matrix_bound
from ...canonical.state import F32, F64
from ...planning.arithmetic import EXACT, Arithmetic
from .inputs import NUMPY_DTYPES

Rows = NDArray[Any]  # K or V, as a cache takes them
Place = tuple[int, ...]
ORACLE_PRODUCTS: Final = 1 << 30  # rows * context * q_heads * head_dim up to which a tool computes every head


class Output(NamedTuple):
    """out (..., q_heads, head_dim) and lse (..., q_heads), float32."""

    out: F32
    lse: F32

    def digest(self) -> str:
        """SHA-256 of the bytes of out, then those of lse, as little-endian float32."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in self)).hexdigest()


class Truth(NamedTuple):
    """out (..., q_heads, v_head_dim) and lse (..., q_heads) of a call in float64, and the bound of each."""

    out: F64
    lse: F64
    out_bound: F64
    lse_bound: F64

    def share(self, got: Output) -> float:
        """The largest error over its bound; infinite for a NaN. ``got`` may have more heads in front."""
        parts = _shares(got.out, self.out, self.out_bound), _shares(got.lse, self.lse, self.lse_bound)
        return float(max(part.max(initial=0.0) for part in parts))


Expected = Output | Truth  # a call's right output: these bits, or numbers within the bound of matrix arithmetic
Judge = Callable[..., Output]  # ``oracle``, or a function with its arguments and bits


def oracle(
    q: F32, k: Rows, v: Rows, dtype: str, kv_heads: int | None = None, masking: Mapping[str, Any] | None = None
) -> Output:
    """The oracle's output for the query heads of the last ``kv_heads`` KV heads (None: of all of them).

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim) as a cache of ``dtype``
    takes them; masking: keyword arguments of ``reference.emulate``. The last heads have the largest buffer offsets.
    """
    return Output(*by_kv_head(reference.emulate, q, k, v, dtype, kv_heads, masking))


def oracle_options(arithmetic: Arithmetic) -> dict[str, Any]:
    """The options of ``oracle`` for calls of an arithmetic that do not go to matrix units."""
    return {"arithmetic": arithmetic if arithmetic in EXACT else "canonical"}


def by_kv_head(
    attend: Callable[..., Iterable[Rows]],
    q: F32,
    k: Rows,
    v: Rows,
    dtype: str,
    kv_heads: int | None,
    masking: Mapping[str, Any] | None,
) -> Iterator[Rows]:
    """A reference's arrays, like out and like lse by turns, made for each KV head and concatenated.

    Arguments as in ``oracle``. KV heads come one after the other, so that only one is held as float32.
    """
    held, parts = k.shape[1], []
    for head in range(held - (held if kv_heads is None else kv_heads), held):
        queries, keys, values, options = of_heads(q, k, v, masking or {}, head, head + 1)
        if options.get("arithmetic") == "integer":
            options |= stored_scales(keys, values, dtype)
        if dtype not in NUMPY_DTYPES:
            keys, values = stored(keys, values, dtype)
        parts.append(attend(queries, keys, values, **options))
    for arrays, heads_axis in zip(zip(*parts, strict=True), cycle((-2, -1))):
        yield np.concatenate(arrays, heads_axis)


def of_heads(
    q: F32, k: Rows, v: Rows, options: Mapping[str, Any], begin: int, end: int
) -> tuple[F32, Rows, Rows, dict[str, Any]]:
    """The KV heads [begin, end), with their query heads and options."""
    group = q.shape[-2] // k.shape[1]
    served = slice(begin * group, end * group)
    per_head = {name: x[served] for name in ("sinks", *BIASES) if (x := options.get(name)) is not None}
    return q[..., served, :], k[:, begin:end], v[:, begin:end], {**options, **per_head}


def truth(
    q: F32, k: Rows, v: Rows, dtype: str, kv_heads: int | None = None, masking: Mapping[str, Any] | None = None
) -> Truth:
    """The float64 output of the query heads of the last ``kv_heads`` KV heads; arguments as in ``oracle``."""

    def bounded(*call: Any, **options: Any) -> tuple[F64, ...]:
        return (*reference.attention(*call, **options), *matrix_bound(*call, **options))

    return Truth(*by_kv_head(bounded, q, k, v, dtype, kv_heads, masking))


@dataclass(frozen=True)
class Difference:
    """The first wrong element, and the number of wrong elements. bound: None where every bit must be equal."""

    array: str
    index: Place
    got: np.float32
    expected: np.float32 | np.float64
    bound: np.float64 | None
    count: int
    size: int

    @property
    def ulp(self) -> int | None:
        """How many float32 numbers the two values lie apart; None where one of them is not a number."""
        if np.isnan(self.got) or np.isnan(self.expected):
            return None
        places = (int(x.view(np.uint32)) for x in (self.got, self.expected))
        got, expected = (int(x & 0x7FFFFFFF) * (-1 if x >> 31 else 1) for x in places)
        return abs(got - expected)

    def text(self, ulp: bool = False, lead: Place = ()) -> str:
        """The element with both values; with their bits where these must be equal, and with ``ulp`` their distance.

        lead: indices in front of its own.
        """
        place, counts = ", ".join(map(str, (*lead, *self.index))), f"{self.count:,} of {self.size:,} elements"
        if self.bound is not None:
            values = f"got {self.got:.9g}, expected {self.expected:.9g} within {self.bound:.3g}"
            return f"{self.array}[{place}]: {values}; {counts} are beyond the bound"
        got, expected = (f"{x:.9g} (0x{int(x.view(np.uint32)):08x})" for x in (self.got, self.expected))
        distance = "" if not ulp else ", not a number" if self.ulp is None else f", {self.ulp:,} ulp apart"
        return f"{self.array}[{place}]: got {got}, expected {expected}{distance}; {counts} differ"


def first_difference(array: str, got: F32, want: F32 | F64, bound: F64 | None = None) -> Difference | None:
    """The first element of ``got`` whose bits are not those of ``want``, or beyond ``bound`` from it; None if none is.

    ``want`` may be smaller: it is compared with the last elements of every axis. The index counts in ``got``.
    """
    last = _last_elements(got, want.shape)
    if bound is not None:
        wrong = _shares(got, want, bound) > 1
    else:
        wrong = np.ascontiguousarray(last).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    index = tuple(i + size - part for i, size, part in zip(place, got.shape, wrong.shape, strict=True))
    within = None if bound is None else bound[place]
    return Difference(array, index, last[place], want[place], within, int(wrong.sum()), wrong.size)


def compare(got: Output, want: Expected) -> Difference | None:
    """``first_difference`` of out, then of lse. ``want`` may be of the last rows and heads alone."""
    bounds = (want.out_bound, want.lse_bound) if isinstance(want, Truth) else (None, None)
    out = first_difference("out", got.out, want.out, bounds[0])
    return out or first_difference("lse", got.lse, want.lse, bounds[1])


def _last_elements(x: F32, shape: Place) -> F32:
    """The last elements of every axis, as many as ``shape`` has."""
    assert all(wanted <= size for size, wanted in zip(x.shape, shape, strict=True)), (x.shape, shape)
    return x[tuple(slice(size - wanted, None) for size, wanted in zip(x.shape, shape, strict=True))]


def _shares(got: F32, want: F32 | F64, bound: F64) -> F64:
    """Each error over its bound, of the last elements of every axis; infinite for a NaN."""
    last = _last_elements(got, want.shape)
    with np.errstate(invalid="ignore"):
        shares = np.where(last == want, 0.0, np.abs(last - want) / np.maximum(bound, np.finfo(np.float64).tiny))
    return np.where(np.isnan(shares), np.inf, shares)
