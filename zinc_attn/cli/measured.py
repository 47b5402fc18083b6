"""What ``zinc-attn sweep``, ``bench`` and ``decode`` print and leave: tables of rows, what their words mean, files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..distributed.ranks import Ranks
from ..runtime.device import Device
from ..runtime.protocol import DeviceInfo
from ..tools.harness.files import write_report
from ..tools.harness.tables import figure, grouped
from ..tools.measure import DEVICE_CLOCK, HOST_CLOCK, CallSpec, Row
from ..tools.models import ModelPreset, slug
from .terminal import arithmetic_text, count, model_text, plural, print_json, print_rows, say_written

SWEEP_FIGURES: Final = {  # heading and field
    "µs per\nlayer": "median_us",
    "IQR\nµs": "iqr_us",
    "KV\nGB/s": "kv_gb_s",
    "attn\nms/step": "attention_ms_per_step",
    "attn\ntokens/s": "tokens_s",
}
HOST_FIGURES: Final = (  # heading, measure and field
    ("empty submit\nµs", "empty submit", "median_us"),
    ("call\nµs", "call", "median_us"),
    ("steady call\nµs", "steady call", "median_us"),
    ("IQR\nµs", "steady call", "iqr_us"),
    ("host per call\nµs", "host per call", "median_us"),
    ("of it caller's\nCPU µs", "host per call", "caller_us"),
)
BENCH_FIGURES: Final = (
    ("call\nµs", "call", "median_us"),
    ("IQR\nµs", "call", "iqr_us"),
    ("CPU\nµs", "call", "cpu_us"),
    ("steady\ncall µs", "steady call", "median_us"),
    *((f"{measure}\nµs", measure, "median_us") for measure in ("pass 1", "gap", "pass 2")),
    ("KV\nGB/s", "call", "kv_gb_s"),
    ("of\nread", "call", "of_read"),
    ("device\nGB/s", "device", "kv_gb_s"),
    ("of\nread", "device", "of_read"),
)
BENCH_WORDS: Final = (  # of the tables
    "call: submit a recorded call and wait. steady call: write the query, call, read the result, as decoding does.",
    "host per call: a steady call without keys less an empty submission, which leaves the work of the host's code.",
    "pass 1, gap, pass 2, device GB/s: from runs with timestamps, beside those of the call, so that on a machine with",
    "other work they may add up to more than it. of read: of the rate at which a kernel that does nothing else reads K",
    "and V. GB/s counts each stored byte of K and V once.",
)


def row_printer(args: Namespace) -> Callable[[Row], None] | None:
    """With --json, what prints each row when it is ready."""
    return (lambda row: print_json([row.record()])) if args.json else None


def leave_files(args: Namespace, folder: str, info: DeviceInfo, rows: Sequence[Row], png: bytes | None) -> None:
    """Write the rows' files and the picture to --out, or to ``folder`` with the device's name behind it."""
    where = Path(args.out or f"{folder}-{slug(info.name)}")
    say_written(write_report(where, rows[0].tool, [row.record() for row in rows], png))


def _cell(row: Row | None, field: str) -> str:
    x = getattr(row, field, None)
    return f"{x:.1%}" if field == "of_read" and x is not None else figure(x)


def _verdict(row: Row) -> str:
    return {"failed": "FAILED", "refused": "refused"}.get(row.status, row.verified or "").replace(" (sampled)", "*")


# --- sweep -------------------------------------------------------------------------------------------------


def print_sweep_head(device: Device, model: ModelPreset, specs: Sequence[CallSpec], ranks: Ranks | None) -> None:
    """Say what is measured, before it is."""
    where = f", rank 0 of {ranks.size}" if ranks else ""
    print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}{where}")
    spec, layers = specs[0], plural(model.attention_layers, "attention layer")
    if model.windowed_layers:
        layers += f" ({model.windowed_layers} more with a window of {model.window} keys are not counted)"
    print(f"{model_text(model, spec.dtype)}, {layers}")
    memory = f"cache with pages of {spec.page_size} tokens" if spec.page_size else "contiguous K and V"
    print(f"{call_text(specs)}; {memory}{arithmetic_text(spec.arithmetic)}", flush=True)


def sweep_title(model: ModelPreset, specs: Sequence[CallSpec], ranks: Ranks | None) -> str:
    """The title of the picture."""
    spec = specs[0]
    alone = len(specs) == spec.batch == spec.q_len == 1
    subject = "decode attention" if alone else f"attention\n{call_text(specs)}"
    subject += f", {plural(ranks.size, 'rank')}" if ranks else ""
    subject += arithmetic_text(spec.arithmetic)
    return f"{model_text(model, spec.dtype)}, {plural(model.attention_layers, 'layer')}: {subject}"


def call_text(specs: Sequence[CallSpec]) -> str:
    """How many sequences and rows a call has."""
    batch = specs[0].batch
    *most, last = (spec.q_len for spec in specs)
    rows = f"{', '.join(map(str, most))} or {plural(last, 'row')}" if most else plural(last, "row")
    return f"{plural(batch, 'sequence')}, {rows}{' each' if batch > 1 else ''} per call"


def print_sweep(rows: Sequence[Row]) -> None:
    """One line per point, and what the table's words mean."""
    ranks = any(row.formula_bytes is not None for row in rows)
    several = len({row.q_len for row in rows}) > 1
    figures = dict(SWEEP_FIGURES)
    if any(row.weights_ms is not None for row in rows):
        figures["with weights\ntokens/s"] = "tokens_s_with_weights"
    bytes_of, lines = ("ranks", "bytes per\nlayer", "by the\nformula") if ranks else (), []
    for row in rows:
        cells = [*[str(row.q_len)] * several, f"{row.context:,}", row.layout, f"{row.num_splits:,}"]
        cells += [str(row.ranks), count(row.received_bytes), count(row.formula_bytes)] if ranks else []
        lines.append([*cells, _verdict(row), *(_cell(row, field) for field in figures.values())])
    columns = (*["rows"] * several, "context", "layout", "splits", *bytes_of, "verified", *figures)
    print_rows(columns, lines, sections=0 if ranks else 1 + several)
    print("\n".join(sweep_notes(rows)))


