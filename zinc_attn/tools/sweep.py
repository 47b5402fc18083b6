"""Decode attention over context lengths and layouts: verify every point against the oracle, then time it.

A point is one context under one layout: a call on one layer of a resident KVCache that appends q_len rows to each
sequence of a batch and attends them. It is compared bit for bit with ``reference.emulate`` on the values as the cache
stores them, after a call with other query rows, so that what a call does not write is wrong. Only then is it timed,
the layouts of a context in turns, so that their ratios come from the same seconds, and every timed call's bits are
compared too. A point with a wrong bit has no time.

``page_size=None`` is the path without a cache: K and V of one sequence as two arrays, nothing appended.
``distributed_sweep`` is the same with the sequence's nodes on MPI ranks.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..cache.kv_cache import KVCache
from ..cache.pages import PagePool
from ..cache.rows import checked_values, stored, stored_values, tiles
from ..cache.sequence import Sequence as CachedSequence
from ..canonical.constants import KEYS_PER_NODE, LEAF
from ..checks import check_int, parse_digits, shown
from ..decode.attention import Attention
from ..decode.contiguous import ContiguousKV, RecordedCall
from ..decode.one_shot import check_arrays
from ..decode.scoring import check_scale, check_score_bound
from ..distributed.sharded import RankError, Ranks, ShardedAttention, ShardedKVCache
from ..errors import ArgumentError, DTypeError, LimitError, ShapeError
from ..limits import MAX_CONTEXT
from ..planning.splits import SplitPlan, plan_splits
from ..runtime.device import Device
from ..shapes import AttnShape, value_words

F32 = NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all

DECODE_MODE: Final = "decode call: append, attend, merge; host clock, warm; median"
CONTIGUOUS_MODE: Final = "submit and wait: attend, merge; host clock, warm; median"
RANKS_MODE: Final = "decode call: append, attend, one gather, merge; host clock of rank 0, warm; median"
PAGE_SIZE: Final = 256  # tokens
WARM_UP_RUNS: Final = 3
FEWEST_REPEATS, MOST_REPEATS, BUDGET_S = 5, 50, 3.0  # timed runs of a point where --repeats is not given
ORACLE_PRODUCTS: Final = 1 << 30  # batch * q_len * context * q_heads * head_dim that the oracle computes per context
_NUMPY: Final[dict[str, np.dtype[Any]]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
_FIGURES: Final = (
    "median_us",
    "min_us",
    "max_us",
    "iqr_us",
    "kv_gb_s",
    "attention_ms_per_step",
    "tokens_s",
    "tokens_s_with_weights",
)
_SUFFIXES: Final = {"k": 1 << 10, "m": 1 << 20}


# --- what to measure ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What gives a plan for any context: the planner's rule ("auto"), a number of splits, or a split size."""

    label: str
    num_splits: int | None = None
    split_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """``auto``, ``8`` (splits) or ``size:2048`` (keys per split)."""
        word = text.strip().lower()
        kind, _, size = word.rpartition(":")
        if word == "auto":
            return cls(word)
        number = parse_digits(size)
        if not number or kind not in ("", "size") or word.startswith(":"):
            raise ArgumentError(
                f"splits: got {shown(text)}, expected auto, a number of splits (8) or size:KEYS (size:2048)"
            )
        return cls(f"size:{number}", split_size=number) if kind else cls(str(number), num_splits=number)

    def plan(
        self,
        context: int,
        shape: AttnShape,
        compute_units: int,
        dtype: str,
        kind: str,
        q_len: int = 1,
        window: int | None = None,
    ) -> SplitPlan:
        """The plan of one sequence's rows; only "auto" looks at the device's facts."""
        if self.label == "auto":
            return plan_splits(context, shape, compute_units, dtype, q_len, kind, window)
        sizes = {"num_splits": self.num_splits, "split_size": self.split_size}
        return SplitPlan.fixed(context, shape, q_len=q_len, window=window, **sizes)


def parse_layouts(text: str) -> list[Layout]:
    """``auto,1,size:2048`` to layouts, repeated ones once."""
    return list(dict.fromkeys(Layout.parse(word) for word in text.split(",")))


