"""Rows by matrix units whose workgroups attend the whole context, so that there are no partial states to merge."""

from __future__ import annotations

from typing import Final

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.matrix import MatrixFacts, matrix_workgroup
from ..shapes import AttnShape
from .splits import SplitPlan

WORKGROUPS: Final = 4  # for every compute unit, from which they keep a device busy without splits
ROOM: Final = 4  # states as which a row's total counts at least, so that q and the output stay small, too
# Query vectors times leaves of a submission at most: a fraction of a second on a card, which drivers allow.
WORK: Final = 1 << 28


def whole_context_pays(plan: SplitPlan, rows: int, facts: MatrixFacts, compute_units: int, kind: str) -> bool:
    """Whether ``rows`` rows of a sequence make enough workgroups that each attends all nodes; no bit depends on it.

    plan: that of the split rule. One row never does: a decode step is for many splits.
    """
    shape: AttnShape = plan.shape
    if rows < 2 or plan.states < 2:
        return False
    found = matrix_workgroup(shape, facts, kind, rows * shape.group)
    if found is None:
        return False
    workgroups = -(-rows // found.rows(shape.group)) * shape.kv_heads * found.blocks(shape.group)
    return workgroups >= WORKGROUPS * compute_units


def row_cost(plan: SplitPlan, max_states: int) -> int:
    """States as which a whole-context row counts, of the ``max_states`` of a submission.

    q takes its place beside the total, whose size may be smaller, and a submission has at most ``WORK``.
    """
    shape, leaves = plan.shape, -(-plan.context_len // KEYS_PER_LEAF)
    sizes = ROOM * -(-shape.k_dim // (shape.v_dim + 2))
    return max(sizes, -(-max_states * shape.q_heads * leaves // WORK))
