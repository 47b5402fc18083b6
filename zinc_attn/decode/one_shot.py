"""Attention on a device in one call: NumPy in, NumPy out."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..cache.rows import Largest, checked_values
from ..canonical.arguments import check_window
from ..checks import check_array, check_bool, shown
from ..errors import ArgumentError, DTypeError
from ..planning.arithmetic import Arithmetic
from ..planning.splits import SplitPlan, plan_on
from ..runtime.device import Device
from ..runtime.protocol import DeviceInfo
from ..shapes import AttnShape
from .arithmetic import ARRAYS, check_arithmetic, check_half_range
from .axes import attention_shape
from .contiguous import DTYPES, ContiguousKV, RecordedCall
from .requests import check_score_bound, check_seen, mask_words
from .scoring import Scoring, check_alibi, check_mask_slopes, check_scale, check_sinks, check_softcap
from .targets import Target, check_targets

F32 = NDArray[np.float32]


def check_arrays(q: Any, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], AttnShape]:
    """q as (q_len, q_heads, head_dim), k, v, and their shape. ShapeError and DTypeError name the argument."""
    dtypes = ("float32", "float16", "bfloat16")
    qa, ka, va = (check_array(name, x, dtypes) for name, x in (("q", q), ("k", k), ("v", v)))
    shape = attention_shape(qa.shape, ka.shape, va.shape)
    if va.dtype != ka.dtype:
        raise DTypeError(f"v: got dtype {va.dtype}, expected k's {ka.dtype}")
    return (qa[None] if qa.ndim == 2 else qa), ka, va, shape


_default: tuple[int, Device] | None = None
_default_lock = threading.Lock()


def default_device() -> Device:
    """The device that ``attention`` opens when it is given none; kept open, and opened anew after close() or fork()."""
    global _default  # noqa: PLW0603
    with _default_lock:
        if _default is None or _default[0] != os.getpid() or _default[1].closed:
            _default = os.getpid(), Device.open()
        return _default[1]


@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    device: Device | None = ...,
    num_splits: int | None = ...,
    split_size: int | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    return_lse: Literal[False] = ...,
    *,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Any = ...,
    alibi: Any = ...,
    mask: Any = ...,
    mask_slopes: Any = ...,
    out: Any = ...,
    lse: Any = ...,
    allow_empty: bool = ...,
    arithmetic: Arithmetic = ...,
) -> F32: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    device: Device | None = ...,
    num_splits: int | None = ...,
    split_size: int | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    *,
    return_lse: Literal[True],
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Any = ...,
    alibi: Any = ...,
    mask: Any = ...,
    mask_slopes: Any = ...,
    out: Any = ...,
    lse: Any = ...,
    allow_empty: bool = ...,
    arithmetic: Arithmetic = ...,
) -> tuple[F32, F32]: ...


def attention(  # noqa: PLR0913  (public; all but q, k and v have a default)
    q: Any,
    k: Any,
    v: Any,
    device: Device | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi: Any = None,
    mask: Any = None,
    mask_slopes: Any = None,
    out: Any = None,
    lse: Any = None,
    allow_empty: bool = False,
    arithmetic: Arithmetic = "canonical",
) -> F32 | tuple[F32, F32]:
    """Softmax attention of decode rows on a Vulkan device.

    q: ([q_len,] q_heads, head_dim); k: (tokens, kv_heads, head_dim); v: (tokens, kv_heads, v_head_dim); float32,
    float16 or bfloat16. num_splits or split_size fix the layout (the bits do not depend on it); neither: plan_splits.
    scale: not 0; None is 1 / sqrt(head_dim). causal: row i of q_len sees keys up to position tokens - q_len + i.
    window: keys that a row sees at most, its own position counted (transformers' sliding_window; FlashInfer's
    window_left + 1). softcap: scores become softcap * tanh(score / softcap). sinks: (q_heads,) float32, a logit per
    query head that joins the softmax without a value (GPT-OSS); lse includes it. alibi, mask_slopes: see ``Attention``;
    mask, out, lse, allow_empty: as in a call of it. arithmetic: as in ``Attention``; "matrix" takes k and v in float16.
    Returns out ([q_len,] q_heads, v_head_dim), and with return_lse also lse ([q_len,] q_heads), natural log; float32.
    ArgumentError and its kinds for wrong arguments, LimitError and DeviceMemoryError where the device has no room.
    Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with the canonical reduction of this package.
    """
    rows, ka, va, shape = check_arrays(q, k, v)
    causal, return_lse = check_bool("causal", causal), check_bool("return_lse", return_lse)
    words = mask_words(mask, len(rows), len(ka))
    scoring = _scoring(shape, scale, window, softcap, sinks, alibi, mask_slopes)
    if not check_bool("allow_empty", allow_empty):
        check_seen(len(rows), len(ka), causal, words, scoring.window)
    one_row = np.ndim(q) == 2
    wanted = (None if x is None else [x] for x in (out, lse))
    (target,) = check_targets([(*rows.shape[int(one_row) : 2], shape.v_head_dim)], *wanted)
    checked_q, q_max = checked_values("q", rows[0] if one_row else rows)  # indices as the caller counts them
    (ka, k_max), (va, _) = checked_values("k", ka), checked_values("v", va)
    check_score_bound(q_max, k_max, shape.head_dim, scoring.scale)
    device = _opened(device)
    arithmetic = check_arithmetic(arithmetic, device, shape, DTYPES[ka.dtype], ARRAYS)
    check_half_range(arithmetic, q_max, Largest())
    plan = _planned(device.info, ka, shape, len(rows), window, num_splits=num_splits, split_size=split_size)
    with (
        closing(ContiguousKV(device, ka, va)) as kv,
        closing(RecordedCall(kv, plan, scoring=scoring, causal=causal, mask=words, arithmetic=arithmetic)) as call,
    ):
        call.write_q(checked_q)
        call.run()
        found = _results(call, target, one_row)
    out, lse = found[0] if out is None else out, found[1] if lse is None else lse
    return (out, lse) if return_lse else out


def _opened(device: Device | None) -> Device:
    """The device of a call, checked."""
    if device is None:
        return default_device()
    if not isinstance(device, Device):
        raise ArgumentError(f"device: got {type(device).__name__}, expected a Device; see Device.open()")
    return device


def _scoring(
    shape: AttnShape, scale: Any, window: Any, softcap: Any, sinks: Any, alibi: Any, mask_slopes: Any
) -> Scoring:
    """How scores are made, checked."""
    q_heads, base = shape.q_heads, (check_scale(scale, shape.head_dim), check_window(window), check_softcap(softcap))
    heads = check_sinks(sinks, q_heads), check_alibi(alibi, q_heads)
    return Scoring(*base, *heads, mask_slopes=check_mask_slopes(mask_slopes, q_heads))


def _planned(
    info: DeviceInfo, k: NDArray[Any], shape: AttnShape, q_len: int, window: int | None, **sizes: int | None
) -> SplitPlan:
    """The layout of a call: that of ``sizes``, num_splits or split_size, or of the split rule where both are None."""
    given = [shown(size) for size in sizes.values() if size is not None]
    if len(given) > 1:
        raise ArgumentError(f"{', '.join(sizes)}: got {', '.join(given)}, expected at most one of the two")
    if not given:
        return plan_on(info.layout_facts, len(k), shape, DTYPES[k.dtype], q_len, window)
    return SplitPlan.fixed(len(k), shape, q_len=q_len, window=window, **sizes)


def _results(call: RecordedCall, target: Target, one_row: bool) -> tuple[F32, F32]:
    """Write the results to ``target``, and return those that it has no arrays for; the others are valid no longer."""
    out, lse = call.result(copy=target.out is None)
    target.write(out, lse)
    return (out[0], lse[0].copy()) if one_row else (out, lse.copy())
