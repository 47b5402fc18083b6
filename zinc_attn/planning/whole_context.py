"""Rows by matrix units whose workgroups attend the whole context, which leaves no partial states to merge."""

from .arithmetic import Arithmetic
from .inputs import CallFacts
from .splits import SplitPlan


def whole_context_pays(plan: SplitPlan, rows: int, facts: CallFacts, arithmetic: Arithmetic) -> bool:
    """Whether ``rows`` rows of a sequence make enough workgroups that each attends all nodes; no bit depends on it.

    plan: the split rule's. A single row never does, since a decode step needs many splits.
    """
    if rows < 2 or plan.states < 2:
        return False
    shape = facts.shape
    workgroup = facts.matrix_workgroup(arithmetic, rows * shape.group)
    if workgroup is None:
        return False
    workgroups = -(-rows // workgroup.rows(shape.group)) * shape.kv_heads * workgroup.blocks(shape.group)
    return workgroups >= workgroup.walks * facts.device.compute_units
