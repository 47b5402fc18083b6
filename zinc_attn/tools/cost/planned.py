"""A call as the planner cuts it: which workgroups of pass 1 each submission has on a card, and how many leaves each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...canonical.constants import KEYS_PER_NODE
from ...kernels.records import Records
from ...kernels.tuning import SCRATCH_BYTES, LayoutFacts
from ...planning.arithmetic import Arithmetic
from ...planning.call import RowSlice, Submission, SubmissionPlanner, cut_call
from ...planning.inputs import CallOptions, DeviceFacts, Request
from ...planning.items import item_keys
from ...planning.layouts import split_rule_layouts
from ...planning.splits import SplitPlan
from ...shapes import AttnShape
from .cards import Card
from .matrix import RDNA4_UNITS, MatrixGroup
from .pass1 import Workgroup
from .predict import Dispatch

GRID: Final = 65535  # workgroups along an axis that every device takes
PAGE: Final = 256  # keys


@dataclass(frozen=True)
class PlannedSubmission:
    """A submission with its dispatches: first the keys that rows share, if there are any, then the others."""

    shape: AttnShape
    made: Submission
    dispatches: list[Dispatch]

    @property
    def keys_read(self) -> int:
        """Keys of one KV head that all workgroups read, as ``Attention.keys_read`` counts them."""
        return item_keys(self.made.items) * self.shape.head_chunks + item_keys(self.made.shared_items)

    def of_states(self, value: Callable[[SplitPlan], float]) -> float:
        """``value`` of a plan whose rows have as many states as these have on average; 0 where pass 1 is all."""
        if self.made.key.single_pass:
            return 0.0
        mean, rows = max(2.0, float(self.made.rows["count"].mean())), len(self.made.rows)
        sizes = (int(mean) * KEYS_PER_NODE, (int(mean) + 1) * KEYS_PER_NODE)
        a, b = (value(SplitPlan.fixed(n, self.shape, split_size=KEYS_PER_NODE, q_len=rows)) for n in sizes)
        return a + mean % 1 * (b - a)


@dataclass(frozen=True)
class PlannedCall:
    """The submissions of a call on a GPU that has a card's compute units. cut: the query rows of each."""

    card: Card
    dtype: str
    planner: SubmissionPlanner
    cut: list[tuple[RowSlice, ...]]

    @classmethod
    def of(
        cls,
        shape: AttnShape,
        card: Card,
        dtype: str,
        requests: Sequence[Request],
        cascade: bool | None = None,
        arithmetic: Arithmetic = "canonical",
    ) -> PlannedCall:
        """The call of ``requests`` by the split rule; cascade and arithmetic as ``Attention`` takes them."""
        units = card.compute_units
        facts = DeviceFacts(shape, "discrete", units, (GRID,) * 3, SCRATCH_BYTES, PAGE, False, RDNA4_UNITS)
        layouts = split_rule_layouts(shape, dtype, LayoutFacts(units))
        return cls(card, dtype, *cut_call(requests, CallOptions(layouts, None, cascade, 0, arithmetic), facts))

    def submission(self, at: int) -> PlannedSubmission:
        """Submission number ``at``."""
        shape, made = self.planner.facts.shape, self.planner.plan(self.cut[at], ())
        if key := made.key.matrix:
            group = MatrixGroup.of(self.card, shape, key, sum(one.end - one.begin for one in self.cut[at]))
            sizes = _leaves(made.items) * (shape.kv_heads * key.blocks(shape.group))
            return PlannedSubmission(shape, made, [Dispatch(group, sizes)])
        found = []
        if len(made.shared_items):
            vectors = shape.group * made.key.shared_rows
            together = Workgroup(self.card, shape, vectors, made.key.shared_build, self.dtype)
            found.append(Dispatch(together, _leaves(made.shared_items) * shape.kv_heads))
        if len(made.items):
            alone = Workgroup(self.card, shape, shape.heads_per_workgroup, made.key.build, self.dtype)
            found.append(Dispatch(alone, _leaves(made.items) * (shape.kv_heads * shape.head_chunks)))
        return PlannedSubmission(shape, made, found)


def _leaves(items: Records) -> list[int]:
    found: list[int] = (items["leaf_end"] - items["leaf_begin"]).tolist()
    return found
