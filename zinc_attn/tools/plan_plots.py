"""The picture of a plan on a card, by the cost model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..planning.splits import SplitPlan, plan_splits
from . import cost
from .harness.plots import finish_axes, new_figure, set_title, to_png
from .models import ModelPreset

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULE, SINGLE = "auto (the split rule)", "1 split"


def plan_png(model: ModelPreset, context: int, card: cost.Card, dtype: str) -> bytes:
    """A PNG of what the model of ``cost`` says: which workgroup runs on which compute unit, and tokens/s by context."""

    def plans(keys: int) -> dict[str, SplitPlan]:
        one = SplitPlan.fixed(keys, model.shape, num_splits=1)
        return {SINGLE: one, RULE: plan_splits(keys, model.shape, card.compute_units, dtype)}

    figure, layers = new_figure(14, 5.6), model.attention_layers
    *panels, axes = figure.subplots(1, 3)
    for panel, (label, plan) in zip(panels, plans(context).items(), strict=True):
        _draw_workgroups(panel, label, plan, card, dtype)
    contexts = sorted({1 << i for i in range(10, 18)} | {context})
    for label, style in ((RULE, "o-"), (SINGLE, "s--")):
        times = [cost.predict(plans(keys)[label], card, dtype).total_us for keys in contexts]
        axes.plot(contexts, [1e6 / layers / t for t in times], style, markersize=5, label=label)
    ideal = [1e6 / layers / cost.ideal(model.shape, keys, card, dtype) for keys in contexts]
    axes.plot(contexts, ideal, ":", color="#555555", label="ideal: K and V at peak bandwidth")
    finish_axes(axes, contexts, 6)
    axes.set_ylabel(f"tokens/s, attention of {layers} layer{'s' * (layers > 1)} alone (log scale), {cost.LABEL}")
    axes.legend(frameon=False, fontsize=8)
    what = f"{model.name}, {model.shape}, {dtype}, {context:,} keys on {card.title}"
    set_title(figure, f"{cost.LABEL}, not measured: {what}")
    return to_png(figure)


def _draw_workgroups(axes: Axes, label: str, plan: SplitPlan, card: cost.Card, dtype: str) -> None:
    """A bar per workgroup of pass 1, from begin to end, colored by split; the bars of a compute unit share its row."""
    from matplotlib import colormaps

    colors, bars = colormaps["viridis"], cost.timeline(plan, card, dtype)
    lanes, seen = Counter(cu for cu, *_ in bars), Counter[int]()
    bottoms = []
    for cu, *_ in bars:
        bottoms.append(cu + seen[cu] / lanes[cu])
        seen[cu] += 1
    axes.barh(
        bottoms,
        [end - begin for _, begin, end, _ in bars],
        height=[0.92 / lanes[cu] for cu, *_ in bars],
        left=[begin for _, begin, *_ in bars],
        color=[colors(split / max(1, plan.num_splits - 1)) for *_, split in bars],
        align="edge",
        linewidth=0,
    )
    p = cost.predict(plan, card, dtype)
    axes.set_ylim(card.compute_units, 0)
    axes.set_xlim(0, p.total_us)
    axes.set_ylabel("compute unit")
    axes.set_xlabel(f"µs ({cost.LABEL}; behind the bars: pass 2)")
    many = f"{p.workgroups:,} workgroups, {p.utilization:.0%} of the units, {p.fraction:.1%} of peak"
    axes.set_title(f"{label}: {many}", fontsize=8.5)
