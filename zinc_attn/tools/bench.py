"""Times of decode attention beside a read yardstick and other attention: verify, then time, in one program.

Everything of one shape and context runs in turns, runtimes and layouts alike, so that ratios come from the same
seconds; baselines follow, since their thread pools spin on after each call. Wrong bits have no time.

The last part draws: benchmarks, sweeps, and plans on a card.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from time import perf_counter, process_time, thread_time
from typing import Any, Final, Protocol

import numpy as np

from .. import reference
from ..cache.rows import pack_k, pack_v
from ..checks import check_int
from ..decode.contiguous import ContiguousKV, RecordedCall
from ..decode.scoring import check_scale
from ..errors import ArgumentError, LimitError
from ..kernels import contract as kernels
from ..limits import MAX_CONTEXT, WAVE
from ..planning.splits import SplitPlan, plan_splits
from ..runtime.device import Device
from ..runtime.protocol import Dispatch, Use, Words
from ..shapes import AttnShape
from . import cost
from .models import ModelPreset
from .sweep import F32, ORACLE_PRODUCTS, Inputs, Progress, SweepRow, difference

WARM_UP_ROUNDS: Final = 2
FEWEST_REPEATS, MOST_REPEATS, BUDGET_S = 5, 50, 10.0  # rounds of a shape and context where repeats is not given
HOST_ROUNDS: Final = 1000  # of a call without keys
READ_LOADS: Final = 16  # uvec4 a lane of the yardstick, or the next larger number that divides the buffer
MAX_ERROR: Final = {"float32": 1e-4, "float16": 3e-3}  # relative L2 error of a baseline, by what it computes in
DTYPES: Final = ("f32", "f16")  # what ContiguousKV takes
LAYOUTS: Final = ("auto", "1 split", "per query head")
HOST_CLOCK: Final = f"host clock, submit and wait, after {WARM_UP_ROUNDS} warm-up rounds"
DEVICE_CLOCK: Final = "device timestamps"
MEASURES: Final[Mapping[str, str]] = {  # what a row's times are of, and by which clock
    "call": HOST_CLOCK,  # RecordedCall.run(), or the call of the yardstick or the baseline
    "steady call": HOST_CLOCK,  # write_q, run, result: what a decode loop does
    "pass 1": DEVICE_CLOCK,
    "gap": DEVICE_CLOCK,  # end of pass 1 to begin of pass 2
    "pass 2": DEVICE_CLOCK,
    "device": DEVICE_CLOCK,  # begin of the first dispatch to end of the last one
    "empty submit": HOST_CLOCK,
    "host per call": "a steady call without keys less the empty submission before it",
}
Sample = tuple[float, ...]  # seconds; by the host clock also CPU seconds of the process and of the calling thread


@dataclass(frozen=True)
class BenchRow:
    """One measure of one subject, for one layer and one query row. Times in microseconds; None: there is none.

    context: keys; 0: the host's work per call. layout: one of LAYOUTS, "read" (the yardstick) or "baseline".
    verified: "bits"; "bits (last KV head)" where the oracle made that one alone and the others are those of the
    first layout; a baseline's error. status: "ok", "failed" (wrong output), "refused"; note: why.
    """

    device: str
    device_kind: str
    driver: str
    runtime: str
    shape: str
    dtype: str
    context: int
    layout: str
    load: float | None = None  # the machine's load average of the last minute
    plan: str | None = None  # fingerprint
    heads_per_workgroup: int | None = None
    verified: str | None = None
    status: str = "ok"
    note: str | None = None
    measure: str = "call"
    latency_mode: str = HOST_CLOCK
    repeats: int = 0
    median_us: float | None = None
    q1_us: float | None = None  # lower quartile
    q3_us: float | None = None
    min_us: float | None = None
    cpu_us: float | None = None  # median CPU time, all threads; a CPU device's work is in it
    caller_us: float | None = None  # median CPU time of the calling thread, which no device's work is in
    kv_gb_s: float | None = None  # bytes of K and V as the device stores them, each once, per median; 1e9
    of_read: float | None = None  # kv_gb_s over the yardstick's, by the same clock, runtime and context


# --- what is timed -----------------------------------------------------------------------------------------


class _Step(Protocol):
    """A recorded call: RecordedCall, and the yardstick's."""

    def run(self) -> None: ...
    def timings(self) -> list[tuple[float, float]]: ...
    def close(self) -> None: ...


