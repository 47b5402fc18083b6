"""The pictures of a sweep, tokens/s, and of a benchmark, KV GB/s, over context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..harness.plots import Line, lines_png
from ..harness.tables import grouped
from .rows import Row

_LOOKS: Final = {"auto": ("auto (the split rule)", "o-"), "1": ("1 split (baseline)", "s--")}
_STYLES: Final = {"auto": "o-", "read": "x:", "baseline": "^-."}


def sweep_png(rows: Sequence[Row], title: str) -> bytes:
    """A PNG of the timed rows (at least one): a line per layout and q_len, auto solid and a single split dashed."""
    weights = any(row.tokens_s_with_weights is not None for row in rows)
    groups = grouped(((row.layout, row.q_len), row) for row in rows)
    several, lines = len({q_len for _, q_len in groups}) > 1, []
    for (layout, q_len), mine in groups.items():
        other = f"{layout} splits" if layout.isdecimal() else f"splits of {layout.removeprefix('size:')} keys"
        label, style = _LOOKS.get(layout, (other, ".:"))
        label += f", {q_len} row{'s' * (q_len > 1)}" if several else ""
        points = [(row.context, row.tokens_s_with_weights if weights else row.tokens_s) for row in mine]
        lines.append(Line(label, points, style, 2.4 if layout == "auto" else 1.6))
    panels = {f"{rows[0].device} · {rows[0].driver} · {rows[0].runtime}": lines}
    what = f"tokens/s, attention {'and weights' if weights else 'alone'}"
    return lines_png(panels, title, what, log_digits=None if weights else 4)


def bench_png(rows: Sequence[Row]) -> bytes:
    """A PNG of the benchmark's whole calls (at least one): KV GB/s against context, a panel per shape."""
    calls = [row for row in rows if row.measure == "call" and row.kv_gb_s]
    panels = {}
    for about, mine in grouped((f"{row.shape}, {row.dtype}", row) for row in calls).items():
        groups = grouped(((row.layout, row.runtime), (row.context, row.kv_gb_s)) for row in mine)
        panels[about] = [
            Line(runtime if layout == "baseline" else f"{layout}, {runtime}", points, _STYLES.get(layout, "s--"))
            for (layout, runtime), points in groups.items()
        ]
    device = next((row for row in calls if row.layout != "baseline"), calls[0])
    arithmetic = next((row.arithmetic for row in calls if row.arithmetic not in (None, "canonical")), None)
    how = f" by arithmetic {arithmetic}" if arithmetic else ""
    return lines_png(panels, f"Decode attention{how}\n{device.device} · {device.driver}", "KV GB/s of the whole call")