def sweep_notes(rows: Sequence[Row]) -> Iterator[str]:
    """What the table's words mean."""
    timed = [row for row in rows if row.median_us is not None]
    if timed:
        first = timed[0]
        words = {(row.verified or "").split(" ")[0] for row in timed}
        if "bound" in words:
            yield "bound: out and lse are as near to float64 as the roundings of matrix units allow, and every layout"
            yield "has the bits of the context's first one; they are this device's and driver's own."
        bits = "bits: out and lse equal the oracle's bit for bit. " if "bits" in words else ""
        yield f"{bits}Time: {first.latency_mode}."
        counts = sorted({row.batch * row.q_len for row in timed})
        tokens = plural(counts[0], "token") if len(counts) == 1 else f"{', '.join(map(str, counts))} tokens"
        layers = plural(first.layers, "layer")
        yield f"Values: {first.data}. tokens/s: as if attention over {layers} were all of a step of {tokens}."
        if first.formula_bytes is not None:
            yield f"Compared on {plural(first.ranks, 'rank')}, and the same on all. bytes per layer: what rank 0 gets"
            yield "in a call; the formula: nodes of the other ranks × q_len × q_heads × (head_dim + 2) × 4."
    for word, with_what in (("bound", "float64"), ("bits", "the oracle")):
        if sampled := [row for row in rows if row.verified == f"{word} (sampled)"]:
            other = "rank 0's" if sampled[0].formula_bytes is not None else "those of the context's first layout"
            yield f"{word}*: some KV heads compared with {with_what}, the bits of all with {other}."
    troubles = grouped(((row.context, row.status, row.error), row.layout) for row in rows if row.error)
    for (context, status, error), layouts in troubles.items():
        yield f"{context:,} keys, {', '.join(layouts)}: {'FAILED' if status == 'failed' else status}: {error}"


# --- bench -------------------------------------------------------------------------------------------------


def print_bench(rows: Iterable[Row]) -> None:
    """The table of the host's work, the table of the points, and what their words mean.

    IQR: between the quartiles of the steady call, or of the call. CPU: of the call, all threads.
    """
    host, points, words = [], [], set()
    subjects = grouped(((row.shape, row.context, row.runtime, row.layout), row) for row in rows)
    for (shape, context, runtime, layout), mine in subjects.items():
        measures, row = {row.measure: row for row in mine}, mine[0]
        cells = [_cell(measures.get(measure), field) for _, measure, field in BENCH_FIGURES if context]
        word = (row.verified or "") if row.status == "ok" else f"{row.status.upper()}: {row.error}"
        words.add(word.split(" ")[0])
        if context:
            points.append([shape, f"{context:,}", runtime, layout, word, *cells])
        else:
            host.append([shape, runtime, *(_cell(measures.get(measure), field) for _, measure, field in HOST_FIGURES)])
    for first, figures, lines in (
        (("shape", "runtime"), HOST_FIGURES, host),
        (("shape", "context", "runtime", "layout", "verified"), BENCH_FIGURES, points),
    ):
        print_rows((*first, *(heading for heading, *_ in figures)), lines, len(first))
        print()
    print(f"Times: {HOST_CLOCK}; passes by {DEVICE_CLOCK}; medians.")
    print("\n".join(BENCH_WORDS))
    if "bound" in words:
        print("bound: as near to float64 as the roundings of matrix units allow, and equal bits of both layouts.")
