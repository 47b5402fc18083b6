"""What the pictures share: a figure without a window, an axis of context lengths, and its PNG. Needs matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that draws into memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: Figure, text: str, size: float = 12) -> None:
    """Write ``text`` above the figure, its lines wrapped to the figure's width. size: of the letters, in points."""
    most = int(figure.get_figwidth() * 72 / (0.62 * size))  # letters of 0.62 of the size on average
    lines = (textwrap.fill(line, most) for line in text.splitlines())
    figure.suptitle("\n".join(lines), fontsize=size, parse_math=False)


def finish_axes(axes: Axes, x: Iterable[float], log_digits: int | None = 4, contexts: bool = True) -> None:
    """Label both axes and draw the grid. x: contexts of the points.

    log_digits: a log scale for y too, whose labels have so many digits; None leaves y as it is. contexts: whether each
    of ``x`` has a tick, on a log scale.
    """
    if contexts:
        axes.set_xscale("log", base=2)
        ticks = sorted(set(x))
        axes.set_xticks(ticks)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda x, _: keys_label(round(x)))
        axes.tick_params(axis="x", rotation=45 if len(ticks) > 10 else 0)
    axes.set_xlabel(f"context (keys{', log scale' if contexts else ''})")
    if log_digits is not None:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(f"{{x:,.{log_digits}g}}")
        axes.yaxis.set_minor_formatter(lambda y, _: f"{y:,.4g}" if f"{y:e}"[0] in "25" else "")
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.grid(True, axis="y", which="minor", color="#ebebeb", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def keys_label(keys: int) -> str:
    """1024 to "1k", 1000 to "1,000"."""
    return f"{keys // 1024}k" if keys and keys % 1024 == 0 else f"{keys:,}"
