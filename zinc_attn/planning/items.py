"""Work records of pass 1 and pass 2 for query rows over a layout of leaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.records import ITEM, ROW, Records
from .splits import SplitPlan

Indices = NDArray[np.int64]
Visible = tuple[Indices, Indices]  # (first, limit), each (rows,): row i sees keys [first[i], limit[i])


class Mask(NamedTuple):
    """words: (q_len, n) float32 bits, what is added to each row's scores of n keys, -inf for keys that it does not see;
    begin: position of the first of these keys; largest: magnitude that is added."""

    words: NDArray[np.uint32]
    begin: int
    largest: float = 0.0


def item_records(
    visible: Visible,
    ranges: Indices,
    leaves_per_state: int,
    *,
    keep_empty: bool = False,
    shared: Indices | None = None,
    rows_each: int = 1,
) -> Records:
    """ITEM records of query rows over a plan's leaf ranges (splits, 2); rows count from 0, no page table is set.

    Rows of the same range are neighbors, so that a GPU's caches hold the keys for all of them. With ``rows_each`` up to
    as many neighboring rows go into an item, whose keys [first, limit) move by 0 or by 1 from row to row; they share no
    leaves in other items.

    A range of which the row sees no leaf gives no item; with ``keep_empty`` a row that sees no key still has its first
    range, whose state is the empty one. shared: (rows,) leaves at the front that other items attend for the row.
    """
    firsts, limits = visible
    bounds, steps = _even_blocks(firsts, limits, rows_each)
    begin, end = bounds[:-1], bounds[1:] - 1  # first and last rows of the items
    last = -(-limits[end] // KEYS_PER_LEAF)
    from_leaf = firsts[begin] // KEYS_PER_LEAF
    if shared is not None:
        from_leaf = np.maximum(from_leaf, shared)
    if keep_empty:
        last = np.maximum(last, 1)
    mine = (ranges[None, :, 0] < last[:, None]) & (ranges[None, :, 1] > from_leaf[:, None])
    split, block = np.nonzero((mine & (ranges[:, 0] < ranges[:, 1])[None]).T)
    items = np.zeros(len(block), ITEM)
    items["row"], items["rows"], items["row_step"] = begin[block], (end - begin + 1)[block], steps[block]
    items["limit"], items["first"] = limits[end][block], firsts[end][block]
    items["leaf_begin"] = np.maximum(ranges[split, 0], from_leaf[block])
    items["leaf_end"] = np.minimum(ranges[split, 1], last[block])
    items["leaves_per_state"] = leaves_per_state
    return items


def _even_blocks(firsts: Indices, limits: Indices, rows_each: int) -> tuple[Indices, Indices]:
    """Where blocks of rows begin, and the end; and by how much each block's first and limit grow from row to row.

    They may be negative as a kernel counts them back from the block's last row: both are 0 here then.
    """
    bounds, steps, at, rows = [0], list[int](), 0, len(limits)
    if rows_each == 1:
        return np.arange(rows + 1), np.zeros(rows, np.int64)
    while at < rows:
        count, step = min(rows_each, rows - at), 0
        while count > 1:
            before = np.arange(count - 1, -1, -1)
            first, limit, last = firsts[at : at + count], limits[at : at + count], at + count - 1
            step = int(limits[last] > limits[last - 1])
            if np.array_equal(np.maximum(firsts[last] - step * before, 0), first) and np.array_equal(
                np.maximum(limits[last] - step * before, 0), limit
            ):
                break
            count //= 2
        at += count
        bounds.append(at)
        steps.append(step if count > 1 else 0)
    return np.array(bounds), np.array(steps, np.int64)


def row_records(visible: Visible, plan: SplitPlan) -> Records:
    """ROW records of query rows whose states lie one behind the other, ``plan.states`` for each row."""
    firsts, limits = visible
    rows = np.zeros(len(limits), ROW)
    unit = firsts // plan.unit_keys
    rows["state"] = np.arange(len(limits)) * plan.states + unit - plan.first_unit
    rows["count"] = np.maximum(-(-limits // plan.unit_keys) - unit, 0)
    rows["unit"], rows["leaves_per_state"] = unit, plan.leaves_per_state
    return rows


def item_keys(items: Records) -> int:
    """Keys, of one KV head, that the workgroups of ITEM records read."""
    first, limit = items["first"].astype(np.int64), items["limit"].astype(np.int64)
    begin, end = items["leaf_begin"].astype(np.int64), items["leaf_end"].astype(np.int64)
    keys = np.minimum(limit, end * KEYS_PER_LEAF) - np.maximum(first, begin * KEYS_PER_LEAF)
    return int(keys[end > begin].sum())
