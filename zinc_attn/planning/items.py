"""Work records of pass 1 and pass 2 for query rows over a layout of leaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.records import ITEM, NEVER, ROW, Records
from .splits import SplitPlan

Indices = NDArray[np.int64]
Visible = tuple[Indices, Indices]  # (first, limit), each (rows,): row i sees keys [first[i], limit[i])


class Mask(NamedTuple):
    """words: (q_len, n) float32 bits, what is added to each row's scores of n keys, -inf for keys that it does not see;
    begin: position of the first of these keys."""

    words: NDArray[np.uint32]
    begin: int


def item_records(
    visible: Visible,
    ranges: Indices,
    leaves_per_state: int,
    *,
    keep_empty: bool = False,
    shared: Indices | None = None,
) -> Records:
    """ITEM records of query rows over a plan's leaf ranges (splits, 2); rows count from 0, no page table is set.

    Rows of the same range are neighbors, so that a GPU's caches hold the keys for all of them.

    A range of which the row sees no leaf gives no item; with ``keep_empty`` a row that sees no key still has its first
    range, whose state is the empty one. shared: (rows,) leaves at the front that other items attend for the row.
    """
    firsts, limits = visible
    last = -(-limits // KEYS_PER_LEAF)
    from_leaf = firsts // KEYS_PER_LEAF if shared is None else np.maximum(firsts // KEYS_PER_LEAF, shared)
    if keep_empty:
        last = np.maximum(last, 1)
    mine = (ranges[None, :, 0] < last[:, None]) & (ranges[None, :, 1] > from_leaf[:, None])
    split, row = np.nonzero((mine & (ranges[:, 0] < ranges[:, 1])[None]).T)
    items = np.zeros(len(row), ITEM)
    items["row"], items["rows"] = row, 1
    items["limit"], items["first"] = limits[row], firsts[row]
    items["leaf_begin"] = np.maximum(ranges[split, 0], from_leaf[row])
    items["leaf_end"] = np.minimum(ranges[split, 1], last[row])
    items["leaves_per_state"], items["upload_begin"] = leaves_per_state, NEVER
    return items


def row_records(visible: Visible, plan: SplitPlan) -> Records:
    """ROW records of query rows whose states lie one behind the other, ``plan.states`` for each row."""
    firsts, limits = visible
    rows = np.zeros(len(limits), ROW)
    unit = firsts // plan.unit_keys
    rows["state"] = np.arange(len(limits)) * plan.states + unit - plan.first_unit
    rows["count"] = np.maximum(-(-limits // plan.unit_keys) - unit, 0)
    rows["unit"], rows["leaves_per_state"] = unit, plan.leaves_per_state
    return rows