def parse_contexts(text: str, name: str = "contexts") -> list[int]:
    """``1k,32k,5000`` to numbers of keys (k = 1024, m = 1024 k), repeated ones once."""
    found = []
    for word in text.split(","):
        digits = word.strip().lower()
        factor = _SUFFIXES.get(digits[-1:], 1)
        digits = digits[:-1] if factor > 1 else digits
        number = parse_digits(digits)
        if number is None:
            raise ArgumentError(f"{name}: got {shown(word)}, expected numbers of keys such as 1k,32k,5000 (k = 1024)")
        found.append(check_int(name, number * factor, 1, MAX_CONTEXT))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Inputs:
    """Query rows of one sequence and its keys and values; a context of n keys takes the first n.

    q: (q_heads, head_dim), or (q_len, q_heads, head_dim) for the last q_len positions, float32; k, v: (tokens,
    kv_heads, head_dim) of one dtype; source: what they are.
    """

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]
    source: str

    @property
    def shape(self) -> AttnShape:
        """Heads and head dimension."""
        return AttnShape(self.q.shape[-2], self.k.shape[1], self.q.shape[-1])

    @property
    def rows(self) -> F32:
        """q as (q_len, q_heads, head_dim)."""
        return self.q.reshape(-1, *self.q.shape[-2:])

    @property
    def dtype(self) -> str:
        """dtype name of the arrays k and v."""
        return next(name for name, dtype in _NUMPY.items() if dtype == self.k.dtype)

    @classmethod
    def normal(
        cls, shape: AttnShape, tokens: int, dtype: str, seed: int = 0, *, q_len: int | None = None, sequence: int = 0
    ) -> Inputs:
        """Standard normal values that a cache of ``dtype`` takes: scores of standard deviation 1.

        Fewer tokens give a prefix of more; each ``sequence`` of a batch has its own.
        """
        lead = () if q_len is None else (q_len,)
        rng = np.random.default_rng([seed, 0, sequence])
        q = rng.standard_normal((*lead, shape.q_heads, shape.head_dim), dtype=np.float32)
        k, v = (_normal((tokens, shape.kv_heads, shape.head_dim), dtype, [seed, i, sequence]) for i in (1, 2))
        return cls(q, k, v, f"normal, seed {seed}")

    @classmethod
    def load(cls, path: str | Path) -> Inputs:
        """The arrays q, k and v of a NumPy .npz file, checked. ArgumentError names the file."""
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                missing = [name for name in "qkv" if name not in file]
                if missing:
                    raise ArgumentError(f"got arrays {sorted(file)}, expected q, k and v")
                q, k, v = (file[name] for name in "qkv")
            q, k, v, shape = check_arrays(q, k, v)
            if len(q) > len(k):
                raise ShapeError(f"q, k: got {len(q)} query rows and {len(k)} tokens, expected a token per row or more")
            q, q_max = checked_values("q", q.astype(np.float32))
            k, k_max = checked_values("k", k)
            v, _ = checked_values("v", v)
            check_score_bound(q_max, k_max, shape.head_dim, check_scale(None, shape.head_dim))
        except ArgumentError as error:
            raise type(error)(f"{path}: {error}") from error
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror or error}, expected an .npz file with q, k and v") from error
        except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ArgumentError(f"{path}: not an .npz file with arrays q, k and v ({error})") from error
        return cls(q, k, v, str(path))

    def prefix(self, tokens: int) -> Inputs:
        """The first ``tokens`` keys and values."""
        return replace(self, k=self.k[:tokens], v=self.v[:tokens])


