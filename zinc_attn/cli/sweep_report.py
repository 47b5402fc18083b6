"""What ``zinc-attn sweep`` prints: what is measured, a line per point, and what the words of the table mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..distributed.ranks import Ranks
from ..runtime.device import Device
from ..tools.harness.tables import figure, grouped
from ..tools.models import ModelPreset
from ..tools.sweep import SweepRow, SweepSpec
from .terminal import arithmetic_text, count, model_text, new_table, plural

if TYPE_CHECKING:
    from rich.table import Table


def print_sweep_head(device: Device, model: ModelPreset, specs: Sequence[SweepSpec], ranks: Ranks | None) -> None:
    """Say what is measured, before it is."""
    where = f", rank 0 of {ranks.size}" if ranks else ""
    print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}{where}")
    spec, layers = specs[0], plural(model.attention_layers, "attention layer")
    if model.windowed_layers:
        layers += f" ({model.windowed_layers} more with a window of {model.window} keys are not counted)"
    print(f"{model_text(model, spec.dtype)}, {layers}")
    memory = f"cache with pages of {spec.page_size} tokens" if spec.page_size else "contiguous K and V"
    print(f"{call_text(specs)}; {memory}{arithmetic_text(spec.arithmetic)}", flush=True)


def sweep_title(model: ModelPreset, specs: Sequence[SweepSpec], ranks: Ranks | None) -> str:
    """The title of the picture."""
    spec = specs[0]
    alone = len(specs) == spec.batch == spec.q_len == 1
    subject = "decode attention" if alone else f"attention\n{call_text(specs)}"
    subject += f", {plural(ranks.size, 'rank')}" if ranks else ""
    subject += arithmetic_text(spec.arithmetic)
    return f"{model_text(model, spec.dtype)}, {plural(model.attention_layers, 'layer')}: {subject}"


def call_text(specs: Sequence[SweepSpec]) -> str:
    """How many sequences and rows a call has."""
    batch = specs[0].batch
    *most, last = (spec.q_len for spec in specs)
    rows = f"{', '.join(map(str, most))} or {plural(last, 'row')}" if most else plural(last, "row")
    return f"{plural(batch, 'sequence')}, {rows}{' each' if batch > 1 else ''} per call"


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """One line per point."""
    weights = any(row.weights_ms is not None for row in rows)
    ranks = any(row.formula_bytes is not None for row in rows)
    several = len({row.q_len for row in rows}) > 1
    columns = [
        *(["rows"] if several else []),
        "context",
        "layout",
        "splits",
        *(["ranks", "bytes per\nlayer", "by the\nformula"] if ranks else []),
        "verified",
        "µs per\nlayer",
        "IQR\nµs",
    ]
    columns += ["KV\nGB/s", "attn\nms/step", "attn\ntokens/s"]
    table = new_table(*columns, *(["with weights\ntokens/s"] if weights else []))
    previous = None
    for row in rows:
        if previous not in (None, (row.context, row.q_len)) and not ranks:
            table.add_section()
        previous = row.context, row.q_len
        word = {"ok": row.verified or "", "failed": "FAILED", "refused": "refused"}[row.status]
        figures = (row.median_us, row.iqr_us, row.kv_gb_s, row.attention_ms_per_step, row.tokens_s)
        table.add_row(
            *([str(row.q_len)] if several else []),
            f"{row.context:,}",
            row.layout,
            f"{row.num_splits:,}",
            *((str(row.ranks), count(row.received_bytes), count(row.formula_bytes)) if ranks else ()),
            word.replace(" (sampled)", "*"),
            *(figure(x) for x in figures),
            *([figure(row.tokens_s_with_weights)] if weights else []),
            style={"failed": "bold red", "refused": "yellow"}.get(row.status),
        )
    return table


def sweep_notes(rows: Sequence[SweepRow]) -> Iterator[str]:
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
    if any(row.verified == "bound (sampled)" for row in rows):
        yield "bound*: some KV heads compared with float64, everything with the first layout, or with rank 0's bits."
    if any(row.verified == "bits (sampled)" and row.formula_bytes is None for row in rows):
        yield "bits*: some KV heads compared with the oracle, everything with the context's first layout."
    if any(row.verified == "bits (sampled)" and row.formula_bytes is not None for row in rows):
        yield "bits*: some KV heads compared with the oracle, everything with rank 0's."
    troubles = grouped(((row.context, row.status, row.error), row.layout) for row in rows if row.error)
    for (context, status, error), layouts in troubles.items():
        yield f"{context:,} keys, {', '.join(layouts)}: {'FAILED' if status == 'failed' else status}: {error}"
