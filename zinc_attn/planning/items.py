"""Work records of pass 1 and pass 2 for query rows over a layout of leaves."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_NODE
from ..kernels.records import ITEM, ROW, Records
from .splits import SplitPlan

Indices = NDArray[np.int64]
Visible = tuple[Indices, Indices]  # (first, limit), each (rows,): row i sees keys [first[i], limit[i])


class Mask(NamedTuple):
    """words: (q_len, n) float32 bits, the addends of each row's scores of n keys, -inf for keys that it does not see;
    begin: position of the first of these keys; largest: magnitude that is added."""

    words: NDArray[np.uint32]
    begin: int
    largest: float = 0.0


def item_records(
    visible: Visible, ranges: Indices, *, keep_empty: bool = False, shared: Indices | None = None, rows_each: int = 1
) -> Records:
    """ITEM records of query rows over a plan's node ranges (splits, 2); rows count from 0, no page table is set.

    Rows of the same range are neighbors, so that a GPU's caches hold the keys for all of them. rows_each: an item has
    up to so many neighboring rows, whose keys [first, limit) move by 0 or by 1 from row to row.

    A range of which the row sees no node gives no item; with ``keep_empty`` a row that sees no key still has its first
    range, whose state is the empty one. shared: (rows,) nodes at the front that other items attend for the row.
    """
    firsts, limits = visible
    bounds, steps = _even_blocks(firsts, limits, rows_each)
    begin, end = bounds[:-1], bounds[1:] - 1  # first and last rows of the items
    last = -(-limits[end] // KEYS_PER_NODE)
    first = firsts[begin] // KEYS_PER_NODE
    if shared is not None:
        first = np.maximum(first, shared)
    if keep_empty:
        last = np.maximum(last, 1)
    meets = (ranges[None, :, 0] < last[:, None]) & (ranges[None, :, 1] > first[:, None])
    split, block = np.nonzero((meets & (ranges[:, 0] < ranges[:, 1])[None]).T)
    items = np.zeros(len(block), ITEM)
    items["row"], items["rows"], items["row_step"] = begin[block], (end - begin + 1)[block], steps[block]
    items["limit"], items["first"] = limits[end][block], firsts[end][block]
    items["node_begin"] = np.maximum(ranges[split, 0], first[block])
    items["node_end"] = np.minimum(ranges[split, 1], last[block])
    return items


def _even_blocks(firsts: Indices, limits: Indices, rows_each: int) -> tuple[Indices, Indices]:
    """(where blocks of rows begin and end, how much each block's first and limit grow from row to row).

    A kernel counts back from the block's last row, so its first and limit may be negative where both are 0 here.
    """
    bounds, steps, row, rows = [0], list[int](), 0, len(limits)
    if rows_each == 1:
        return np.arange(rows + 1), np.zeros(rows, np.int64)
    while row < rows:
        count, step = min(rows_each, rows - row), 0
        while count > 1:
            before = np.arange(count - 1, -1, -1)
            first, limit, last = firsts[row : row + count], limits[row : row + count], row + count - 1
            step = int(limits[last] > limits[last - 1])
            if np.array_equal(np.maximum(firsts[last] - step * before, 0), first) and np.array_equal(
                np.maximum(limits[last] - step * before, 0), limit
            ):
                break
            count //= 2
        row += count
        bounds.append(row)
        steps.append(step if count > 1 else 0)
    return np.array(bounds), np.array(steps, np.int64)


def row_records(visible: Visible, plan: SplitPlan) -> Records:
    """ROW records of query rows, whose states follow each other: ``plan.states`` for each row."""
    firsts, limits = visible
    rows = np.zeros(len(limits), ROW)
    node = firsts // KEYS_PER_NODE
    rows["state"] = np.arange(len(limits)) * plan.states + node - plan.first_node
    rows["count"] = np.maximum(-(-limits // KEYS_PER_NODE) - node, 0)
    rows["node"] = node
    return rows


def item_keys(items: Records) -> int:
    """Keys, of one KV head, that the workgroups of ITEM records read."""
    first, limit = items["first"].astype(np.int64), items["limit"].astype(np.int64)
    begin, end = items["node_begin"].astype(np.int64), items["node_end"].astype(np.int64)
    keys = np.minimum(limit, end * KEYS_PER_NODE) - np.maximum(first, begin * KEYS_PER_NODE)
    return int(keys[end > begin].sum())
