"""Plots of the sweep and of the benchmark. Needs matplotlib (the extra ``cli``)."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from . import cost
from .bench import BenchRow
from .cost import ModelPreset
from .planner import SplitPlan, plan_splits
from .sweep import SweepRow

_AUTO, _SINGLE = "#0b5fa5", "#c2410c"
_OTHERS = ("#2f7d32", "#7b3fa0", "#8a6d00", "#00788a", "#a3195b", "#555555")


def plot_png(rows: Sequence[SweepRow], title: str) -> bytes:
    """A PNG of the timed rows (at least one): a line per layout, auto solid, a single split dashed."""
    with_weights = any(row.tokens_s_with_weights is not None for row in rows)
    figure = Figure(figsize=(9, 5.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    others = iter(_OTHERS * (1 + len(rows)))
    for layout in dict.fromkeys(row.layout for row in rows):
        points = sorted(
            (row.context, row.tokens_s_with_weights if with_weights else row.tokens_s)
            for row in rows
            if row.layout == layout and row.tokens_s is not None
        )
        if not points:
            continue
        x, y = zip(*points, strict=True)
        if layout == "auto":
            axes.plot(x, y, "o-", color=_AUTO, linewidth=2.4, markersize=6, zorder=3, label="auto (the split rule)")
        elif layout == "1":
            axes.plot(x, y, "s--", color=_SINGLE, linewidth=1.8, markersize=5, zorder=2, label="1 split (baseline)")
        else:
            label = f"{layout} splits" if layout.isdecimal() else f"splits of {layout.removeprefix('size:')} keys"
            axes.plot(x, y, ".:", color=next(others), linewidth=1.4, markersize=7, label=label)
    contexts = sorted({row.context for row in rows})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
    if len(contexts) > 10:
        axes.tick_params(axis="x", rotation=45)
    if with_weights:
        axes.set_ylim(0, 1.08 * max(row.tokens_s_with_weights or 0 for row in rows))
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_minor_label(axes.get_ylim())))
    axes.set_xlabel("context (keys, log scale)")
    unit = "tokens/s, attention and weights" if with_weights else "tokens/s, attention alone (log scale)"
    axes.set_ylabel(unit)
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.grid(True, which="minor", color="#ebebeb", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    first = rows[0]
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    axes.set_title(
        f"{first.device} · {first.driver} · {first.runtime}", fontsize=9.5, color="#444444", parse_math=False
    )
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def bench_png(rows: Sequence[BenchRow]) -> bytes:
    """A PNG of the benchmark's whole calls (at least one): KV GB/s against context, a panel per shape."""
    calls = [row for row in rows if row.measure == "call" and row.kv_gb_s]
    shapes = list(dict.fromkeys(row.shape for row in calls))
    figure = Figure(figsize=(1 + 5.5 * len(shapes), 5.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    styles = {"auto": "o-", "read": "x:", "baseline": "^-."}
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [row for row in calls if row.shape == shape]
        for runtime, layout in dict.fromkeys((row.runtime, row.layout) for row in mine):
            points = sorted((r.context, r.kv_gb_s) for r in mine if (r.runtime, r.layout) == (runtime, layout))
            label = runtime if layout == "baseline" else f"{layout}, {runtime}"
            axes.plot(*zip(*points, strict=True), styles.get(layout, "s--"), linewidth=1.6, markersize=5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({row.context for row in mine})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.4g}"))
        axes.set_title(f"{shape}, {mine[0].dtype}", fontsize=11)
        axes.set_xlabel("context (keys, log scale)")
        axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("KV GB/s of the whole call (log scale)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    device = next((row for row in calls if row.layout != "baseline"), calls[0])
    figure.suptitle(f"Decode attention: {device.device} · {device.driver}", fontsize=11, parse_math=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def plan_png(model: ModelPreset, context: int, card: cost.Card, dtype: str) -> bytes:
    """A PNG of what the model of ``cost`` says: which workgroup runs on which compute unit, and tokens/s by context.

    A bar is a workgroup of pass 1 from its begin to its end, coloured by split; bars of one compute unit share its row.
    """
    shape, layers = model.shape, model.attention_layers

    def plans(keys: int) -> dict[str, SplitPlan]:
        one = SplitPlan.fixed(keys, shape, num_splits=1)
        return {"1 split": one, "auto (the split rule)": plan_splits(keys, shape, card.compute_units, dtype)}

    figure = Figure(figsize=(14, 5.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    colours = colormaps["viridis"]
    for axes, (label, plan) in zip(panels, plans(context).items(), strict=False):
        bars = cost.timeline(plan, card, dtype)
        lanes = Counter(cu for cu, *_ in bars)
        seen: Counter[int] = Counter()
        bottoms = []
        for cu, *_ in bars:
            bottoms.append(cu + seen[cu] / lanes[cu])
            seen[cu] += 1
        axes.barh(
            bottoms,
            [end - begin for _, begin, end, _ in bars],
            height=[0.92 / lanes[cu] for cu, *_ in bars],
            left=[begin for _, begin, *_ in bars],
            color=[colours(split / max(1, plan.num_splits - 1)) for *_, split in bars],
            align="edge",
            linewidth=0,
        )
        p = cost.predict(plan, card, dtype)
        axes.set_ylim(card.compute_units, 0)
        axes.set_xlim(0, p.total_us)
        axes.set_ylabel("compute unit")
        axes.set_xlabel(f"µs ({cost.LABEL}; behind the bars: pass 2)")
        many = f"{p.workgroups:,} workgroups, {p.utilisation:.0%} of the units, {p.fraction:.1%} of peak"
        axes.set_title(f"{label}: {many}", fontsize=8.5)
    contexts = sorted({1 << i for i in range(10, 18)} | {context})
    axes = panels[2]
    for label, style in (("auto (the split rule)", "o-"), ("1 split", "s--")):
        times = [cost.predict(plans(keys)[label], card, dtype).total_us for keys in contexts]
        axes.plot(contexts, [1e6 / layers / t for t in times], style, markersize=5, label=label)
    ideal = [1e6 / layers / cost.ideal(shape, keys, card, dtype) for keys in contexts]
    axes.plot(contexts, ideal, ":", color="#555555", label="ideal: K and V at peak bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: keys_label(round(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))
    axes.set_xlabel("context (keys, log scale)")
    axes.set_ylabel(f"tokens/s, attention of {layers} layer{'s' * (layers > 1)} alone (log scale), {cost.LABEL}")
    axes.grid(True, which="major", color="#d5d5d5", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8)
    what = f"{model.name}, {shape}, {dtype}, {context:,} keys on {card.title}"
    figure.suptitle(f"{cost.LABEL}, not measured: {what}", fontsize=12, parse_math=False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def keys_label(keys: int) -> str:
    """1024 to "1k", 1000 to "1,000"."""
    return f"{keys // 1024}k" if keys and keys % 1024 == 0 else f"{keys:,}"


def _minor_label(limits: tuple[float, float]) -> Callable[[float, object], str]:
    """Labels 2 and 5 of each decade where the axis spans few decades."""
    few = limits[1] / limits[0] < 200

    def label(y: float, _: object) -> str:
        return f"{y:,.4g}" if few and f"{y:e}"[0] in "25" else ""

    return label
