"""Decode attention over context lengths and layouts: verify every point against the oracle, then time it.

A point is one context under one layout: one query row, one layer, K and V resident. Its output is filled
with NaN, computed, and compared bit for bit with ``reference.emulate``; only then is it timed, the layouts of
a context in turns, so that their ratios come from the same seconds. A point with a wrong bit has no time.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import reference
from .attention import AttentionStep, ResidentKV, check_arrays, check_scale, check_score_bound
from .device import Device
from .errors import ArgumentError, DeviceMemoryError, LimitError, ShapeError
from .layout import tiles
from .planner import SplitPlan, plan_splits
from .rows import checked_values
from .runtime import DeviceInfo
from .shapes import LEAF, MAX_CONTEXT, AttnShape, check_int, dtype_bytes

F32 = NDArray[np.float32]
Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all

LATENCY_MODE: Final = "submit and wait, host clock, warm"
WARM_UP_RUNS: Final = 3
FEWEST_REPEATS, MOST_REPEATS, BUDGET_S = 5, 50, 3.0  # timed runs of a point where --repeats is not given
ORACLE_PRODUCTS: Final = 1 << 30  # context * q_heads * head_dim up to which the oracle computes every head
_NUMPY: Final[dict[str, np.dtype[Any]]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
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
        if not size.isdecimal() or int(size) < 1 or kind not in ("", "size") or word.startswith(":"):
            raise ArgumentError(f"splits: got {text!r}, expected auto, a number of splits (8) or size:KEYS (size:2048)")
        return cls(f"size:{int(size)}", split_size=int(size)) if kind else cls(str(int(size)), num_splits=int(size))

    def plan(self, context: int, shape: AttnShape, compute_units: int, dtype: str, kind: str) -> SplitPlan:
        """The plan of one decode row; only "auto" looks at the device's facts."""
        if self.label == "auto":
            return plan_splits(context, shape, compute_units, dtype, kind=kind)
        return SplitPlan.fixed(context, shape, num_splits=self.num_splits, split_size=self.split_size)


def parse_layouts(text: str) -> list[Layout]:
    """``auto,1,size:2048`` to layouts, repeated ones once."""
    return list(dict.fromkeys(Layout.parse(word) for word in text.split(",")))


def parse_contexts(text: str) -> list[int]:
    """``1k,32k,5000`` to numbers of keys (k = 1024, m = 1024 k), repeated ones once."""
    found = []
    for word in text.split(","):
        digits = word.strip().lower()
        factor = _SUFFIXES.get(digits[-1:], 1)
        digits = digits[:-1] if factor > 1 else digits
        if not digits.isdecimal():
            raise ArgumentError(f"contexts: got {word!r}, expected numbers of keys such as 1k,32k,5000 (k = 1024)")
        found.append(check_int("contexts", int(digits) * factor, 1, MAX_CONTEXT))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Inputs:
    """A query row and its keys and values; a context of n keys takes the first n.

    q: (q_heads, head_dim) float32; k, v: (tokens, kv_heads, head_dim) of one dtype; source: what they are.
    """

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]
    source: str

    @property
    def shape(self) -> AttnShape:
        """Heads and head dimension."""
        return AttnShape(self.q.shape[0], self.k.shape[1], self.q.shape[1])

    @property
    def dtype(self) -> str:
        """dtype name of k and v."""
        return next(name for name, dtype in _NUMPY.items() if dtype == self.k.dtype)

    @classmethod
    def normal(cls, shape: AttnShape, tokens: int, dtype: str, seed: int = 0) -> Inputs:
        """Standard normal values: scores of standard deviation 1. Fewer tokens give a prefix of more."""
        q = np.random.default_rng([seed, 0]).standard_normal((shape.q_heads, shape.head_dim), dtype=np.float32)
        k, v = (_normal((tokens, shape.kv_heads, shape.head_dim), dtype, [seed, i]) for i in (1, 2))
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
            if len(q) != 1 or not len(k):
                raise ShapeError(
                    f"q, k: got {len(q)} query rows and {len(k)} tokens, expected 1 row and 1 token or more"
                )
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
        return cls(q[0], k, v, str(path))

    def prefix(self, tokens: int) -> Inputs:
        """The first ``tokens`` keys and values."""
        return replace(self, k=self.k[:tokens], v=self.v[:tokens])


