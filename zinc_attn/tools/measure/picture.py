"""The picture of measured rows: a figure over context lengths, with a name at the end of every line.

The PNG holds what it shows as JSON, too, in its text "Description": the title, the notes, and every line's points.
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..harness.tables import MISSING, figure, grouped
from .rows import MODELED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRAY, GRID = "#1f2933", "#6b7480", "#e4e7eb"
HUES: Final = (
    "#1d5b8f",
    "#b4642d",
    "#3d7a57",
    "#77589c",
    "#8a6f1e",
    "#a0476b",
    "#4b6b7f",
    "#7d7d7d",
)  # of a device, say
PALER: Final = 0.45  # of its other layouts: the share of white
NOTE_LETTERS: Final = 118  # of a line of the notes that fits the figure's width
POINTS: Final = 12.5  # from one line of names to the next
Record = Mapping[str, Any]
Line = list[tuple[int, float]]


def rows_png(records: Sequence[Record], title: str, notes: str, field: str) -> bytes | None:
    """A PNG of ``field`` of rows' records over their contexts, with a title and lines of notes; None where none has it.

    A line per layout, device, dispatcher, dtype and shape. Both axes are on a log scale, and each context has a tick;
    the steps of a decode, and tokens/s of a whole step, are on linear ones from 0. Needs matplotlib.
    """
    records = [one for one in records if one.get(field) is not None]
    if not records:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, lines = records[0]["measure"] == "step", named_lines(records, field)
    drawing = Figure(figsize=(9, 5), dpi=140, layout="constrained")
    FigureCanvasAgg(drawing)  # draws into memory
    axes = drawing.subplots()
    hues = {subject: HUES[at % len(HUES)] for at, subject in enumerate(dict.fromkeys(name for name, _ in lines))}
    drawn = []
    for (subject, layout), points in lines.items():
        main, modeled = layout in ("split rule", ""), MODELED in subject
        color = hues[subject] if main else _paler(hues[subject])
        style: dict[str, Any] = {
            "linestyle": (0, (4, 2)) if modeled else "-",
            "marker": "" if steps else "o",
            "markersize": 5.5,
        }
        style |= {"markerfacecolor": "white" if modeled else color, "linewidth": 1.2 if steps else 2.2 if main else 1.8}
        axes.plot(*zip(*points, strict=True), color=color, zorder=3 if main else 2, **style)
        drawn.append(("\n".join(filter(None, (subject, layout))), points[-1], hues[subject]))
    _set_scales(axes, sorted({one["context"] for one in records}), steps, steps or field == "step_tokens_s")
    said = [part for line in notes.splitlines() for part in textwrap.wrap(line, NOTE_LETTERS, break_on_hyphens=False)]
    axes.set_title(title, loc="left", fontsize=14.5, fontweight="bold", color=INK, pad=10 + 13.5 * len(said))
    axes.text(0, 1.02, "\n".join(said), transform=axes.transAxes, fontsize=9.2, color=GRAY, linespacing=1.35)
    for text in (axes.title, *axes.texts):
        text.set_parse_math(False)
    drawing.draw_without_rendering()  # says where the lines end
    _name_lines(axes, drawn)
    shown = {"title": title, "notes": notes, "lines": {" · ".join(filter(None, name)): x for name, x in lines.items()}}
    png = io.BytesIO()
    drawing.savefig(png, format="png", metadata={"Description": json.dumps(shown)})
    return png.getvalue()


def named_lines(records: Sequence[Record], field: str) -> dict[tuple[str, str], Line]:
    """The points of every line in ascending contexts, by what its rows are of and by their layout.

    What they are of is said as far as it differs: the device, the dispatcher, shape and dtype.
    """
    many = {name: len({one[name] for one in records}) > 1 for name in ("device", "shape", "dtype", "layout")}
    runtimes = grouped((one["device"], one["runtime"]) for one in records)
    modeled = any(one["measure"] == MODELED for one in records)
    found: list[tuple[tuple[str, str], tuple[int, float]]] = []
    for one in records:
        said = [one["device"].split(" (")[0] + " on the CPU" * (one["device_kind"] == "cpu")] * many["device"]
        if len({*runtimes[one["device"]]}) > 1 or one["measure"] == MODELED:
            said.append(one["runtime"])
        elif modeled:
            said.append("measured")
        said += [one[name] for name in ("shape", "dtype") if many[name]]
        layout = layout_name(one["layout"]) if many["layout"] else ""
        found.append(((", ".join(said), layout), (one["context"], one[field])))
    return {name: sorted(points) for name, points in grouped(found).items()}


def layout_name(layout: str) -> str:
    """ "auto" to "split rule", "1" to "one split"."""
    if layout.startswith("size:"):
        return f"splits of {layout.removeprefix('size:')} keys"
    return {"auto": "split rule", "1": "one split", MISSING: ""}.get(layout, f"{layout} splits")


def _paler(color: str) -> str:
    channels = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(x + (255 - x) * PALER):02x}" for x in channels)


def _name_lines(axes: Axes, drawn: Sequence[tuple[str, tuple[int, float], str]]) -> None:
    """A name to the right of the end of every line, moved up or down as far as it would cover another."""
    scale = 72 / axes.figure.dpi
    ends = [(axes.transData.transform(point)[1] * scale, name, point, color) for name, point, color in drawn]
    below = float("-inf")
    for at, name, point, color in sorted(ends):
        half = POINTS * (name.count("\n") + 1) / 2
        middle = max(at, below + half)
        below = middle + half
        offset = (9, middle - at)
        axes.annotate(
            name, point, offset, textcoords="offset points", va="center", fontsize=9.5, color=color, parse_math=False
        )


def _set_scales(axes: Axes, contexts: Sequence[int], steps: bool, linear: bool) -> None:
    """Scales, a tick per context on a log scale, labels at 1, 2 and 5 of every decade, and the grid."""
    if not steps:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda x, _: keys_label(round(x)))
        axes.tick_params(axis="x", rotation=45 if len(contexts) > 10 else 0)
    if linear:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(lambda y, _: "")
    axes.yaxis.set_major_formatter(lambda y, _: figure(y))
    axes.set_xlabel(f"context in keys{'' if steps else ' (log scale)' if linear else ' (log scales)'}", color=GRAY)
    axes.tick_params(colors=GRAY, labelsize=10, length=0, which="both")
    axes.grid(True, which="major", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRAY)


def keys_label(keys: int) -> str:
    """1024 to "1k", 1000 to "1,000"."""
    return f"{keys // 1024}k" if keys and keys % 1024 == 0 else f"{keys:,}"
