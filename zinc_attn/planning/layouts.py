"""A cache of split layouts: a decode step has the layout of the step before until its context fills a leaf."""

from collections.abc import Callable
from typing import Final

from ..canonical.constants import KEYS_PER_LEAF
from ..shapes import AttnShape
from .inputs import SplitLayout
from .splits import SplitPlan, first_seen, plan_splits

PlanFunction = Callable[[int, int, int | None], SplitPlan]  # (tokens, q_len, window) to a plan
_KEPT: Final = 256


class SplitLayouts:
    """Layouts by (tokens, q_len, window), made by ``plan``.

    by_rule: whether ``plan`` is the split rule, by whose whole nodes contexts that end in the same leaf share a layout.
    """

    def __init__(self, plan: PlanFunction, *, by_rule: bool = False) -> None:
        self._plan, self.by_rule = plan, by_rule
        self._layouts: dict[tuple[int, int, int], SplitLayout] = {}

    def __call__(self, tokens: int, q_len: int, window: int | None) -> SplitLayout:
        """The layout of ``q_len`` query rows at the end of ``tokens`` keys."""
        begin = first_seen(tokens, q_len, window)
        if self.by_rule:
            tokens, begin = -(-tokens // KEYS_PER_LEAF) * KEYS_PER_LEAF, begin // KEYS_PER_LEAF * KEYS_PER_LEAF
        key = tokens, q_len, begin
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            plan = self._plan(tokens, q_len, tokens - q_len + 1 - begin if begin else None)
            layout = self._layouts[key] = SplitLayout.of(plan, by_rule=self.by_rule)
        return layout

    def clear(self) -> None:
        """Forget all layouts, where ``plan`` gives others now."""
        self._layouts.clear()


def split_rule_layouts(shape: AttnShape, compute_units: int) -> SplitLayouts:
    """The layouts of the split rule on a device."""

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return plan_splits(tokens, shape, compute_units, q_len, window)

    return SplitLayouts(plan, by_rule=True)


def fixed_layouts(shape: AttnShape, *, num_splits: int | None, split_size: int | None) -> SplitLayouts:
    """Layouts of a fixed number of splits, or of splits of a fixed size. ArgumentError for what is no layout."""

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return SplitPlan.fixed(tokens, shape, num_splits=num_splits, split_size=split_size, q_len=q_len, window=window)

    plan(0, 1, None)
    return SplitLayouts(plan)
