"""The picture of a benchmark: KV GB/s over context lengths."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.plots import finish_axes, new_figure, set_title, to_png
from .rows import BenchRow


def bench_png(rows: Sequence[BenchRow]) -> bytes:
    """A PNG of the benchmark's whole calls (at least one): KV GB/s against context, a panel per shape."""
    calls = [row for row in rows if row.measure == "call" and row.kv_gb_s]
    shapes = list(dict.fromkeys(row.shape for row in calls))
    figure = new_figure(1 + 5.5 * len(shapes), 5.4)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    styles = {"auto": "o-", "read": "x:", "baseline": "^-."}
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in calls if row.shape == shape]
        for runtime, layout in dict.fromkeys((row.runtime, row.layout) for row in mine):
            points = sorted((r.context, r.kv_gb_s) for r in mine if (r.runtime, r.layout) == (runtime, layout))
            label = runtime if layout == "baseline" else f"{layout}, {runtime}"
            axes.plot(*zip(*points, strict=True), styles.get(layout, "s--"), linewidth=1.6, markersize=5, label=label)
        finish_axes(axes, [row.context for row in mine])
        axes.set_title(f"{shape}, {mine[0].dtype}", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("KV GB/s of the whole call (log scale)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    device = next((row for row in calls if row.layout != "baseline"), calls[0])
    arithmetic = next((row.arithmetic for row in calls if row.arithmetic not in (None, "canonical")), None)
    how = f" by arithmetic {arithmetic}" if arithmetic else ""
    set_title(figure, f"Decode attention{how}\n{device.device} · {device.driver}")
    return to_png(figure)