class _Read:
    """The yardstick: buffers of a ContiguousKV read once by a kernel that does nothing else."""

    def __init__(self, kv: ContiguousKV, timestamps: bool) -> None:
        self.runtime = kv.device.runtime
        lanes, most = kv.k.nbytes // (16 * WAVE), self.runtime.info.max_workgroups[0]  # lanes: rows of 32 uvec4
        rows = (n for n in itertools.count(min(READ_LOADS, lanes)) if lanes % n == 0 and lanes // n <= most)
        loads = next(rows)
        self.groups = lanes // loads
        kernel, data = kv.device.kernel(kernels.READ, (loads,)), (kv.k, kv.v)
        self.out = [self.runtime.buffer(4 * self.groups, Use.OUTPUT) for _ in data]
        steps = [Dispatch(kernel, pair, (self.groups, 1, 1)) for pair in zip(data, self.out, strict=True)]
        self.recording = self.runtime.record(steps, timestamps)

    def run(self) -> None:
        self.runtime.run(self.recording)

    def timings(self) -> list[tuple[float, float]]:
        return self.runtime.timings(self.recording)

    def wrong(self, *data: Words) -> str | None:
        """Whether a run leaves any word of ``data`` unread."""
        self.run()
        for words, out in zip(data, self.out, strict=True):
            if not np.array_equal(np.bitwise_xor.reduce(words.reshape(self.groups, -1), 1), self.runtime.read(out)):
                return "the yardstick did not read every word"
        return None

    def close(self) -> None:
        self.recording.close()
        for buffer in self.out:
            buffer.close()


class _Subject:
    """What is timed as one: a call, and what Vulkan adds to it. ``make`` gives a step, with timestamps or not."""

    def __init__(
        self, row: BenchRow, device: Device | None = None, make: Callable[[bool], _Step] | None = None
    ) -> None:
        self.row, self.make = row, make
        self.clocked: dict[str, Callable[[], object]] = {}
        self.timed: _Step | None = None
        self.fresh = False
        if device and make:
            self.step = make(False)
            self.clocked["call"] = self.step.run
            if row.context and device.info.timestamp_period_ns:
                # Kompute never resets its queries: a recording has one timed run. CPU drivers allow more, and need
                # them, since they compile a pipeline in its first run.
                self.fresh = device.runtime.name == "kompute" and device.info.kind != "cpu"
                try:
                    self.timed = None if self.fresh else make(True)
                except BaseException:
                    self.step.close()
                    raise

    def sample(self) -> dict[str, Sample]:
        """One time of every measure."""
        made = {name: _clocked(call) for name, call in self.clocked.items()}
        step = self.make(True) if self.fresh and self.make else self.timed
        if step:
            step.run()
            marks = step.timings()
            made["device"] = (marks[-1][1] - marks[0][0],)
            if self.row.layout != "read":
                made["pass 1"] = (marks[0][1] - marks[0][0],)
                if len(marks) == 2:
                    made["gap"], made["pass 2"] = (marks[1][0] - marks[0][1],), (marks[1][1] - marks[1][0],)
            if self.fresh:
                step.close()
        return made

    def close(self) -> None:
        self.step.close()
        if self.timed:
            self.timed.close()


class _Attention(_Subject):
    """A layout on a runtime. ``q``: (q_heads, head_dim)."""

    def __init__(self, row: BenchRow, kv: ContiguousKV, plan: SplitPlan, q: F32) -> None:
        def make(timestamps: bool) -> RecordedCall:
            heads = row.heads_per_workgroup
            made = RecordedCall(kv, plan, timestamps=timestamps, heads_per_workgroup=heads)
            made.write_q(q[None])
            return made

        super().__init__(row, kv.device, make)
        assert isinstance(self.step, RecordedCall)
        self.attention, self.q = self.step, q[None]
        self.clocked["steady call"] = self.steady

    def steady(self) -> None:
        """What a decode loop does."""
        self.attention.write_q(self.q)
        self.attention.run()
        self.attention.result()

    def result(self) -> tuple[F32, F32]:
        """out (q_heads, head_dim) and lse (q_heads,) of a run into an output that was all NaN."""
        self.attention.poison()
        self.attention.run()
        out, lse = self.attention.result()
        return out[0], lse[0]


def _clocked(call: Callable[[], object]) -> Sample:
    caller, cpu, start = thread_time(), process_time(), perf_counter()
    call()
    return perf_counter() - start, process_time() - cpu, thread_time() - caller


def numpy_attention(q: F32, k: F32, v: F32, scale: float) -> F32:
    """(q_heads, head_dim) from q of that shape and k, v (kv_heads, tokens, head_dim): two matmuls and a softmax."""
    scores = q.reshape(len(k), -1, q.shape[1]) @ k.swapaxes(1, 2) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: F32 = (weights @ v / weights.sum(axis=-1, keepdims=True)).reshape(q.shape)
    return out


def _torch_attention(q: F32, k: F32, v: F32, scale: float, dtype: str) -> tuple[str, str, Callable[[], F32]]:
    """(device, version and dtype, call) of scaled_dot_product_attention, on the GPU where torch sees one."""
    torch: Any = importlib.import_module("torch")
    gpu = torch.cuda.is_available()
    kind = torch.float16 if gpu and dtype == "f16" else torch.float32
    arrays = [torch.from_numpy(x)[None].to("cuda" if gpu else "cpu", kind) for x in (q[:, None], k, v)]

    def call() -> F32:
        out = torch.nn.functional.scaled_dot_product_attention(*arrays, scale=scale, enable_gqa=True)
        return np.asarray(out[0, :, 0].float().cpu().numpy(), np.float32)  # waits for the GPU

    where = torch.cuda.get_device_name() if gpu else "CPU"
    return where, f"torch {torch.__version__}, {str(kind).removeprefix('torch.')}", call


# --- the benchmark -----------------------------------------------------------------------------------------


def bench(
    devices: Sequence[Device],
    shapes: Sequence[AttnShape],
    contexts: Sequence[int],
    *,
    dtype: str = "f16",
    repeats: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    on_row: Callable[[BenchRow], None] | None = None,
) -> list[BenchRow]:
    """Verify and time one query row of every shape at every context, in keys, on every device.

    devices: one physical device, opened once per runtime; repeats: rounds per shape and context (None: 5 to 50
    within 10 s). on_row sees each row when it is ready.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    check_int("seed", seed, 0)
    if repeats is not None:
        check_int("repeats", repeats, 1)
    for context in contexts:
        check_int("contexts", context, 1, MAX_CONTEXT)
    for name, given in (("devices", devices), ("shapes", shapes), ("contexts", contexts)):
        if not given:
            raise ArgumentError(f"{name}: got none, expected one or more")
    rows: list[BenchRow] = []
    points = list(itertools.product(shapes, (0, *contexts)))
    for done, (shape, context) in enumerate(points):
        if progress:
            progress(f"{shape} · {f'{context:,} keys' if context else 'host work per call'}", done, len(points))
        data = Inputs.normal(shape, context, dtype, seed)
        with ExitStack() as stack:
            made = _point(stack, devices, data, dtype, repeats) if context else _host(stack, devices, data, dtype)
        for row in made:
            rows.append(row)
            if on_row:
                on_row(row)
    if progress:
        progress("done", len(points), len(points))
    return rows


def _attention(device: Device, kv: ContiguousKV, data: Inputs, base: BenchRow) -> _Attention:
    """The subject of base.layout on a device."""
    shape, info = data.shape, device.info
    if base.layout == "auto":
        plan = plan_splits(kv.tokens, shape, info.compute_units, kv.dtype, kind=info.kind)
    else:
        plan = SplitPlan.fixed(kv.tokens, shape, num_splits=1)
    heads = 1 if base.layout == "per query head" else shape.heads_per_workgroup
    return _Attention(replace(base, plan=plan.fingerprint(), heads_per_workgroup=heads), kv, plan, data.q)


def _row(device: Device, data: Inputs, dtype: str, layout: str) -> BenchRow:
    info, name = device.info, device.runtime.name
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return BenchRow(info.name, info.kind, info.driver, name, str(data.shape), dtype, len(data.k), layout, load)


def _host(stack: ExitStack, devices: Sequence[Device], data: Inputs, dtype: str) -> list[BenchRow]:
    """Rows of the host's work per call: of calls without keys, which leave the device next to nothing to do."""
    subjects = []
    for device in devices:
        kv = ContiguousKV(device, data.k, data.v)
        stack.callback(kv.close)
        subject = _attention(device, kv, data, _row(device, data, dtype, "auto"))
        stack.callback(subject.close)
        out, lse = subject.result()
        if out.any() or not (lse == -np.inf).all():
            return [replace(subject.row, status="failed", note="without keys: expected out 0 and lse -inf")]
        subject.row = replace(subject.row, verified="bits")
        subject.clocked = {"empty submit": device.runtime.empty_submit, **subject.clocked}
        subjects.append(subject)
    samples = _rounds(subjects, HOST_ROUNDS)
    for one in itertools.chain(*samples):
        pairs = zip(one["steady call"], one["empty submit"], strict=True)
        one["host per call"] = tuple(steady - empty for steady, empty in pairs)
    return [row for subject, mine in zip(subjects, samples, strict=True) for row in _rows(subject.row, mine, 0)]


def _point(
    stack: ExitStack, devices: Sequence[Device], data: Inputs, dtype: str, repeats: int | None
) -> list[BenchRow]:
    """All rows of one shape and context."""
    shape, context = data.shape, len(data.k)
    done: list[BenchRow] = []
    subjects: list[_Subject] = []
    first, verified = 0, "bits"  # the oracle's first query head
    if context * shape.q_heads * shape.head_dim > ORACLE_PRODUCTS:
        first, verified = shape.q_heads - shape.group, "bits (last KV head)"
    heads = slice(first // shape.group, None)
    want = reference.emulate(data.q[first:], data.k[:, heads], data.v[:, heads])
    leader: tuple[F32, F32] | None = None  # the first result, all heads of it
    for device in devices:
        base = replace(_row(device, data, dtype, "read"), verified=verified)
        try:
            kv = ContiguousKV(device, data.k, data.v)
            stack.callback(kv.close)
            yard = _Subject(replace(base, verified="xor of all words"), device, partial(_Read, kv))
            stack.callback(yard.close)
            assert isinstance(yard.step, _Read)
            if wrong := yard.step.wrong(pack_k(data.k), pack_v(data.v)):
                done.append(replace(yard.row, verified=None, status="failed", note=wrong))
            else:
                subjects.append(yard)
            for layout in LAYOUTS:
                base = replace(base, layout=layout)
                subject = _attention(device, kv, data, base)
                stack.callback(subject.close)
                got = subject.result()
                leader = leader or got
                if wrong := _difference([x[first:] for x in got], want, first) or _difference(got, leader):
                    done.append(replace(subject.row, verified=None, status="failed", note=wrong))
                else:
                    subjects.append(subject)
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            done.append(replace(base, verified=None, status="refused", note=str(error)))
    baselines, refused = _baselines(data, dtype, want[0], first)
    samples = _rounds(subjects, repeats) + _rounds(baselines, repeats)
    for one, mine in zip(subjects + baselines, samples, strict=True):
        if isinstance(one, _Attention) and leader and (wrong := _difference(one.result(), leader)):
            done.append(replace(one.row, verified=None, status="failed", note=f"after timing: {wrong}"))
        else:
            done += _rows(one.row, mine, context * shape.kv_bytes_per_token(dtype))
    yards = {(r.runtime, r.measure): r.kv_gb_s for r in done if r.layout == "read" and r.kv_gb_s}
    for at, row in enumerate(done):
        best = yards.get((row.runtime, "call" if row.latency_mode == HOST_CLOCK else "device"))
        done[at] = replace(row, of_read=row.kv_gb_s / best if row.kv_gb_s and best else None)
    return done + refused


def _difference(got: Sequence[F32], want: Sequence[F32], first: int = 0) -> str | None:
    """Which bits of (out, lse) differ; ``first``: the query head that index 0 stands for."""
    found = (difference(name, a, b, first) for name, a, b in zip(("out", "lse"), got, want, strict=True))
    return next((text for text in found if text), None)


def _baselines(data: Inputs, dtype: str, want: F32, first: int) -> tuple[list[_Subject], list[BenchRow]]:
    """Attention without Vulkan, on float32 copies of K and V, contiguous per head; rows of what is not to be had."""
    scale = check_scale(None, data.shape.head_dim)
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1), np.float32) for x in (data.k, data.v))
    version = f"NumPy {np.__version__}, float32"
    row = BenchRow("CPU", "cpu", version, "numpy", str(data.shape), dtype, len(k[0]), "baseline")
    found: list[tuple[BenchRow, Callable[[], F32]]] = [(row, lambda: numpy_attention(data.q, k, v, scale))]
    row, refused = replace(row, runtime="torch", driver="torch"), []
    try:
        where, version, call = _torch_attention(data.q, k, v, scale, dtype)
        found.append((replace(row, device=where, driver=version), call))
    except ModuleNotFoundError:
        refused.append(replace(row, status="refused", note="torch not installed"))
    subjects = []
    for row, call in found:
        apart = float(np.linalg.norm(call()[first:].astype(np.float64) - want) / np.linalg.norm(want))
        if apart <= MAX_ERROR[row.driver.rsplit(" ", 1)[-1]]:
            subjects.append(subject := _Subject(replace(row, verified=f"error {apart:.1e}")))
            subject.clocked["call"] = call
        else:
            refused.append(replace(row, status="failed", note=f"relative error {apart:.1e}"))
    return subjects, refused


