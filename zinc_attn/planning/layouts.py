"""Split layouts of calls, kept: a decode step has the layout of the step before until its context fills a leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.tuning import LayoutFacts
from ..shapes import AttnShape
from .inputs import SplitLayout
from .splits import SplitPlan, first_seen, leaves_per_state_on, plan_on, rows_at_once

PlanFunction = Callable[[int, int, int | None], SplitPlan]  # (tokens, q_len, window) to a plan
LeavesFunction = Callable[[int, int, int | None], int]  # (tokens, q_len, window) to the plan's ``leaves_per_state``
_KEPT: Final = 256


class SplitLayouts:
    """Layouts by (tokens, q_len, window), made by ``plan``.

    device: on which they run; dtype: of K and V; leaves_per_state: of the split rule, which looks at whole leaves, so
    contexts that end in the same leaf share a layout; None for any other plan.
    """

    def __init__(
        self, plan: PlanFunction, device: LayoutFacts, dtype: str, leaves_per_state: LeavesFunction | None = None
    ) -> None:
        self._plan, self.device, self._dtype, self.leaves_per_state = plan, device, dtype, leaves_per_state
        self._layouts: dict[tuple[int, int, int], SplitLayout] = {}

    def __call__(self, tokens: int, q_len: int, window: int | None) -> SplitLayout:
        """The layout of ``q_len`` query rows at the end of ``tokens`` keys."""
        begin = first_seen(tokens, q_len, window)
        if self.leaves_per_state is not None:
            tokens, begin = -(-tokens // KEYS_PER_LEAF) * KEYS_PER_LEAF, begin // KEYS_PER_LEAF * KEYS_PER_LEAF
            q_len = rows_at_once(q_len, self.device.kind)
        key = tokens, q_len, begin
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _KEPT:
                self._layouts.clear()
            plan = self._plan(tokens, q_len, tokens - q_len + 1 - begin if begin else None)
            build = plan.build_on(self.device, self._dtype)
            found = self._layouts[key] = SplitLayout.of(plan, build, by_rule=self.leaves_per_state is not None)
        return found

    def clear(self) -> None:
        """Forget all layouts, where ``plan`` gives others now."""
        self._layouts.clear()


def split_rule_layouts(shape: AttnShape, dtype: str, device: LayoutFacts) -> SplitLayouts:
    """The layouts of the split rule on a device."""

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return plan_on(device, tokens, shape, dtype, q_len, window)

    def leaves_per_state(tokens: int, q_len: int, window: int | None) -> int:
        return leaves_per_state_on(device, tokens, shape, q_len, window)

    return SplitLayouts(plan, device, dtype, leaves_per_state)


def fixed_layouts(
    shape: AttnShape, dtype: str, device: LayoutFacts, *, num_splits: int | None, split_size: int | None
) -> SplitLayouts:
    """Layouts of a fixed number of splits, or of splits of a fixed size. ArgumentError for what is no layout."""

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return SplitPlan.fixed(tokens, shape, num_splits=num_splits, split_size=split_size, q_len=q_len, window=window)

    plan(0, 1, None)
    return SplitLayouts(plan, device, dtype)
