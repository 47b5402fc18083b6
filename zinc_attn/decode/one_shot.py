"""Attention on a device: NumPy in, NumPy out; and the resident form that it and the sweep share."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..cache.rows import NEVER, Work, checked_values, item_table, pack_k, pack_v, row_table, tiles
from ..canonical.reference import key_ranges, score_scale, sink_scores
from ..errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from ..kernels import contract as kernels
from ..planning.splits import SplitPlan, plan_splits
from ..runtime.device import Device
from ..runtime.protocol import Dispatch, Recording, Use
from ..shapes import (
    LEAF,
    LOG2E,
    MAX_CONTEXT,
    MAX_INPUT,
    MAX_SCORE,
    MIN_INPUT,
    AttnShape,
    check_array,
    check_bool,
    check_float,
    check_int,
    dtype_bytes,
    shown,
)

F32 = NDArray[np.float32]
MAX_WINDOW = 1 << 62  # positions are int64
_DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


# --- checks ------------------------------------------------------------------------------------------------


def check_score_bound(q_max: float, k_max: float, head_dim: int, scale: float) -> None:
    """Refuse inputs whose scores could overflow float32."""
    bound = q_max * k_max * head_dim * max(1.0, abs(scale) * 1.5)
    if bound > MAX_SCORE:
        raise ValueRangeError(
            f"q, k: got max|q| = {q_max:g}, max|k| = {k_max:g}, scale = {scale:g} at head_dim {head_dim}; expected "
            "max|q| * max|k| * head_dim * scale of at most 2**96"
        )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a float; None is 1 / sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = check_float("scale", scale, "a finite float32 number")
    if not abs(value) * LOG2E < 2.0**127:
        raise ValueRangeError(f"scale: got {value:g}, expected a finite float32 number")
    return value


@dataclass(frozen=True, eq=False)
class Scoring:
    """How scores are made and which count, checked: what ``scale``, ``window``, ``softcap`` and ``sinks`` said.

    sinks: (q_heads,) float32 in log2 units, or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: F32 | None = None

    def header(self, head_dim: int) -> dict[str, int]:
        """The header words of the work buffer."""
        words = {"score_scale": float(score_scale(head_dim, self.scale, self.softcap))}
        if self.softcap is not None:
            words |= {"softcap": self.softcap, "softcap_inverse": 1.0 / self.softcap}
        return {name: kernels.float_bits(value) for name, value in words.items()}


def check_window(window: Any) -> int | None:
    """A window in keys, or None."""
    return None if window is None else check_int("window", window, 1, MAX_WINDOW)


def check_softcap(softcap: Any) -> float | None:
    """A cap within the range of inputs, or None; rounded to float32."""
    if softcap is None:
        return None
    expected = "a number from 2**-40 to 2**60, or None for no cap"
    value = check_float("softcap", softcap, expected)
    if not MIN_INPUT <= value <= MAX_INPUT:
        raise ValueRangeError(f"softcap: got {value:g}, expected {expected}")
    return float(np.float32(value))


def check_sinks(sinks: Any, q_heads: int) -> F32 | None:
    """Sinks (q_heads,) in log2 units, or None."""
    if sinks is None:
        return None
    array = check_array("sinks", sinks, ("float32", "float16", "float64"))
    if array.shape != (q_heads,):
        raise ShapeError(f"sinks: got shape {array.shape}, expected ({q_heads},), a logit per query head")
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite there, and refused as such
        return sink_scores(checked_values("sinks", array.astype(np.float32))[0])


def check_arrays(q: Any, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], AttnShape]:
    """q as (q_len, q_heads, head_dim), k, v, and their shape. ShapeError and DTypeError name the argument."""
    qa, ka, va = (check_array(name, x, ("float32", "float16")) for name, x in (("q", q), ("k", k), ("v", v)))
    if qa.ndim not in (2, 3):
        raise ShapeError(f"q: got shape {qa.shape}, expected (q_heads, head_dim) or (q_len, q_heads, head_dim)")
    if ka.ndim != 3:
        raise ShapeError(f"k: got shape {ka.shape}, expected (tokens, kv_heads, head_dim)")
    for name, x in (("q", qa), ("k", ka)):
        if len(x) > MAX_CONTEXT:
            raise ShapeError(f"{name}: got {len(x):,} rows, expected at most {MAX_CONTEXT:,}")
    if va.shape != ka.shape:
        raise ShapeError(f"v: got shape {va.shape}, expected k's {ka.shape}")
    if va.dtype != ka.dtype:
        raise DTypeError(f"v: got dtype {va.dtype}, expected k's {ka.dtype}")
    rows = qa[None] if qa.ndim == 2 else qa
    if rows.shape[0] < 1:
        raise ShapeError(f"q: got shape {qa.shape}, expected at least one row")
    if rows.shape[2] != ka.shape[2]:
        raise ShapeError(f"q: got head_dim {rows.shape[2]}, expected k's {ka.shape[2]}")
    shape = AttnShape(int(rows.shape[1]), int(ka.shape[1]), int(ka.shape[2]))
    return rows, ka, va, shape


