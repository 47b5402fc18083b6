"""What ``zinc-attn sweep`` prints: what is measured, a line per point, and what the words of the table mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..distributed.ranks import Ranks
from ..runtime.device import Device
from ..tools.harness.tables import figure, grouped
from ..tools.models import ModelPreset
from ..tools.sweep import SweepRow, SweepSpec
from .terminal import arithmetic_text, count, model_text, new_table, plural

if TYPE_CHECKING:
    from rich.table import Table


FIGURES: Final = {  # heading and field
    "µs per\nlayer": "median_us",
    "IQR\nµs": "iqr_us",
    "KV\nGB/s": "kv_gb_s",
    "attn\nms/step": "attention_ms_per_step",
    "attn\ntokens/s": "tokens_s",
}


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
    ranks = any(row.formula_bytes is not None for row in rows)
    several = len({row.q_len for row in rows}) > 1
    columns: dict[str, Callable[[SweepRow], str]] = {"rows": lambda row: str(row.q_len)} if several else {}
    columns |= {
        "context": lambda row: f"{row.context:,}",
        "layout": lambda row: row.layout,
        "splits": lambda row: f"{row.num_splits:,}",
    }
    if ranks:
        columns["ranks"] = lambda row: str(row.ranks)
        columns["bytes per\nlayer"] = lambda row: count(row.received_bytes)
        columns["by the\nformula"] = lambda row: count(row.formula_bytes)
    columns["verified"] = _verdict
    columns |= {heading: _figure_of(field) for heading, field in FIGURES.items()}
    if any(row.weights_ms is not None for row in rows):
        columns["with weights\ntokens/s"] = _figure_of("tokens_s_with_weights")
    table, previous = new_table(*columns), None
    for row in rows:
        if previous not in (None, (row.context, row.q_len)) and not ranks:
            table.add_section()
        previous = row.context, row.q_len
        style = {"failed": "bold red", "refused": "yellow"}.get(row.status)
        table.add_row(*(cell(row) for cell in columns.values()), style=style)
    return table


def _verdict(row: SweepRow) -> str:
    return {"failed": "FAILED", "refused": "refused"}.get(row.status, row.verified or "").replace(" (sampled)", "*")


def _figure_of(field: str) -> Callable[[SweepRow], str]:
    return lambda row: figure(getattr(row, field))


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
    for word, with_what in (("bound", "float64"), ("bits", "the oracle")):
        if sampled := [row for row in rows if row.verified == f"{word} (sampled)"]:
            other = "rank 0's" if sampled[0].formula_bytes is not None else "those of the context's first layout"
            yield f"{word}*: some KV heads compared with {with_what}, the bits of all with {other}."
    troubles = grouped(((row.context, row.status, row.error), row.layout) for row in rows if row.error)
    for (context, status, error), layouts in troubles.items():
        yield f"{context:,} keys, {', '.join(layouts)}: {'FAILED' if status == 'failed' else status}: {error}"
