"""The picture of measured rows: a figure over context lengths, with a name at the end of every line.

The PNG also has its title, its notes and every line's points as JSON, in its text "Description".
"""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from ..harness.tables import MISSING, figure, grouped
from .rows import MODELED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRAY, GRID = "#1f2933", "#6b7480", "#e4e7eb"
COLORS: Final = (  # of a subject: the split rule's, and its other layouts'
    *(("#1d5b8f", "#83a5c1"), ("#b4642d", "#d6aa8c"), ("#3d7a57", "#94b6a3"), ("#77589c", "#b4a3c9")),
    *(("#8a6f1e", "#bfb083"), ("#a0476b", "#cb9aae"), ("#4b6b7f", "#9caeb9")),
)
NOTE_LETTERS: Final = 118  # of a line of the notes that fits the drawing's width
POINTS: Final = 12.5  # from one line of names to the next
Record = Mapping[str, Any]
Names = tuple[str, str]  # of a line: the subject of its rows, and their layout


def rows_png(records: Sequence[Record], title: str, notes: str, field: str) -> bytes | None:
    """A PNG of ``field`` of rows' records over their contexts; None where none has it. Needs matplotlib.

    Both axes are on a log scale, and each context has a tick; the steps of a decode are on linear ones from 0, and so
    are tokens/s of a whole step.
    """
    records = [record for record in records if record.get(field) is not None]
    if not records:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing, lines = Figure(figsize=(9, 5), dpi=140, layout="constrained"), named_lines(records, field)
    FigureCanvasAgg(drawing)  # draws into memory
    axes, steps = drawing.subplots(), records[0]["measure"] == "step"
    pairs = dict(zip(dict.fromkeys(name for name, _ in lines), cycle(COLORS)))  # by subject
    for (subject, layout), points in lines.items():
        pale = layout not in ("split rule", "")
        color = pairs[subject][pale]
        face, dashes = ("white", (0, (4, 2))) if MODELED in subject else (color, "-")
        style: dict[str, Any] = {"linestyle": dashes, "markerfacecolor": face, "zorder": 3 - pale}
        style |= {"linewidth": 1.2} if steps else {"marker": "o", "linewidth": 2.1}
        axes.plot(*zip(*points, strict=True), color=color, **style)
    _set_scales(axes, sorted({record["context"] for record in records}), steps, steps or field == "step_tokens_s")
    said = [part for line in notes.splitlines() for part in textwrap.wrap(line, NOTE_LETTERS, break_on_hyphens=False)]
    heading: dict[str, Any] = {"loc": "left", "fontsize": 14.5, "weight": "bold", "color": INK, "parse_math": False}
    axes.set_title(title, pad=10 + 13.5 * len(said), **heading)
    place: dict[str, Any] = {"transform": axes.transAxes, "color": GRAY, "linespacing": 1.35, "parse_math": False}
    axes.text(0, 1.02, "\n".join(said), fontsize=9.2, **place)
    drawing.draw_without_rendering()  # says where the lines end
    ends = [("\n".join(filter(None, name)), points[-1], pairs[name[0]][0]) for name, points in lines.items()]
    _name_lines(axes, ends)
    shown = {"title": title, "notes": notes, "lines": {" · ".join(filter(None, name)): x for name, x in lines.items()}}
    png = io.BytesIO()
    drawing.savefig(png, format="png", metadata={"Description": json.dumps(shown)})
    return png.getvalue()


def named_lines(records: Sequence[Record], field: str) -> dict[Names, list[tuple[int, float]]]:
    """The points of every line in ascending contexts: one per layout, device, dispatcher, dtype and shape.

    Its names say which of these differ, and, where a device is modeled, which others are measured.
    """
    many = {name: len({record[name] for record in records}) > 1 for name in ("device", "shape", "dtype", "layout")}
    runtimes = grouped((record["device"], record["runtime"]) for record in records)
    modeled, named = any(record["measure"] == MODELED for record in records), list[tuple[Names, tuple[int, float]]]()
    for record in records:
        said = [record["device"].split(" (")[0] + " on the CPU" * (record["device_kind"] == "cpu")] * many["device"]
        used = {*runtimes[record["device"]]}
        if len(used) > 1 or modeled:
            said.append("measured" if {record["runtime"]} == used - {MODELED} else record["runtime"])
        said += [record[name] for name in ("shape", "dtype") if many[name]]
        layout = layout_name(record["layout"]) if many["layout"] else ""
        named.append(((", ".join(said), layout), (record["context"], record[field])))
    return {name: sorted(points) for name, points in grouped(named).items()}


def layout_name(layout: str) -> str:
    """ "auto" to "split rule", "1" to "one split"."""
    if layout.startswith("size:"):
        return f"splits of {layout.removeprefix('size:')} keys"
    names = {"auto": "split rule", "1": "one split", "none": "weights alone", MISSING: ""}  # none: a model's weights
    return names.get(layout, f"{layout} splits")


def _name_lines(axes: Axes, ends: Sequence[tuple[str, tuple[int, float], str]]) -> None:
    """A name in its color to the right of the end of every line.

    It is moved up where it would cover the name below, and then all are moved down as far as the highest must be.
    """
    scale, below, placed = 72 / axes.figure.dpi, float("-inf"), []
    for height, *end in sorted((axes.transData.transform(end[1])[1] * scale, *end) for end in ends):
        half = POINTS * (end[0].count("\n") + 1) / 2
        below = max(height, below + half) + half
        placed.append((height, below, half, end))
    above = axes.bbox.y1 * scale
    for height, top, half, (name, point, color) in reversed(placed):
        highest = min(top, above)
        above, offset = highest - 2 * half, (9, highest - half - height)
        look: dict[str, Any] = {"va": "center", "fontsize": 9.5, "color": color, "parse_math": False}
        axes.annotate(name, point, offset, textcoords="offset points", **look)


def _set_scales(axes: Axes, contexts: Sequence[int], steps: bool, linear: bool) -> None:
    """Scales, ticks and grid: a tick per context on a log scale."""
    if not steps:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda x, _: keys_label(round(x)))
        axes.tick_params(axis="x", rotation=45 if len(contexts) > 10 else 0)
    if linear:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
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