def _normal(shape: tuple[int, int, int], dtype: str, seed: list[int]) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    made: NDArray[Any] = np.empty(shape, _NUMPY[dtype])
    rows = max(1, (1 << 22) // (shape[1] * shape[2]))
    for first in range(0, shape[0], rows):
        block = made[first : first + rows]
        block[:] = rng.standard_normal(block.shape, dtype=np.float32)
    return made


# --- what comes out ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepRow:
    """One point. Times are of one layer's attention of one query row; None where there is none.

    status: "ok", "failed" (a wrong bit; ``error`` names the first), "refused" (no room; ``error`` says why).
    verified: "bits": out and lse of all heads are the oracle's; "bits (sampled heads)": those of one KV head
    are, and all heads are those of the context's first layout.
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
    latency_mode: str = LATENCY_MODE
    repeats: int = 0
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    iqr_us: float | None = None  # between the quartiles
    kv_gb_s: float | None = None  # bytes of K and V, each once, per median; 1e9
    attention_ms_per_token: float | None = None  # all layers
    tokens_s: float | None = None  # as if attention were all of the step
    weights_ms: float | None = None  # the rest of the step, as given
    tokens_s_with_weights: float | None = None


# --- the sweep ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """The oracle's out and lse of the query heads from ``first`` on."""

    first: int
    out: F32
    lse: F32
    verified: str


@dataclass
class _Point:
    row: SweepRow
    step: AttentionStep | None = None
    result: tuple[F32, F32] | None = None


def check_sweep(
    shape: AttnShape,
    layers: int,
    contexts: Sequence[int],
    *,
    dtype: str,
    repeats: int | None,
    weights_ms: float | None,
    seed: int,
    kv: Inputs | None,
) -> None:
    """Refuse arguments that ``sweep`` cannot take, without a device. ArgumentError names the argument."""
    dtype_bytes(dtype)
    check_int("layers", layers, 1)
    check_int("seed", seed, 0)
    if repeats is not None:
        check_int("repeats", repeats, 1)
    if weights_ms is not None and not 0 <= weights_ms < float("inf"):
        raise ArgumentError(f"weights_ms: got {weights_ms}, expected milliseconds of at least 0")
    if kv is not None and (kv.shape != shape or kv.dtype != dtype):
        raise ArgumentError(f"kv: got {kv.shape} {kv.dtype}, expected {shape} {dtype}")
    if kv is not None and max(contexts, default=0) > len(kv.k):
        raise ArgumentError(f"contexts: got {max(contexts)}, expected at most {len(kv.k)}, the tokens in {kv.source}")


def sweep(
    device: Device,
    shape: AttnShape,
    layers: int,
    contexts: Sequence[int],
    splits: Sequence[Layout],
    *,
    dtype: str = "f16",
    repeats: int | None = None,
    weights_ms: float | None = None,
    seed: int = 0,
    kv: Inputs | None = None,
    model: str = "",
    oracle_products: int = ORACLE_PRODUCTS,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], None] | None = None,
) -> list[SweepRow]:
    """Verify and time one query row at every context under every layout.

    contexts: keys; repeats: timed runs per point (None: 5 to 50 within 3 s); weights_ms: the rest of a step;
    kv: values of this shape and dtype, in place of seeded normal ones; oracle_products: context * q_heads *
    head_dim up to which every head is compared with the oracle, above it those of one KV head. on_row sees
    each row when it is ready. What the device has no room for gives a row with status "refused".
    """
    check_sweep(shape, layers, contexts, dtype=dtype, repeats=repeats, weights_ms=weights_ms, seed=seed, kv=kv)
    info, done, total = device.info, 0, len(contexts) * (2 + 2 * len(splits))
    rows: list[SweepRow] = []

    def note(what: str, context: int, steps: int = 1) -> None:
        nonlocal done
        if progress:
            progress(f"{what} · {context:,} keys", done, total)
        done += steps

    for i, context in enumerate(contexts):
        done = i * (2 + 2 * len(splits))
        points = []
        for layout in splits:
            plan = layout.plan(context, shape, info.compute_units, dtype, info.kind)
            row = SweepRow(
                model=model,
                device=info.name,
                device_kind=info.kind,
                driver=info.driver,
                runtime=device.runtime.name,
                compute_units=info.compute_units,
                **asdict(shape),
                dtype=dtype,
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
                weights_ms=weights_ms,
            )
            points.append((_Point(row), plan))
        with ExitStack() as stack:
            try:
                _check_room(info, context, shape, dtype)
                note("making data", context)
                data = kv.prefix(context) if kv else Inputs.normal(shape, context, dtype, seed)
                resident = ResidentKV(device, data.k, data.v)
                stack.callback(resident.close)
                note("computing the oracle", context)
                expected = _oracle(data, shape, oracle_products)
            except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
                _refuse([point for point, _ in points], error)
            else:
                first: _Point | None = None
                for point, plan in points:
                    note("compiling shaders, checking bits", context)
                    try:
                        step = AttentionStep(resident, plan, scale=check_scale(None, shape.head_dim))
                    except (LimitError, DeviceMemoryError) as error:
                        _refuse([point], error)
                        continue
                    stack.callback(step.close)
                    point.step = step
                    step.write_q(data.q[None])
                    _verify(point, expected, first)
                    first = first or point
                note("timing", context, len(points))
                _time([point for point, _ in points if point.row.status == "ok"], repeats)
        for point, _ in points:
            point.step = None
            rows.append(point.row)
            if on_row:
                on_row(point.row)
    if progress:
        progress("done", total, total)
    return rows