def _rounds(subjects: Sequence[_Subject], repeats: int | None) -> list[list[dict[str, Sample]]]:
    """Samples of each subject, the subjects in turns; as many as ``repeats``, or as fit the time."""
    samples: list[list[dict[str, Sample]]] = [[] for _ in subjects]
    begin = perf_counter()
    for at in itertools.count(-WARM_UP_ROUNDS):
        if at >= (repeats or FEWEST_REPEATS) and (repeats or at >= MOST_REPEATS or perf_counter() - begin > BUDGET_S):
            return samples
        for subject, mine in zip(subjects, samples, strict=True):
            made = subject.sample()
            if at >= 0:
                mine.append(made)
    raise AssertionError


def _rows(row: BenchRow, samples: Sequence[dict[str, Sample]], kv_bytes: int) -> list[BenchRow]:
    """A row per measure."""
    made = []
    for measure in (m for m in MEASURES if m in samples[0]):
        times, *cpu = zip(*(one[measure] for one in samples), strict=True)
        low, q1, median, q3 = (1e6 * float(x) for x in np.percentile(times, (0, 25, 50, 75)))
        rated = kv_bytes and measure not in ("gap", "pass 2")
        figures: dict[str, Any] = {
            "repeats": len(times),
            "median_us": median,
            "q1_us": q1,
            "q3_us": q3,
            "min_us": low,
            "cpu_us": 1e6 * float(np.median(cpu[0])) if cpu else None,
            "caller_us": 1e6 * float(np.median(cpu[1])) if cpu else None,
            "kv_gb_s": kv_bytes / median / 1e3 if rated and median > 0 else None,
        }
        made.append(replace(row, measure=measure, latency_mode=MEASURES[measure], **figures))
    return made


