"""Rows by matrix units whose workgroups walk all keys of their rows, so that there are no partial states to merge."""

from __future__ import annotations

from typing import Final

from ..kernels.matrix import MatrixFacts, matrix_workgroup
from ..shapes import AttnShape
from .splits import SplitPlan

WALKERS: Final = 4  # workgroups for every compute unit from which they keep a device busy without splits
# A row's total takes the place of a state. As many rows go into a submission as this part of its states would hold, so
# that q and the output stay small, too.
ROOM: Final = 4


def walk_pays(plan: SplitPlan, rows: int, units: MatrixFacts, compute_units: int, kind: str) -> bool:
    """Whether ``rows`` rows of a sequence make enough workgroups that each walks all nodes; no bit depends on it.

    plan: that of the split rule. One row never walks: a decode step is for many splits.
    """
    shape: AttnShape = plan.shape
    if rows < 2 or plan.states < 2:
        return False
    found = matrix_workgroup(shape, units, kind, rows * shape.group)
    if found is None:
        return False
    workgroups = -(-rows // found.rows(shape.group)) * shape.kv_heads * found.blocks(shape.group)
    return workgroups >= WALKERS * compute_units


def walking_rows(room: int, left: int) -> int:
    """Rows of the next submission, of ``left`` that are left and ``room`` that fit: the parts of a call are even."""
    return -(-left // -(-left // room)) if room > 0 else 0
