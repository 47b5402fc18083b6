"""Rows by matrix units whose workgroups attend the whole context, so that there are no partial states to merge."""

from __future__ import annotations

from typing import Final

from ..kernels.matrix import MatrixFacts, matrix_workgroup
from ..shapes import AttnShape
from .splits import SplitPlan

WORKGROUPS: Final = 4  # for every compute unit, from which they keep a device busy without splits


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
