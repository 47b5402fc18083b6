"""What the pictures share: a figure without a window, an axis of context lengths, and its PNG. Needs matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class Line(NamedTuple):
    """A line of a picture. points: of x and y, in any order; None as y: left out; style: of matplotlib."""

    label: str
    points: Sequence[tuple[float, float | None]]
    style: str
    width: float = 1.6


def lines_png(
    panels: Mapping[str, Sequence[Line]], title: str, y_label: str, *, log_digits: int | None = 4, contexts: bool = True
) -> bytes:
    """A PNG of lines, a panel per title of ``panels``.

    log_digits: as for ``finish_axes``; contexts: whether x is on a log scale with a tick per point, or counts keys.
    """
    figure = new_figure(9 if len(panels) == 1 else 1 + 5.5 * len(panels), 5.4)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (about, lines) in zip(every, panels.items(), strict=True):
        drawn = [(line, sorted((x, y) for x, y in line.points if y is not None)) for line in lines]
        for line, points in drawn:
            if points:
                axes.plot(*zip(*points, strict=True), line.style, linewidth=line.width, markersize=5, label=line.label)
        finish_axes(axes, [x for _, points in drawn for x, _ in points], log_digits, contexts)
        axes.set_title(about, fontsize=9.5, color="#444444", parse_math=False)
    low, high = every[0].get_ylim()
    if log_digits is None:
        every[0].set_ylim(0, 1.03 * high)
    elif high / low < 200:  # so few decades that 2 and 5 of each have room for a label
        every[0].yaxis.set_minor_formatter(lambda y, _: f"{y:,.4g}" if f"{y:e}"[0] in "25" else "")
    every[0].set_ylabel(y_label if log_digits is None else f"{y_label} (log scale)")
    every[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    set_title(figure, title)
    return to_png(figure)


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
