"""The picture of a plan on a card, by the cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..planning.splits import SplitPlan, plan_splits
from . import cost
from .cost.pass1 import Workgroup
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


def placed_workgroups(plan: SplitPlan, card: cost.Card, dtype: str) -> NDArray[np.int64]:
    """(workgroups, 3): compute unit, split and leaves of each workgroup of pass 1, dealt in turn. A workgroup that lies
    on several compute units is there once for each of them."""
    sizes = [(split, b - a) for split, (a, b) in enumerate(plan.leaf_ranges()) if b > a]
    groups = np.tile(np.array(sizes).reshape(-1, 2), (plan.shape.kv_heads * plan.shape.head_chunks * plan.q_len, 1))
    found = np.repeat(groups, Workgroup.of(plan, card, dtype).units, axis=0)
    return np.column_stack([np.arange(len(found)) % card.compute_units, found])


def _draw_workgroups(axes: Axes, label: str, plan: SplitPlan, card: cost.Card, dtype: str) -> None:
    """A bar per workgroup of pass 1, as long as it has leaves, colored by split; those of a compute unit share its
    row."""
    from matplotlib import colormaps

    units, splits, leaves = placed_workgroups(plan, card, dtype).T
    p, heights = cost.predict(plan, card, dtype), 1 / np.bincount(units)[units]
    axes.barh(
        units + np.arange(len(units)) // card.compute_units * heights,
        leaves * (p.pass1_us / leaves.max(initial=1)),
        height=0.92 * heights,
        color=colormaps["viridis"](splits / max(1, plan.num_splits - 1)),
        align="edge",
        linewidth=0,
    )
    axes.set_ylim(card.compute_units, 0)
    axes.set_xlim(0, p.total_us)
    axes.set_ylabel("compute unit")
    axes.set_xlabel(f"µs ({cost.LABEL}; behind the bars: pass 2)")
    many = f"{p.workgroups:,} workgroups, {p.utilization:.0%} of the units, {p.fraction:.1%} of peak"
    axes.set_title(f"{label}: {many}", fontsize=8.5)