# --- on the device -----------------------------------------------------------------------------------------


class ResidentKV:
    """K and V of one sequence and layer on a device, in the kernels' layout.

    k, v: (tokens, kv_heads, head_dim), both float32 or both float16, checked by the caller.
    """

    def __init__(self, device: Device, k: NDArray[Any], v: NDArray[Any]) -> None:
        self.device = device
        self.tokens, self.kv_heads, self.head_dim = k.shape
        self.dtype = _DTYPES[k.dtype]
        nbytes = max(tiles(self.tokens), 1) * LEAF * self.kv_heads * self.head_dim * dtype_bytes(self.dtype)
        self.k = device.runtime.buffer(nbytes, Use.DATA)
        try:
            self.v = device.runtime.buffer(nbytes, Use.DATA)
        except BaseException:
            self.k.close()
            raise
        if self.tokens:
            device.runtime.write(self.k, pack_k(k))
            device.runtime.write(self.v, pack_v(v))

    def close(self) -> None:
        """Free the device memory."""
        self.k.close()
        self.v.close()


class AttentionStep:
    """One recorded attention call on a ResidentKV: a plan, its buffers and its submission. Run it any number of times.

    scoring: None is the usual scale and nothing else; its window must be the plan's. heads_per_workgroup: query heads
    that one workgroup of pass 1 serves, which never shows in the bits; None is the shape's choice.
    """

    def __init__(
        self,
        kv: ResidentKV,
        plan: SplitPlan,
        *,
        scoring: Scoring | None = None,
        causal: bool = True,
        timestamps: bool = False,
        heads_per_workgroup: int | None = None,
    ) -> None:
        shape, runtime = plan.shape, kv.device.runtime
        per_workgroup = shape.heads_per_workgroup
        if heads_per_workgroup is not None:
            per_workgroup = check_int("heads_per_workgroup", heads_per_workgroup, 1, per_workgroup)
        self.plan, self.runtime = plan, runtime
        scoring = Scoring(check_scale(None, shape.head_dim)) if scoring is None else scoring
        work = self._work(kv, scoring, key_ranges(plan.context_len, plan.q_len, causal, scoring.window))
        rows, heads, dim = plan.q_len, shape.q_heads, shape.head_dim
        self._buffers = [runtime.buffer(4 * work.words.size, Use.INPUT)]
        self._recording: Recording | None = None
        try:
            self._buffers.append(runtime.buffer(4 * rows * heads * dim, Use.INPUT))
            self._buffers.append(runtime.buffer(max(plan.scratch_bytes, 4), Use.SCRATCH))
            self._buffers.append(runtime.buffer(4 * rows * heads * (dim + 1), Use.OUTPUT))
            work_buffer, q, states, out = self._buffers
            runtime.write(work_buffer, work.words)
            steps = []
            if len(work.items):
                ahead, capped = kernels.chunks_ahead(runtime.info.kind, dim), int(scoring.softcap is not None)
                spec = (dim, per_workgroup, ahead, LEAF, capped, 1)
                attend = kv.device.kernel(kernels.attend(plan.build, kv.dtype), spec)
                grid = (len(work.items), shape.kv_heads, -(-shape.group // per_workgroup))
                target = out if plan.passes == 1 else states  # bound twice, so that pass 2 waits for one buffer
                steps.append(Dispatch(attend, (work_buffer, q, kv.k, kv.v, target, target), grid))
            if plan.passes == 2:
                merge = kv.device.kernel(kernels.MERGE, (dim, kernels.merge_lanes(runtime.info.kind)))
                grid = (-(-dim // kernels.MERGE_DIMS), heads, rows)
                steps.append(Dispatch(merge, (work_buffer, states, out), grid))
            self._recording = runtime.record(steps, timestamps)
        except BaseException:
            self.close()
            raise

    def _work(self, kv: ResidentKV, scoring: Scoring, seen: tuple[NDArray[Any], NDArray[Any]]) -> Work:
        """The call's work buffer; one page, number 0, holds everything."""
        plan, shape, rows = self.plan, self.plan.shape, self.plan.q_len
        direct = plan.passes == 1
        items = item_table(*seen, np.array(plan.leaf_ranges()), keep_empty=direct)
        work = Work(len(items), rows, 0, 1, scoring.sinks)
        work.set_shape(shape, shape.kv_heads)
        work.set(
            **scoring.header(shape.head_dim),
            state_stride=plan.states * rows,
            page_shift=31,
            page_tiles=max(tiles(kv.tokens), 1),
            rows=rows,
            direct=int(direct),
        )
        work.items[:, :5], work.items[:, 9] = items[:, :5], items[:, 5]
        work.items[:, 5:9] = work.tables_at, NEVER, 0, plan.unit_leaves
        work.rows[:] = row_table(*seen, plan)
        return work

    def write_q(self, q: NDArray[Any]) -> None:
        """Set the query rows: (q_len, q_heads, head_dim), checked float32 or float16 values."""
        self.runtime.write(self._buffers[1], np.ascontiguousarray(q, np.float32).reshape(-1).view(np.uint32))

    def run(self) -> None:
        """Submit and wait."""
        assert self._recording is not None
        self.runtime.run(self._recording)

    def timings(self) -> list[tuple[float, float]]:
        """Begin and end of each pass on the device's clock; for a step made with timestamps."""
        assert self._recording is not None
        return self.runtime.timings(self._recording)

    def poison(self) -> None:
        """Fill the output with NaN, so that an element which no kernel writes cannot pass a comparison."""
        words = np.full(self._buffers[3].nbytes // 4, 0x7FC0DEAD, np.uint32)
        self.runtime.write(self._buffers[3], words)

    def result(self) -> tuple[F32, F32]:
        """out (q_len, q_heads, head_dim) and lse (q_len, q_heads) of the last run."""
        shape, rows = self.plan.shape, self.plan.q_len
        words = self.runtime.read(self._buffers[3]).view(np.float32)
        size = rows * shape.q_heads * shape.head_dim
        return words[:size].reshape(rows, shape.q_heads, shape.head_dim), words[size:].reshape(rows, shape.q_heads)

    def close(self) -> None:
        """Free the step's buffers and command buffers."""
        if self._recording is not None:
            self._recording.close()
        for buffer in self._buffers:
            buffer.close()


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
) -> tuple[F32, F32]: ...


def attention(
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
) -> F32 | tuple[F32, F32]:
    """Softmax attention of decode rows on a Vulkan device.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim); float32 or float16.
    num_splits or split_size fix the layout (the bits do not depend on it); neither: plan_splits. scale: None is
    1 / sqrt(head_dim). causal: row i of q_len sees keys up to position tokens - q_len + i. window: keys that a row sees
    at most, its own position counted (transformers' sliding_window; FlashInfer's window_left + 1). softcap: scores
    become softcap * tanh(score / softcap). sinks: (q_heads,) float32, a logit per query head that joins the softmax
    without a value (GPT-OSS); lse includes it.
    Returns out (q's shape, float32), and with return_lse also lse (q's shape without head_dim, float32, natural log).
    ArgumentError and its kinds for wrong arguments, LimitError and DeviceMemoryError where the device has no room.
    Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with the canonical reduction of this package.
    """
    rows, ka, va, shape = check_arrays(q, k, v)
    causal, return_lse = check_bool("causal", causal), check_bool("return_lse", return_lse)
    one_row = np.ndim(q) == 2
    factor = check_scale(scale, shape.head_dim)
    scoring = Scoring(factor, check_window(window), check_softcap(softcap), check_sinks(sinks, shape.q_heads))
    checked_q, q_max = checked_values("q", rows[0] if one_row else rows)  # indices as the caller counts them
    ka, k_max = checked_values("k", ka)
    va, _ = checked_values("v", va)
    check_score_bound(q_max, k_max, shape.head_dim, factor)
    tokens, q_len = len(ka), len(rows)
    if num_splits is not None and split_size is not None:
        raise ArgumentError(
            f"num_splits, split_size: got {shown(num_splits)}, {shown(split_size)}, expected at most one of the two"
        )
    device = default_device() if device is None else device
    if not isinstance(device, Device):
        raise ArgumentError(f"device: got {type(device).__name__}, expected a Device; see Device.open()")
    if num_splits is None and split_size is None:
        units = device.info.compute_units
        plan = plan_splits(tokens, shape, units, _DTYPES[ka.dtype], q_len, device.info.kind, window)
    else:
        sizes = {"num_splits": num_splits, "split_size": split_size}
        plan = SplitPlan.fixed(tokens, shape, q_len=q_len, window=window, **sizes)
    kv = ResidentKV(device, ka, va)
    try:
        step = AttentionStep(kv, plan, scoring=scoring, causal=causal)
        try:
            step.write_q(checked_q)
            step.run()
            out, lse = step.result()
        finally:
            step.close()
    finally:
        kv.close()
    if one_row:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
