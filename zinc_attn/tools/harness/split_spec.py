"""How a user names a split layout, and the plan that the name gives for any context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...checks import parse_digits, shown
from ...errors import ArgumentError
from ...planning.layouts import SplitLayouts, fixed_layouts, split_rule_layouts
from ...planning.splits import SplitPlan, plan_splits
from ...shapes import AttnShape

VARIED_LAYOUTS: Final = "1,2,8,64,auto,size:256,size:2048"  # that check compares by default


@dataclass(frozen=True)
class SplitSpec:
    """A layout for any context: the planner's rule ("auto"), a number of splits, or a split size in keys."""

    label: str
    num_splits: int | None = None
    split_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> SplitSpec:
        """Parse ``auto``, ``8`` (splits) or ``size:2048`` (keys per split)."""
        word = text.strip().lower()
        kind, _, size = word.rpartition(":")
        if word == "auto":
            return cls(word)
        number = parse_digits(size)
        if not number or kind not in ("", "size") or word.startswith(":"):
            expected = "expected auto, a number of splits (8) or size:KEYS (size:2048)"
            raise ArgumentError(f"splits: got {shown(text)}, {expected}")
        return cls(f"size:{number}", split_size=number) if kind else cls(str(number), num_splits=number)

    def plan(
        self, context: int, shape: AttnShape, compute_units: int, q_len: int = 1, window: int | None = None
    ) -> SplitPlan:
        """The plan of one sequence's rows. Only "auto" depends on the compute units."""
        if self.label == "auto":
            return plan_splits(context, shape, compute_units, q_len, window)
        sizes = {"num_splits": self.num_splits, "split_size": self.split_size}
        return SplitPlan.fixed(context, shape, q_len=q_len, window=window, **sizes)

    def layouts(self, shape: AttnShape, compute_units: int) -> SplitLayouts:
        if self.label == "auto":
            return split_rule_layouts(shape, compute_units)
        return fixed_layouts(shape, num_splits=self.num_splits, split_size=self.split_size)


def parse_split_specs(text: str) -> list[SplitSpec]:
    """Parse a list such as ``auto,1,size:2048``; a layout that is repeated counts once."""
    return list(dict.fromkeys(SplitSpec.parse(word) for word in text.split(",")))