def _normal(shape: tuple[int, int, int], dtype: str, seed: list[int]) -> NDArray[Any]:
    """float32 values for f32 and bf16, which it holds exactly; float16 for f16 and q8_0, which rounds them itself."""
    rng = np.random.default_rng(seed)
    made: NDArray[Any] = np.empty(shape, np.float32 if dtype in ("f32", "bf16") else np.float16)
    rows = max(1, (1 << 22) // (shape[1] * shape[2]))
    for first in range(0, shape[0], rows):
        block = made[first : first + rows]
        block[:] = rng.standard_normal(block.shape, dtype=np.float32)
    if dtype == "bf16":
        words = made.view(np.uint32)
        words += np.uint32(0x7FFF) + (words >> 16 & 1)  # round to nearest even
        words &= np.uint32(0xFFFF0000)
    return made


# --- what comes out ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepRow:
    """One point. Times are of one call on one layer; None where there is none.

    A call attends q_len rows of each of ``batch`` sequences; context: keys that a sequence's last row sees, the call's
    own rows among them. The fields from plan to scratch_bytes are those of one sequence's plan.
    status: "ok", "failed" (a wrong bit; ``error`` names the first, its indices sequence, row, head, dimension),
    "refused" (no room; ``error`` says why).
    verified: "bits": out and lse of all sequences, rows and heads are the oracle's; "bits (sampled)": those of some
    are, of the last KV head of the last sequence at least, and all are those of the context's first layout.
    """

    model: str
    device: str
    device_kind: str
    driver: str
    runtime: str
    compute_units: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batch: int
    q_len: int
    page_size: int | None  # tokens; None: contiguous, without a cache
    layers: int
    data: str
    context: int
    layout: str
    plan: str  # fingerprint
    num_splits: int
    unit_keys: int
    build: str
    passes: int
    workgroups: int
    scratch_bytes: int
    status: str = "ok"
    verified: str | None = None
    error: str | None = None
    latency_mode: str = DECODE_MODE
    repeats: int = 0
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    iqr_us: float | None = None  # between the quartiles
    kv_gb_s: float | None = None  # stored bytes of K and V of all sequences, each once, per median; 1e9
    attention_ms_per_step: float | None = None  # all layers
    tokens_s: float | None = None  # batch * q_len per step, as if attention were all of the step
    weights_ms: float | None = None  # the rest of the step, as given
    tokens_s_with_weights: float | None = None
    ranks: int = 1
    received_bytes: int | None = None
    formula_bytes: int | None = None


# --- the sweep ---------------------------------------------------------------------------------------------


class _Step(Protocol):
    """A call under one layout."""

    def other(self) -> None:
        """Leave another output than that of the call, so that what a call does not write is seen."""

    def run(self) -> float:
        """Do the call; the seconds it took."""

    def result(self) -> tuple[F32, F32]:
        """out (batch, q_len, q_heads, head_dim) and lse (batch, q_len, q_heads) of the last call."""


class _CachedKV:
    """``batch`` sequences in a KVCache of one layer, and the q_len rows that every call appends to each."""

    def __init__(
        self, device: Device, shape: AttnShape, context: int, dtype: str, batch: int, q_len: int, page_size: int
    ) -> None:
        capacity = batch * -(-context // page_size) * page_size
        if capacity > MAX_CONTEXT:
            raise LimitError(f"{batch} x {context:,} tokens: a cache holds at most {MAX_CONTEXT:,}, in whole pages")
        self.cache = KVCache(device, shape, 1, capacity, dtype, page_size)
        self.before = context - q_len  # tokens of each sequence between the calls
        self.sequences: list[CachedSequence] = []
        self.rows: list[tuple[F32, NDArray[Any], NDArray[Any]]] = []  # q, k, v of each sequence

    def add(self, data: Inputs) -> None:
        """Make a sequence of ``data``."""
        sequence, n = self.cache.new_sequence(), self.before
        if n:
            self.cache.append(sequence, 0, data.k[:n], data.v[:n])
        self.sequences.append(sequence)
        self.rows.append((data.rows, data.k[n:].copy(), data.v[n:].copy()))

    def step(self, layout: Layout, plan: SplitPlan) -> _Step:
        """The call under a layout; the plan is what Attention makes of it."""
        return _CachedStep(self, Attention(self.cache, num_splits=layout.num_splits, split_size=layout.split_size))

    def close(self) -> None:
        """Free the device memory."""
        self.cache.close()


class _CachedStep:
    def __init__(self, kv: _CachedKV, attention: Attention) -> None:
        self._kv, self._attention = kv, attention
        self._q, self._k, self._v = (list(x) for x in zip(*kv.rows, strict=True))
        self._got: tuple[list[F32], list[F32]] = [], []

    def other(self) -> None:
        self._call([-q for q in self._q])

    def run(self) -> float:
        return self._call(self._q)

    def _call(self, q: list[F32]) -> float:
        attention, sequences, k, v = self._attention, self._kv.sequences, self._k, self._v
        if len(sequences) == 1:
            begin = perf_counter()
            out, lse = attention(q[0], sequences[0], 0, k=k[0], v=v[0], return_lse=True)
            end = perf_counter()
            self._got = [out], [lse]
        else:
            begin = perf_counter()
            self._got = attention(q, sequences, 0, k=k, v=v, return_lse=True)
            end = perf_counter()
        for sequence in sequences:
            sequence.truncate(self._kv.before)
        return end - begin

    def result(self) -> tuple[F32, F32]:
        return np.stack(self._got[0]), np.stack(self._got[1])


class _RankedKV:
    """A sequence whose nodes lie on the ranks, and the rows that every call appends."""

    def __init__(
        self, ranks: Ranks, device: Device, shape: AttnShape, context: int, dtype: str, q_len: int, page_size: int
    ) -> None:
        self.cache = ShardedKVCache([device], shape, 1, context, dtype, page_size, comm=ranks)
        self.before = context - q_len
        self.formula_bytes = 4 * q_len * shape.q_heads * (shape.head_dim + 2)
        self.formula_bytes *= int(np.sum(self.cache.owners[: -(-context // KEYS_PER_NODE)] != ranks.rank))

    def add(self, data: Inputs) -> None:
        """Make the sequence of ``data``."""
        n = self.before
        self.attention, self.sequence = ShardedAttention(self.cache), self.cache.new_sequence()
        if n:
            self.cache.append(self.sequence, 0, data.k[:n], data.v[:n])
        self._q, self._k, self._v = data.rows, data.k[n:].copy(), data.v[n:].copy()

    def other(self) -> None:
        self._call(-self._q)

    def run(self) -> float:
        return self._call(self._q)

    def _call(self, q: F32) -> float:
        begin = perf_counter()
        self._got = self.attention(q, self.sequence, 0, self._k, self._v, return_lse=True)
        end = perf_counter()
        self.sequence.truncate(self.before)
        return end - begin

    def result(self) -> tuple[F32, F32]:
        out, lse = self._got
        return out[None], lse[None]

    def close(self) -> None:
        """Free the device memory."""
        self.cache.close()


class _ContiguousKV:
    """K and V of one sequence as two arrays on the device."""

    def __init__(self, device: Device, shape: AttnShape, context: int, dtype: str) -> None:
        nbytes = tiles(context) * LEAF * shape.kv_bytes_per_token(dtype) // 2
        if nbytes > device.info.max_buffer_bytes:
            raise LimitError(
                f"K of {nbytes:,} bytes: {device.info.name} takes at most {device.info.max_buffer_bytes:,} bytes in "
                "one storage buffer; use a shorter context, a smaller dtype, or the cache"
            )
        self._device, self._stack = device, ExitStack()

    def add(self, data: Inputs) -> None:
        """Upload ``data``."""
        self._q = data.rows
        self._kv = ContiguousKV(self._device, data.k, data.v)
        self._stack.callback(self._kv.close)

    def step(self, layout: Layout, plan: SplitPlan) -> _Step:
        """The call under a plan."""
        step = RecordedCall(self._kv, plan)
        self._stack.callback(step.close)
        step.write_q(self._q)
        return _ContiguousStep(step)

    def close(self) -> None:
        """Free the device memory."""
        self._stack.close()


class _ContiguousStep:
    def __init__(self, step: RecordedCall) -> None:
        self._step = step

    def other(self) -> None:
        self._step.poison()

    def run(self) -> float:
        begin = perf_counter()
        self._step.run()
        return perf_counter() - begin

    def result(self) -> tuple[F32, F32]:
        out, lse = self._step.result()
        return out[None], lse[None]


@dataclass(frozen=True)
class _Expected:
    """The oracle's out and lse of a sequence, of its rows and query heads from ``first`` (sequence, row, head) on."""

    first: tuple[int, int, int]
    out: F32
    lse: F32


@dataclass
class _Point:
    row: SweepRow
    layout: Layout
    plan: SplitPlan
    step: _Step | None = None
    verified: tuple[F32, F32] | None = None  # the output that was compared with the oracle's

    def run(self) -> float:
        """Seconds of a call."""
        assert self.step is not None
        return self.step.run()

    def result(self) -> tuple[F32, F32]:
        """out and lse of the last call."""
        assert self.step is not None
        return self.step.result()


def check_sweep(
    shape: AttnShape,
    layers: int,
    contexts: Sequence[int],
    *,
    dtype: str,
    batch: int,
    q_len: int,
    page_size: int | None,
    repeats: int | None,
    weights_ms: float | None,
    seed: int,
    kv: Inputs | None,
) -> None:
    """Refuse arguments that ``sweep`` cannot take, without a device. ArgumentError names the argument."""
    value_words(shape.head_dim, dtype)
    check_int("layers", layers, 1)
    check_int("batch", batch, 1)
    check_int("q_len", q_len, 1)
    if page_size is not None:
        PagePool(1, page_size)
    elif dtype not in _NUMPY:
        raise DTypeError(f"dtype: got {dtype}, expected f32 or f16 for contiguous K and V without a cache")
    elif batch > 1:
        raise ArgumentError(f"batch: got {batch}, expected 1 for contiguous K and V without a cache")
    check_int("seed", seed, 0)
    if repeats is not None:
        check_int("repeats", repeats, 1)
    if weights_ms is not None and not 0 <= weights_ms < float("inf"):
        raise ArgumentError(f"weights_ms: got {weights_ms}, expected milliseconds of at least 0")
    if min(contexts, default=q_len) < q_len:
        raise ArgumentError(f"contexts: got {min(contexts)}, expected at least {q_len}, the call's own rows")
    if kv is not None:
        _check_kv(shape, contexts, dtype, q_len, page_size, kv)


def _check_kv(
    shape: AttnShape, contexts: Sequence[int], dtype: str, q_len: int, page_size: int | None, kv: Inputs
) -> None:
    if kv.shape != shape:
        raise ShapeError(f"kv: got {kv.shape}, expected {shape}")
    if len(kv.rows) != q_len:
        raise ShapeError(f"q_len: got {q_len}, expected {len(kv.rows)}, the query rows in {kv.source}")
    if max(contexts, default=0) > len(kv.k):
        raise ArgumentError(f"contexts: got {max(contexts)}, expected at most {len(kv.k)}, the tokens in {kv.source}")
    if page_size is None and kv.dtype != dtype:
        raise DTypeError(f"dtype: got {dtype}, expected {kv.dtype} for {kv.source} without a cache")
    try:
        for name, x in (("k", kv.k), ("v", kv.v)):
            stored_values(name, x, dtype)
    except ArgumentError as error:
        raise type(error)(f"{kv.source}: {error}") from error


def sweep(
    device: Device,
    shape: AttnShape,
    layers: int,
    contexts: Sequence[int],
    splits: Sequence[Layout],
    *,
    dtype: str = "f16",
    batch: int = 1,
    q_len: int = 1,
    page_size: int | None = PAGE_SIZE,
    repeats: int | None = None,
    weights_ms: float | None = None,
    seed: int = 0,
    kv: Inputs | None = None,
    model: str = "",
    oracle_products: int = ORACLE_PRODUCTS,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], None] | None = None,
) -> list[SweepRow]:
    """Verify and time a call of ``batch`` sequences with q_len new rows each at every context under every layout.

    contexts: keys of a sequence, the call's q_len rows among them; dtype: f32, f16, bf16 or q8_0; page_size: tokens,
    None for contiguous K and V without a cache (one sequence, f32 or f16); repeats: timed calls per point (None: 5 to
    50 within 3 s); weights_ms: the rest of a step; kv: values of this shape for every sequence, in place of seeded
    normal ones; oracle_products: batch * q_len * context * q_heads * head_dim up to which everything is compared with
    the oracle, above it as many KV heads as that allows. on_row sees each row when it is ready. What the device has no
    room for gives a row with status "refused".
    """
    check_sweep(
        shape,
        layers,
        contexts,
        dtype=dtype,
        batch=batch,
        q_len=q_len,
        page_size=page_size,
        repeats=repeats,
        weights_ms=weights_ms,
        seed=seed,
        kv=kv,
    )
    info, done, per_context = device.info, 0, 2 * batch + 2 * len(splits)
    total = len(contexts) * per_context
    rows: list[SweepRow] = []

    def note(what: str, context: int, steps: int = 1) -> None:
        nonlocal done
        if progress:
            progress(f"{what} · {context:,} keys", done, total)
        done += steps

    for i, context in enumerate(contexts):
        done, points = i * per_context, []
        for layout in splits:
            plan = layout.plan(context, shape, info.compute_units, dtype, info.kind, q_len)
            row = SweepRow(
                model=model,
                device=info.name,
                device_kind=info.kind,
                driver=info.driver,
                runtime=device.runtime.name,
                compute_units=info.compute_units,
                **asdict(shape),
                dtype=dtype,
                batch=batch,
                q_len=q_len,
                page_size=page_size,
                layers=layers,
                data=kv.source if kv else f"normal, seed {seed}",
                context=context,
                layout=layout.label,
                plan=plan.fingerprint(),
                num_splits=plan.num_splits,
                unit_keys=plan.unit_keys,
                build=plan.build,
                passes=plan.passes,
                workgroups=plan.workgroups,
                scratch_bytes=plan.scratch_bytes,
                latency_mode=DECODE_MODE if page_size else CONTIGUOUS_MODE,
                weights_ms=weights_ms,
            )
            points.append(_Point(row, layout, plan))
        with ExitStack() as stack:
            try:
                resident: _CachedKV | _ContiguousKV
                if page_size is None:
                    resident = _ContiguousKV(device, shape, context, dtype)
                else:
                    resident = _CachedKV(device, shape, context, dtype, batch, q_len, page_size)
                stack.enter_context(closing(resident))
                expected = []
                heads, last_rows = _sample(shape, context, batch, q_len, oracle_products)
                for sequence in range(batch):
                    note("making data", context)
                    data = kv.prefix(context) if kv else None
                    data = data or Inputs.normal(shape, context, dtype, seed, q_len=q_len, sequence=sequence)
                    resident.add(data)
                    note("computing the oracle", context)
                    if heads[sequence]:
                        expected.append(_oracle(data, dtype, sequence, heads[sequence], last_rows))
                    del data
            except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
                _refuse(points, error)
            else:
                everything = sum(heads) == batch * shape.kv_heads and last_rows == q_len
                word = "bits" if everything else "bits (sampled)"
                good: _Point | None = None  # the context's first layout without a wrong bit
                for point in points:
                    note("compiling shaders, checking bits", context)
                    try:
                        point.step = resident.step(point.layout, point.plan)
                        point.verified = _run(point.step)
                    except (LimitError, MemoryError) as error:
                        _refuse([point], error)
                        continue
                    _verify(point, expected, None if everything else good, word)
                    good = good or (point if point.row.status == "ok" else None)
                note("timing", context, len(points))
                _time([point for point in points if point.row.status == "ok"], repeats)
        for point in points:
            point.step = None
            rows.append(point.row)
            if on_row:
                on_row(point.row)
    if progress:
        progress("done", total, total)
    return rows


def distributed_sweep(
    ranks: Ranks,
    device: Device,
    shape: AttnShape,
    layers: int,
    contexts: Sequence[int],
    *,
    dtype: str = "f16",
    q_len: int = 1,
    page_size: int = PAGE_SIZE,
    repeats: int | None = None,
    weights_ms: float | None = None,
    seed: int = 0,
    kv: Inputs | None = None,
    model: str = "",
    oracle_products: int = ORACLE_PRODUCTS,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], None] | None = None,
) -> list[SweepRow]:
    """``sweep`` of one sequence whose nodes lie on ``ranks``, each with its ``device``; all call it alike.

    Every rank compares its bits with the oracle, and with those of rank 0. A row says the same on all ranks but for
    its device, bytes and times; without ``repeats`` rank 0 says how many calls are timed. RankError: see Ranks.
    """
    options: dict[str, Any] = {"dtype": dtype, "q_len": q_len, "page_size": page_size, "repeats": repeats, "seed": seed}
    check_sweep(shape, layers, contexts, batch=1, weights_ms=weights_ms, kv=kv, **options)
    words = {"shape": str(shape), "layers": layers, "contexts": list(contexts), **options, "weights_ms": weights_ms}
    words["values"] = kv and hashlib.sha256(b"".join(x.tobytes() for x in (kv.q, kv.k, kv.v))).hexdigest()
    ranks.agree(", ".join(f"{name} {value}" for name, value in words.items()), 1.0)
    info, rows, total = device.info, list[SweepRow](), 4 * len(contexts)

    def note(what: str, context: int, step: int) -> None:
        if progress:
            progress(f"{what} · {context:,} keys", 4 * len(rows) + step, total)

    for context in contexts:
        plan = SplitPlan.fixed(context, shape, split_size=KEYS_PER_NODE, q_len=q_len)
        row = SweepRow(
            model=model,
            device=info.name,
            device_kind=info.kind,
            driver=info.driver,
            runtime=device.runtime.name,
            compute_units=info.compute_units,
            **asdict(shape),
            dtype=dtype,
            batch=1,
            q_len=q_len,
            page_size=page_size,
            layers=layers,
            data=kv.source if kv else f"normal, seed {seed}",
            context=context,
            layout="nodes",
            plan=plan.fingerprint(),
            num_splits=plan.num_splits,
            unit_keys=plan.unit_keys,
            build=plan.build,
            passes=plan.passes,
            workgroups=plan.workgroups,
            scratch_bytes=plan.scratch_bytes,
            latency_mode=RANKS_MODE,
            weights_ms=weights_ms,
            ranks=ranks.size,
        )
        point = _Point(row, Layout("nodes", split_size=KEYS_PER_NODE), plan)
        with ExitStack() as stack:
            trouble, expected, word = "", list[_Expected](), "bits"
            try:
                resident = stack.enter_context(
                    closing(_RankedKV(ranks, device, shape, context, dtype, q_len, page_size))
                )
                note("making data", context, 0)
                data = kv.prefix(context) if kv else Inputs.normal(shape, context, dtype, seed, q_len=q_len)
                note("computing the oracle", context, 1)
                heads, last_rows = _sample(shape, context, 1, q_len, oracle_products)
                expected.append(_oracle(data, dtype, 0, heads[0], last_rows))
                word = "bits" if heads[0] == shape.kv_heads and last_rows == q_len else "bits (sampled)"
            except (LimitError, MemoryError, RankError) as error:
                if ranks.lost:
                    raise
                trouble = str(error) or "no room in host memory"
            if trouble := _first_trouble(ranks, trouble):
                point.row = replace(point.row, status="refused", error=trouble)
            else:
                note("compiling shaders, checking bits", context, 2)
                resident.add(data)  # here, as every rank appends or none
                del data
                point.step = resident
                resident.other()
                before = ranks.received_bytes
                seconds = resident.run()
                received, point.verified = ranks.received_bytes - before, resident.result()
                point.row = replace(point.row, received_bytes=received, formula_bytes=resident.formula_bytes)
                _verify(point, expected, None, word)
                _share_verdict(ranks, point)
            if point.row.status == "ok":
                note("timing", context, 3)
                likely = int(np.clip(BUDGET_S / seconds, FEWEST_REPEATS, MOST_REPEATS))
                _time([point], repeats or int(ranks.exchange(str(likely).encode())[0]))
                _share_verdict(ranks, point)
        rows.append(point.row)
        if on_row:
            on_row(point.row)
    if progress:
        progress("done", total, total)
    return rows


def _first_trouble(ranks: Ranks, mine: str) -> str:
    """What the first rank in trouble says, on all ranks; empty where none is."""
    said = [text.decode() for text in ranks.exchange(mine.encode())]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")


def _share_verdict(ranks: Ranks, point: _Point) -> None:
    """Fail the point on all ranks where it failed on one, or where a rank's output is not rank 0's."""
    out, lse = point.result()
    digest = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
    first = ranks.exchange(digest.encode())[0].decode()
    other = "" if digest == first else "out or lse are not those of rank 0"
    if trouble := _first_trouble(ranks, point.row.error or other):
        untimed: dict[str, Any] = dict.fromkeys(_FIGURES)
        point.row = replace(point.row, status="failed", verified=None, error=trouble, repeats=0, **untimed)


def _refuse(points: Iterable[_Point], error: BaseException) -> None:
    for point in points:
        point.row = replace(point.row, status="refused", error=str(error) or "no room in host memory")


def _sample(shape: AttnShape, context: int, batch: int, q_len: int, products: int) -> tuple[list[int], int]:
    """What the oracle computes: of each sequence the last so many KV heads, and of each of those the last rows.

    All within ``products``; else the last KV head of every sequence first, those of the last sequences at least.
    """
    row = context * shape.group * shape.head_dim
    pairs = min(max(products // (row * q_len), 1), batch * shape.kv_heads)
    each, more = divmod(pairs, batch)
    return [each + (i >= batch - more) for i in range(batch)], min(max(products // row, 1), q_len)


def _oracle(data: Inputs, dtype: str, sequence: int, heads: int, rows: int) -> _Expected:
    """The last ``rows`` rows of the last ``heads`` KV heads, whose buffer offsets are largest."""
    group, kv_heads = data.shape.group, data.shape.kv_heads
    parts = []
    for head in range(kv_heads - heads, kv_heads):
        q = data.rows[-rows:, head * group : (head + 1) * group]
        parts.append(reference.emulate(q, *stored(data.k[:, head : head + 1], data.v[:, head : head + 1], dtype)))
    out, lse = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return _Expected((sequence, len(data.rows) - rows, (kv_heads - heads) * group), out, lse)


def _run(step: _Step) -> tuple[F32, F32]:
    """out and lse of a call behind one with another output."""
    step.other()
    step.run()
    return step.result()


def _verify(point: _Point, expected: Iterable[_Expected], good: _Point | None, verified: str) -> None:
    """Compare a point's output with the oracle's, and with that of the context's first good layout where given."""
    assert point.verified is not None
    out, lse = point.verified
    error = None
    for part in expected:
        sequence, row, head = part.first
        mine = out[sequence, row:, head:][None], lse[sequence, row:, head:][None]
        error = error or _unlike(mine, (part.out[None], part.lse[None]), part.first)
    if not error and good is not None and good.verified is not None:
        error = _unlike(point.verified, good.verified)
        error = error and f"unlike layout {good.row.layout}: {error}"
    point.row = replace(
        point.row, status="failed" if error else "ok", error=error, verified=None if error else verified
    )


def _unlike(got: tuple[F32, F32], want: tuple[F32, F32], first: tuple[int, ...] = ()) -> str | None:
    """How out or lse differ in their bits."""
    return difference("out", got[0], want[0], first) or difference("lse", got[1], want[1], first)


def difference(name: str, got: F32, want: F32, first: int | tuple[int, ...] = 0) -> str | None:
    """Which bits of two arrays differ, None where none do; the axes count from ``first`` (an int: axis 0)."""
    a, b = np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32)
    where = np.argwhere(a != b)
    if not len(where):
        return None
    at = tuple(int(i) for i in where[0])
    origin = first if isinstance(first, tuple) else (first,)
    place = ", ".join(str(i + j) for i, j in zip_longest(at, origin[: len(at)], fillvalue=0))
    return (
        f"{name}[{place}]: got {got[at]:.9g} (0x{a[at]:08x}), expected {want[at]:.9g} (0x{b[at]:08x}); "
        f"{len(where):,} of {a.size:,} elements differ"
    )


def _time(points: list[_Point], repeats: int | None) -> None:
    """Time the points in turns, check the output of every call, and complete their rows."""
    seconds: list[list[float]] = [[] for _ in points]
    for point in points:
        for _ in range(WARM_UP_RUNS):
            point.run()
    begin = perf_counter()
    while points and _more(len(seconds[0]), (perf_counter() - begin) / len(points), repeats):
        for point, times in zip(points, seconds, strict=True):
            times.append(point.run())
            assert point.verified is not None
            if point.row.status == "ok" and (error := _unlike(point.result(), point.verified)):
                point.row = replace(
                    point.row, status="failed", verified=None, error=f"in timed run {len(times)}: {error}"
                )
    for point, times in zip(points, seconds, strict=True):
        if point.row.status == "ok":
            point.row = replace(point.row, **_figures(point.row, np.array(times)))


def _more(rounds: int, spent_s: float, repeats: int | None) -> bool:
    if repeats is not None:
        return rounds < repeats
    return rounds < FEWEST_REPEATS or (rounds < MOST_REPEATS and spent_s < BUDGET_S)


def _figures(row: SweepRow, times: NDArray[np.float64]) -> dict[str, Any]:
    low, median, high = (float(x) for x in np.percentile(times, (25, 50, 75)))
    ms = 1e3 * median * row.layers
    per_token = AttnShape(row.q_heads, row.kv_heads, row.head_dim).kv_bytes_per_token(row.dtype)
    tokens = row.batch * row.q_len
    return {
        "repeats": len(times),
        "median_us": 1e6 * median,
        "min_us": 1e6 * float(times.min()),
        "max_us": 1e6 * float(times.max()),
        "iqr_us": 1e6 * (high - low),
        "kv_gb_s": row.batch * row.context * per_token / median / 1e9,
        "attention_ms_per_step": ms,
        "tokens_s": 1e3 * tokens / ms,
        "tokens_s_with_weights": None if row.weights_ms is None else 1e3 * tokens / (ms + row.weights_ms),
    }


# --- files -------------------------------------------------------------------------------------------------


def to_json(row: SweepRow) -> str:
    """One line of JSON; floats rounded to 6 digits."""
    rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(row).items()}
    return json.dumps(rounded, ensure_ascii=False, allow_nan=False)


def to_csv(rows: Iterable[SweepRow]) -> str:
    """A header and one line per row; empty where a field is None."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(SweepRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(json.loads(to_json(row)) for row in rows)
    return text.getvalue()


def write_file(path: Path, data: bytes, hint: str = "choose another folder with --out") -> None:
    """Write to a temporary name beside it, then rename. ArgumentError where the folder takes no files."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; {hint}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # gone where the rename succeeded
                os.unlink(temporary)