def _check_room(info: DeviceInfo, context: int, shape: AttnShape, dtype: str) -> None:
    """Refuse what cannot fit before gigabytes of data are made for it; the runtime checks again."""
    nbytes = tiles(context) * LEAF * shape.kv_bytes_per_token(dtype) // 2
    if nbytes > info.max_buffer_bytes:
        raise LimitError(
            f"K of {nbytes:,} bytes: {info.name} takes at most {info.max_buffer_bytes:,} bytes in one "
            "storage buffer; use a shorter context or a smaller dtype"
        )


def _refuse(points: Iterable[_Point], error: BaseException) -> None:
    for point in points:
        point.row = replace(point.row, status="refused", error=str(error) or "no room in host memory")


def _oracle(data: Inputs, shape: AttnShape, products: int) -> _Expected:
    """All heads, or where that would take long the last KV head's, whose buffer offsets are largest."""
    if len(data.k) * shape.q_heads * shape.head_dim <= products or shape.kv_heads == 1:
        return _Expected(0, *reference.emulate(data.q, data.k, data.v), "bits")
    first = shape.q_heads - shape.group
    out, lse = reference.emulate(data.q[first:], data.k[:, -1:], data.v[:, -1:])
    return _Expected(first, out, lse, "bits (sampled heads)")


def _run(step: AttentionStep) -> tuple[F32, F32]:
    """out (q_heads, head_dim) and lse (q_heads,) of a run into an output that was all NaN."""
    step.poison()
    step.run()
    out, lse = step.result()
    return out[0], lse[0]


def _verify(point: _Point, expected: _Expected, first: _Point | None) -> None:
    assert point.step is not None
    point.result = out, lse = _run(point.step)
    error = difference("out", out[expected.first :], expected.out, expected.first)
    error = error or difference("lse", lse[expected.first :], expected.lse, expected.first)
    if not error and expected.first and first is not None and first.result is not None:
        error = difference("out", out, first.result[0]) or difference("lse", lse, first.result[1])
        error = error and f"unlike layout {first.row.layout}: {error}"
    _judge(point, error, expected.verified)


def _judge(point: _Point, error: str | None, verified: str | None) -> None:
    point.row = replace(point.row, verified=verified if not error else None)
    if error:
        point.row = replace(point.row, status="failed", error=error)


def difference(name: str, got: F32, want: F32, first: int = 0) -> str | None:
    """Which bits of two arrays differ, None where none do; axis 0 counts heads from ``first``."""
    a, b = np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32)
    where = np.argwhere(a != b)
    if not len(where):
        return None
    at = tuple(int(i) for i in where[0])
    place = ", ".join(str(i + first if axis == 0 else i) for axis, i in enumerate(at))
    return (
        f"{name}[{place}]: got {got[at]:.9g} (0x{a[at]:08x}), expected {want[at]:.9g} (0x{b[at]:08x}); "
        f"{len(where):,} of {a.size:,} elements differ"
    )


def _time(points: list[_Point], repeats: int | None) -> None:
    """Time the points in turns, check their last outputs, and complete their rows."""
    seconds: list[list[float]] = [[] for _ in points]
    for point in points:
        for _ in range(WARM_UP_RUNS):
            assert point.step is not None
            point.step.run()
    begin = perf_counter()
    while points and _more(len(seconds[0]), (perf_counter() - begin) / len(points), repeats):
        for point, times in zip(points, seconds, strict=True):
            assert point.step is not None
            start = perf_counter()
            point.step.run()
            times.append(perf_counter() - start)
    for point, times in zip(points, seconds, strict=True):
        assert point.step is not None and point.result is not None
        out, lse = point.step.result()
        error = difference("out", out[0], point.result[0]) or difference("lse", lse[0], point.result[1])
        _judge(point, error and f"in timed run {len(times)}: {error}", point.row.verified)
        if not error:
            point.row = replace(point.row, **_figures(point.row, np.array(times)))


def _more(rounds: int, spent_s: float, repeats: int | None) -> bool:
    if repeats is not None:
        return rounds < repeats
    return rounds < FEWEST_REPEATS or (rounds < MOST_REPEATS and spent_s < BUDGET_S)


def _figures(row: SweepRow, times: NDArray[np.float64]) -> dict[str, Any]:
    low, median, high = (float(x) for x in np.percentile(times, (25, 50, 75)))
    ms = 1e3 * median * row.layers
    kv_bytes = row.context * AttnShape(row.q_heads, row.kv_heads, row.head_dim).kv_bytes_per_token(row.dtype)
    return {
        "repeats": len(times),
        "median_us": 1e6 * median,
        "min_us": 1e6 * float(times.min()),
        "max_us": 1e6 * float(times.max()),
        "iqr_us": 1e6 * (high - low),
        "kv_gb_s": kv_bytes / median / 1e9,
        "attention_ms_per_token": ms,
        "tokens_s": 1e3 / ms,
        "tokens_s_with_weights": None if row.weights_ms is None else 1e3 / (ms + row.weights_ms),
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


def write_file(path: Path, data: bytes) -> None:
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
        raise ArgumentError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # gone where the rename succeeded
                os.unlink(temporary)
