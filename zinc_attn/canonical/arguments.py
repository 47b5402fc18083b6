"""Arguments of the oracles: checks, and the keys that each query row sees."""

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_array, check_bool, check_float, check_int
from ..errors import ShapeError, ValueRangeError
from ..limits import MAX_CONTEXT
from . import constants
from .constants import BIASES
from .score_bound import ScoreBound, largest
from .state import F32

MAX_WINDOW: Final = 1 << 62  # positions are int64


def with_rows(q: NDArray[Any]) -> NDArray[Any]:
    return q[None] if q.ndim == 2 else q


def key_ranges(tokens: int, q_len: int, causal: bool, window: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """(first, limit) of each of q_len rows: row i sees keys [first, limit), first >= limit where it sees none."""
    reach = np.maximum(tokens - q_len + 1 + np.arange(q_len), 0)  # keys up to the row's own position
    limits = reach if causal else np.full(q_len, tokens)
    firsts = np.zeros(q_len, np.int64) if window is None else np.maximum(reach - window, 0)
    return firsts, limits


def checked_arrays(q: Any, k: Any, v: Any, dtypes: tuple[str, ...]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """q, k and v as arrays that fit each other and hold numbers that the kernels take: see ``attention``."""
    qa, ka, va = (check_array(name, x, dtypes) for name, x in (("q", q), ("k", k), ("v", v)))
    if qa.ndim not in (2, 3) or 0 in qa.shape:
        raise ShapeError(f"q: got shape {qa.shape}, expected (q_heads, head_dim) or (q_len, q_heads, head_dim)")
    if ka.ndim != 3 or not ka.shape[1] or ka.shape[2] != qa.shape[-1] or qa.shape[-2] % ka.shape[1]:
        raise ShapeError(
            f"k: got shape {ka.shape}, expected (tokens, kv_heads, {qa.shape[-1]}) with a kv_heads that divides q's "
            f"{qa.shape[-2]} heads"
        )
    if va.ndim != 3 or va.shape[:2] != ka.shape[:2] or not va.shape[2]:
        raise ShapeError(f"v: got shape {va.shape}, expected ({ka.shape[0]}, {ka.shape[1]}, v_head_dim), as k's")
    for name, x in (("q", qa), ("k", ka)):
        if x.ndim == 3 and len(x) > MAX_CONTEXT:
            raise ShapeError(f"{name}: got {len(x):,} tokens, expected at most {MAX_CONTEXT:,}")
    for name, x in (("q", qa), ("k", ka), ("v", va)):
        _check_magnitudes(name, x)
    return qa, ka, va


def _check_magnitudes(name: str, x: NDArray[Any]) -> None:
    """Refuse magnitudes beyond MAX_INPUT, compared as Python's floats: float16 would round the bound to inf."""
    if not largest(x) <= constants.MAX_INPUT:  # false for NaN too
        raise ValueRangeError(f"{name}: got a NaN, an infinity or a magnitude beyond 2**60, expected none")


def check_scale(scale: Any, head_dim: int) -> float:
    """A factor that float32 holds to full precision, by default 1 / sqrt(head_dim), and never 0."""
    expected = "a magnitude from 2**-126 to 2**126, or None for 1 / sqrt(head_dim)"
    value = 1.0 / math.sqrt(head_dim) if scale is None else check_float("scale", scale, expected)
    if not 2.0**-126 <= abs(value) <= 2.0**126:
        raise ValueRangeError(f"scale: got {value:g}, expected {expected}")
    return value


def check_window(window: Any) -> int | None:
    """A window in keys, or None."""
    return None if window is None else check_int("window", window, 1, MAX_WINDOW)


def check_softcap(softcap: Any) -> float | None:
    """A cap within the range of inputs, rounded to float32, or None."""
    expected = "a number from 2**-40 to 2**60, or None for no cap"
    value = None if softcap is None else check_float("softcap", softcap, expected)
    if value is not None and not constants.MIN_INPUT <= value <= constants.MAX_INPUT:
        raise ValueRangeError(f"softcap: got {value:g}, expected {expected}")
    return None if value is None else float(np.float32(value))


def _check_per_head(name: str, value: Any, q_heads: int, what: str) -> NDArray[Any] | None:
    """An array (q_heads,) of any values, or None. what: an element of it."""
    array = None if value is None else check_array(name, value, ("float32", "float16", "float64", "bfloat16"))
    if array is not None and array.shape != (q_heads,):
        raise ShapeError(f"{name}: got shape {array.shape}, expected ({q_heads},), {what} per query head")
    return array


def check_sinks(sinks: Any, q_heads: int) -> NDArray[Any] | None:
    """An array (q_heads,) of any values, or None."""
    return _check_per_head("sinks", sinks, q_heads, "a logit")


def check_slopes(name: str, value: Any, q_heads: int) -> NDArray[Any] | None:
    """Slopes (q_heads,), of a bias or of masks, or None."""
    array = _check_per_head(name, value, q_heads, "a slope")
    if array is not None:
        _check_magnitudes(name, array)
    return array


def log2_slopes(name: str, slopes: Any, q_heads: int) -> F32 | None:
    """Slopes (q_heads,), of a bias or of masks, checked, in log2 units, rounded once from float64; or None."""
    array = check_slopes(name, slopes, q_heads)
    return None if array is None else _in_log2(array)


def _in_log2(slopes: NDArray[Any]) -> F32:
    return (slopes.astype(np.float64) * constants.LOG2E).astype(np.float32)


def check_biases(biases: Mapping[str, Any], q_heads: int) -> dict[str, NDArray[Any]]:
    """Slopes by name of the given biases, in the order of ``BIASES``."""
    if unknown := sorted(biases.keys() - BIASES.keys()):
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}; biases are {', '.join(BIASES)}")
    checked = ((name, check_slopes(name, biases.get(name), q_heads)) for name in BIASES)
    return {name: slopes for name, slopes in checked if slopes is not None}


def log2_biases(biases: Mapping[str, Any], q_heads: int) -> dict[str, F32]:
    """``check_biases`` in log2 units, rounded once from float64."""
    return {name: _in_log2(slopes) for name, slopes in check_biases(biases, q_heads).items()}


def check_mask(mask: Any, q_len: int, tokens: int) -> tuple[F32 | None, float]:
    """(mask, largest magnitude that it adds). The mask (q_len, n) of the last n of ``tokens`` keys is float32 to add to
    the scores, -inf where a row does not see a key; None for no mask."""
    array = None if mask is None else check_array("mask", mask, ("bool", "float32", "float16"))
    if array is None:
        return None, 0.0
    if array.ndim != 2 or len(array) != q_len or array.shape[1] > tokens:
        raise ShapeError(
            f"mask: got shape {array.shape}, expected ({q_len}, n), a row for each of q's and a column for each of the "
            f"last n keys, of which there are {tokens}"
        )
    if array.dtype == bool:
        return np.where(array, np.float32(0), np.float32(-np.inf)), 0.0
    values = array.astype(np.float32)
    added = np.abs(values)
    added[np.isneginf(values)] = 0.0
    most = float(added.max(initial=0.0))
    if not most <= constants.MAX_INPUT:  # true for NaN, too
        raise ValueRangeError(
            "mask: got a NaN, +inf or a magnitude beyond 2**60, expected numbers to add to the scores, and -inf or "
            "False for keys that a row does not see"
        )
    return values, most


class Options(NamedTuple):
    """The checked options of an oracle's call; biases, mask_slopes: (q_heads,), in natural units."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: NDArray[Any] | None
    biases: dict[str, NDArray[Any]]
    mask: F32 | None
    mask_slopes: NDArray[Any] | None


def checked_options(  # noqa: PLR0913  (the arguments of an oracle)
    q: NDArray[Any],
    k: NDArray[Any],
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    mask: Any,
    mask_slopes: Any,
    biases: Mapping[str, Any],
) -> Options:
    """The checked options of a call with checked arrays. Refusals: see ``attention``; scores beyond the bound."""
    check_bool("causal", causal)
    (q_heads, head_dim), rows = q.shape[-2:], 1 if q.ndim == 2 else len(q)
    scale, window, softcap = check_scale(scale, head_dim), check_window(window), check_softcap(softcap)
    sinks = check_sinks(sinks, q_heads)
    if sinks is not None:
        _check_magnitudes("sinks", sinks)
    slopes, by_name = check_slopes("mask_slopes", mask_slopes, q_heads), check_biases(biases, q_heads)
    values, added = check_mask(mask, rows, len(k))
    bound = ScoreBound.of(scale, softcap, log2_biases(by_name, q_heads), log2_slopes("", slopes, q_heads))
    bound.check(largest(q), largest(k), head_dim, max(rows, len(k)), added)
    return Options(scale, window, softcap, sinks, by_name, values, slopes)
