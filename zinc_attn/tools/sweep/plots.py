"""The picture of a sweep: tokens/s over context lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..harness.plots import finish_axes, new_figure, set_title, to_png
from .rows import SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AUTO, _SINGLE = "#0b5fa5", "#c2410c"
_OTHERS = ("#2f7d32", "#7b3fa0", "#8a6d00", "#00788a", "#a3195b", "#555555")


def plot_png(rows: Sequence[SweepRow], title: str) -> bytes:
    """A PNG of the timed rows (at least one): a line per layout and q_len, auto solid and a single split dashed."""
    with_weights = any(row.tokens_s_with_weights is not None for row in rows)
    figure = new_figure(9, 5.4)
    axes = figure.subplots()
    _draw_lines(axes, rows, "tokens_s_with_weights" if with_weights else "tokens_s")
    contexts = sorted({row.context for row in rows})
    finish_axes(axes, contexts, None if with_weights else 4)
    if len(contexts) > 10:
        axes.tick_params(axis="x", rotation=45)
    if with_weights:
        axes.set_ylim(0, 1.08 * max(row.tokens_s_with_weights or 0 for row in rows))
    else:
        low, high = axes.get_ylim()
        few = high / low < 200  # decades, so that 2 and 5 of each have room for a label
        axes.yaxis.set_minor_formatter(lambda y, _: f"{y:,.4g}" if few and f"{y:e}"[0] in "25" else "")
    axes.set_ylabel(f"tokens/s, attention {'and weights' if with_weights else 'alone (log scale)'}")
    axes.grid(True, which="minor", color="#ebebeb", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    first = rows[0]
    set_title(figure, title)
    where = f"{first.device} · {first.driver} · {first.runtime}"
    axes.set_title(where, fontsize=9.5, color="#444444", parse_math=False)
    return to_png(figure)


def _draw_lines(axes: Axes, rows: Sequence[SweepRow], figure: str) -> None:
    others, several = iter(_OTHERS * (1 + len(rows))), len({row.q_len for row in rows}) > 1
    for layout, q_len in dict.fromkeys((row.layout, row.q_len) for row in rows):
        mine = [row for row in rows if (row.layout, row.q_len) == (layout, q_len)]
        points = sorted((row.context, getattr(row, figure)) for row in mine)
        points = [point for point in points if point[1] is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        if several:
            label = f"{layout}, {q_len} row{'s' * (q_len > 1)}"
            axes.plot(x, y, "o-" if layout == "auto" else ".:", color=next(others), linewidth=1.6, label=label)
        elif layout == "auto":
            axes.plot(x, y, "o-", color=_AUTO, linewidth=2.4, markersize=6, zorder=3, label="auto (the split rule)")
        elif layout == "1":
            axes.plot(x, y, "s--", color=_SINGLE, linewidth=1.8, markersize=5, zorder=2, label="1 split (baseline)")
        else:
            label = f"{layout} splits" if layout.isdecimal() else f"splits of {layout.removeprefix('size:')} keys"
            axes.plot(x, y, ".:", color=next(others), linewidth=1.4, markersize=7, label=label)
