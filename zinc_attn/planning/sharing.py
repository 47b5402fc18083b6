"""Shared prefixes: which nodes several query rows have in common, and the work items that attend them once."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_NODE
from ..kernels.records import ITEM, Records, no_records
from .items import Indices


class SharedKeys(NamedTuple):
    """Query rows [row, row + rows) of a call see all keys of nodes [begin, end), which lie in the same pages."""

    row: int
    rows: int
    begin: int
    end: int


def _common_nodes(limits: Indices, tables: list[NDArray[np.uint32]], page_size: int) -> Indices:
    """(rows - 1,): nodes that query rows i and i + 1 have in common."""
    common = np.zeros(max(len(limits) - 1, 0), np.int64)
    for i in range(len(common)):
        keys = int(min(limits[i], limits[i + 1]))
        if tables[i] is not tables[i + 1]:
            size = min(len(tables[i]), len(tables[i + 1]))
            differ = np.flatnonzero(tables[i][:size] != tables[i + 1][:size])
            keys = min(keys, (int(differ[0]) if differ.size else size) * page_size)
        common[i] = keys // KEYS_PER_NODE
    return common


def shared_nodes(limits: Indices, tables: list[NDArray[np.uint32]], page_size: int) -> tuple[list[SharedKeys], Indices]:
    """The keys that query rows share, and (rows,) the nodes at each row's front that shared items attend.

    limits: (rows,) keys that each row sees; tables: its page table. Rows that share a prefix must be neighbors, as they
    are when sorted by table. A prefix that many rows share comes before the longer prefix of fewer rows.
    """
    n = len(limits)
    common = _common_nodes(limits, tables, page_size)
    shared: list[SharedKeys] = []
    attended = np.zeros(n, np.int64)
    todo = [(0, n, 0)]
    while todo:
        begin, end, done = todo.pop()
        if end - begin < 2:
            attended[begin:end] = done
            continue
        least = int(common[begin : end - 1].min())
        if least > done:
            shared.append(SharedKeys(begin, end - begin, done, least))
        edges = [begin, *(begin + 1 + np.flatnonzero(common[begin : end - 1] == least)).tolist(), end]
        todo += [(a, b, max(least, done)) for a, b in pairwise(edges)]
    return sorted(shared), attended


def shared_items(shared: list[SharedKeys], rows_each: int) -> Records:
    """ITEM records of shared keys: one per node and up to ``rows_each`` rows; items of the same keys are neighbors."""
    parts = [no_records(ITEM)]
    for row, rows, begin, end in shared:
        grid = np.meshgrid(np.arange(begin, end), np.arange(row, row + rows, rows_each), indexing="ij")
        node, first_row = (axis.reshape(-1) for axis in grid)
        items = np.zeros(len(node), ITEM)
        items["row"], items["rows"] = first_row, np.minimum(row + rows - first_row, rows_each)
        items["node_begin"], items["node_end"], items["limit"] = node, node + 1, end * KEYS_PER_NODE
        parts.append(items)
    return np.concatenate(parts)
