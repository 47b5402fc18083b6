"""The picture of measured rows: a figure over context lengths, a line per layout and whatever else differs."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..harness.tables import grouped
from .rows import LINE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS: Final = {"auto": ("auto (the split rule)", "o-"), "1": ("1 split (baseline)", "s--")}  # label and style
TITLE_LETTERS: Final = 87  # of a line of the title that fits the figure's width


def rows_png(rows: Sequence[Row], title: str, field: str, label: str) -> bytes | None:
    """A PNG of ``field`` of the rows, whose axis has ``label``, over their contexts; None where no row has it.

    A line per layout, dispatcher, dtype and shape. Each context has a tick, and both axes are on a log scale; those of
    the steps of a decode are linear. Needs matplotlib.
    """
    rows = [row for row in rows if row.figures[field] is not None]
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure, steps = Figure(figsize=(9, 5.4), dpi=140, layout="constrained"), rows[0].measure == "step"
    FigureCanvasAgg(figure)  # draws into memory
    axes, width = figure.subplots(), 0.7 if steps else 1.8
    told = [name for name in LINE if len({row.line[name] for row in rows}) > 1]
    for mine in grouped((tuple(row.line.values()), row) for row in rows).values():
        x, y = zip(*sorted((row.context, row.figures[field]) for row in mine), strict=True)
        layout, style = LOOKS.get(mine[0].layout, (f"splits {mine[0].layout}", ".:"))
        said = ", ".join([*(mine[0].line[name] for name in told), layout])
        axes.plot(x, y, "-" if steps else style, linewidth=width, markersize=5, label=said)
    if not steps:
        _set_scales(axes, sorted({row.context for row in rows}))
    scale = "" if steps else ", log scale"
    axes.set_xlabel(f"context (keys{scale})")
    axes.set_ylabel(f"{label}{scale}")
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.grid(True, axis="y", which="minor", color="#ebebeb", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    lines = (textwrap.fill(line, TITLE_LETTERS) for line in title.splitlines())
    figure.suptitle("\n".join(lines), fontsize=12, parse_math=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _set_scales(axes: Axes, contexts: Sequence[int]) -> None:
    """Log scales: a tick per context, and labels at 1, 2 and 5 of every decade."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda x, _: keys_label(round(x)))
    axes.tick_params(axis="x", rotation=45 if len(contexts) > 10 else 0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:,.4g}" if f"{y:e}"[0] in "25" else "")


def keys_label(keys: int) -> str:
    """1024 to "1k", 1000 to "1,000"."""
    return f"{keys // 1024}k" if keys and keys % 1024 == 0 else f"{keys:,}"
