"""The picture of a benchmark: KV GB/s over context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..harness.plots import Line, lines_png
from ..harness.tables import grouped
from .rows import BenchRow

_STYLES: Final = {"auto": "o-", "read": "x:", "baseline": "^-."}


def bench_png(rows: Sequence[BenchRow]) -> bytes:
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
