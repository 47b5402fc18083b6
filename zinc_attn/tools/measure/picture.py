"""The picture of measured rows: a figure over context lengths, a line per layout and whatever else differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..harness.plots import finish_axes, new_figure, set_title, to_png
from ..harness.tables import grouped
from .rows import LINE, Row

LOOKS: Final = {"auto": ("auto (the split rule)", "o-"), "1": ("1 split (baseline)", "s--")}  # label and style


def rows_png(rows: Sequence[Row], title: str, field: str, label: str) -> bytes | None:
    """A PNG of ``field`` of the rows, whose axis has ``label``, over their contexts; None where no row has it.

    A line per layout, dispatcher, dtype and shape. Each context has a tick, and both axes are on a log scale; those of
    the steps of a decode are linear.
    """
    rows = [row for row in rows if row.figures[field] is not None]
    if not rows:
        return None
    figure, steps = new_figure(9, 5.4), rows[0].measure == "step"
    axes, width = figure.subplots(), 0.7 if steps else 1.8
    told = [name for name in LINE if len({row.line[name] for row in rows}) > 1]
    for mine in grouped((tuple(row.line.values()), row) for row in rows).values():
        x, y = zip(*sorted((row.context, row.figures[field]) for row in mine), strict=True)
        layout, style = LOOKS.get(mine[0].layout, (f"splits {mine[0].layout}", ".:"))
        said = ", ".join([*(mine[0].line[name] for name in told), layout])
        axes.plot(x, y, "-" if steps else style, linewidth=width, markersize=5, label=said)
    finish_axes(axes, [row.context for row in rows], None if steps else 4, contexts=not steps)
    axes.set_ylabel(label if steps else f"{label} (log scale)")
    axes.legend(frameon=False, fontsize=8)
    set_title(figure, title)
    return to_png(figure)