# --- what comes out ----------------------------------------------------------------------------------------

COLUMNS: Final = (
    *("shape", "context", "runtime", "layout", "verified", "call\nµs", "IQR\nµs", "CPU\nµs", "steady\ncall µs"),
    *("pass 1\nµs", "gap\nµs", "pass 2\nµs", "KV\nGB/s", "of\nread", "device\nGB/s", "of\nread"),
)
HOST_MEASURES: Final = ("empty submit", "call", "steady call", "host per call")
HOST_COLUMNS: Final = (
    "shape",
    "runtime",
    *(f"{measure}\nµs" for measure in HOST_MEASURES),
    "IQR\nµs",
    "of it caller's\nCPU µs",
)


def to_json(row: BenchRow) -> str:
    """One line of JSON; floats rounded to 6 digits."""
    rounded = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(row).items()}
    return json.dumps(rounded, ensure_ascii=False, allow_nan=False)


def to_csv(rows: Iterable[BenchRow]) -> str:
    """A header and one line per row; empty where a field is None."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(BenchRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(json.loads(to_json(row)) for row in rows)
    return text.getvalue()


def table_cells(rows: Iterable[BenchRow]) -> tuple[list[list[str]], list[list[str]]]:
    """Lines of HOST_COLUMNS, one per shape and runtime; lines of COLUMNS, one per context and layout too.

    IQR: between the quartiles of the host per call, or of the call. CPU: of the call, all threads.
    """
    subjects: dict[tuple[str, int, str, str], dict[str, BenchRow]] = {}
    for row in rows:
        subjects.setdefault((row.shape, row.context, row.runtime, row.layout), {})[row.measure] = row
    host, main = [], []
    for (shape, context, runtime, layout), mine in subjects.items():

        def cell(measure: str, field: str = "median_us", mine: Mapping[str, BenchRow] = mine) -> str:
            row = mine.get(measure)
            if field == "iqr":
                x = None if row is None or row.q1_us is None or row.q3_us is None else row.q3_us - row.q1_us
            else:
                x = getattr(row, field, None)
            return "–" if x is None else f"{x:.1%}" if field == "of_read" else f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"

        if not context:
            spread = [cell("host per call", field) for field in ("iqr", "caller_us")]
            host.append([shape, runtime, *map(cell, HOST_MEASURES), *spread])
            continue
        row = next(iter(mine.values()))
        word = (row.verified or "") if row.status == "ok" else f"{row.status.upper()}: {row.note}"
        figures = [cell("call"), cell("call", "iqr"), cell("call", "cpu_us")]
        figures += [cell(measure) for measure in ("steady call", "pass 1", "gap", "pass 2")]
        figures += [cell(measure, field) for measure in ("call", "device") for field in ("kv_gb_s", "of_read")]
        main.append([shape, f"{context:,}", runtime, layout, word, *figures])
    return host, main


# --- pictures of plans, sweeps and benchmarks ----------------------------------------------------------------

_AUTO, _SINGLE = "#0b5fa5", "#c2410c"
_OTHERS = ("#2f7d32", "#7b3fa0", "#8a6d00", "#00788a", "#a3195b", "#555555")


def plot_png(rows: Sequence[SweepRow], title: str) -> bytes:
    """A PNG of the timed rows (at least one): a line per layout, auto solid, a single split dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    with_weights = any(row.tokens_s_with_weights is not None for row in rows)
    figure = Figure(figsize=(9, 5.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    others = iter(_OTHERS * (1 + len(rows)))
    for layout in dict.fromkeys(row.layout for row in rows):
        points = sorted(
            (row.context, row.tokens_s_with_weights if with_weights else row.tokens_s)
            for row in rows
            if row.layout == layout and row.tokens_s is not None
        )
        if not points:
            continue
        x, y = zip(*points, strict=True)
        if layout == "auto":
            axes.plot(x, y, "o-", color=_AUTO, linewidth=2.4, markersize=6, zorder=3, label="auto (the split rule)")
        elif layout == "1":
            axes.plot(x, y, "s--", color=_SINGLE, linewidth=1.8, markersize=5, zorder=2, label="1 split (baseline)")
        else:
            label = f"{layout} splits" if layout.isdecimal() else f"splits of {layout.removeprefix('size:')} keys"
            axes.plot(x, y, ".:", color=next(others), linewidth=1.4, markersize=7, label=label)
    contexts = sorted({row.context for row in rows})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
    if len(contexts) > 10:
        axes.tick_params(axis="x", rotation=45)
    if with_weights:
        axes.set_ylim(0, 1.08 * max(row.tokens_s_with_weights or 0 for row in rows))
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_minor_label(axes.get_ylim())))
    axes.set_xlabel("context (keys, log scale)")
    unit = "tokens/s, attention and weights" if with_weights else "tokens/s, attention alone (log scale)"
    axes.set_ylabel(unit)
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.grid(True, which="minor", color="#ebebeb", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    first = rows[0]
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    axes.set_title(
        f"{first.device} · {first.driver} · {first.runtime}", fontsize=9.5, color="#444444", parse_math=False
    )
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def bench_png(rows: Sequence[BenchRow]) -> bytes:
    """A PNG of the benchmark's whole calls (at least one): KV GB/s against context, a panel per shape."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    calls = [row for row in rows if row.measure == "call" and row.kv_gb_s]
    shapes = list(dict.fromkeys(row.shape for row in calls))
    figure = Figure(figsize=(1 + 5.5 * len(shapes), 5.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    styles = {"auto": "o-", "read": "x:", "baseline": "^-."}
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in calls if row.shape == shape]
        for runtime, layout in dict.fromkeys((row.runtime, row.layout) for row in mine):
            points = sorted((r.context, r.kv_gb_s) for r in mine if (r.runtime, r.layout) == (runtime, layout))
            label = runtime if layout == "baseline" else f"{layout}, {runtime}"
            axes.plot(*zip(*points, strict=True), styles.get(layout, "s--"), linewidth=1.6, markersize=5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({row.context for row in mine})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
        axes.set_title(f"{shape}, {mine[0].dtype}", fontsize=11)
        axes.set_xlabel("context (keys, log scale)")
        axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("KV GB/s of the whole call (log scale)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    device = next((row for row in calls if row.layout != "baseline"), calls[0])
    figure.suptitle(f"Decode attention: {device.device} · {device.driver}", fontsize=11, parse_math=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def plan_png(model: ModelPreset, context: int, card: cost.Card, dtype: str) -> bytes:
    """A PNG of what the model of ``cost`` says: which workgroup runs on which compute unit, and tokens/s by context.

    A bar is a workgroup of pass 1 from its begin to its end, coloured by split; bars of one compute unit share its row.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    shape, layers = model.shape, model.attention_layers

    def plans(keys: int) -> dict[str, SplitPlan]:
        one = SplitPlan.fixed(keys, shape, num_splits=1)
        return {"1 split": one, "auto (the split rule)": plan_splits(keys, shape, card.compute_units, dtype)}

    figure = Figure(figsize=(14, 5.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    colours = colormaps["viridis"]
    for axes, (label, plan) in zip(panels, plans(context).items(), strict=False):
        bars = cost.timeline(plan, card, dtype)
        lanes = Counter(cu for cu, *_ in bars)
        seen: Counter[int] = Counter()
        bottoms = []
        for cu, *_ in bars:
            bottoms.append(cu + seen[cu] / lanes[cu])
            seen[cu] += 1
        axes.barh(
            bottoms,
            [end - begin for _, begin, end, _ in bars],
            height=[0.92 / lanes[cu] for cu, *_ in bars],
            left=[begin for _, begin, *_ in bars],
            color=[colours(split / max(1, plan.num_splits - 1)) for *_, split in bars],
            align="edge",
            linewidth=0,
        )
        p = cost.predict(plan, card, dtype)
        axes.set_ylim(card.compute_units, 0)
        axes.set_xlim(0, p.total_us)
        axes.set_ylabel("compute unit")
        axes.set_xlabel(f"µs ({cost.LABEL}; behind the bars: pass 2)")
        many = f"{p.workgroups:,} workgroups, {p.utilisation:.0%} of the units, {p.fraction:.1%} of peak"
        axes.set_title(f"{label}: {many}", fontsize=8.5)
    contexts = sorted({1 << i for i in range(10, 18)} | {context})
    axes = panels[2]
    for label, style in (("auto (the split rule)", "o-"), ("1 split", "s--")):
        times = [cost.predict(plans(keys)[label], card, dtype).total_us for keys in contexts]
        axes.plot(contexts, [1e6 / layers / t for t in times], style, markersize=5, label=label)
    ideal = [1e6 / layers / cost.ideal(shape, keys, card, dtype) for keys in contexts]
    axes.plot(contexts, ideal, ":", color="#555555", label="ideal: K and V at peak bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    axes.set_xlabel("context (keys, log scale)")
    axes.set_ylabel(f"tokens/s, attention of {layers} layer{'s' * (layers > 1)} alone (log scale), {cost.LABEL}")
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    what = f"{model.name}, {shape}, {dtype}, {context:,} keys on {card.title}"
    figure.suptitle(f"{cost.LABEL}, not measured: {what}", fontsize=12, parse_math=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def keys_label(keys: int) -> str:
    """1024 to "1k", 1000 to "1,000"."""
    return f"{keys // 1024}k" if keys and keys % 1024 == 0 else f"{keys:,}"


def _minor_label(limits: tuple[float, float]) -> Callable[[float, object], str]:
    """Labels 2 and 5 of each decade where the axis spans few decades."""
    few = limits[1] / limits[0] < 200

    def label(y: float, _: object) -> str:
        return f"{y:,.4g}" if few and f"{y:e}"[0] in "25" else ""

    return label
