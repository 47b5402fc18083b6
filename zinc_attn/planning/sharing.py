"""Shared prefixes: which leaves several query rows have in common, and the work items that attend them once."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.declarations import Build
from ..kernels.device_info import DeviceInfo
from ..kernels.records import ITEM, Records, no_records
from ..kernels.sizes import value_passes
from ..kernels.tuning import node_shared_bytes
from ..shapes import AttnShape
from .items import Indices

SEQUENCE_ROWS: Final = 8  # query rows of a sequence from which conversions of K and V are worth a dispatch
SEQUENCE_PER_UNIT: Final = 8  # workgroups that a compute unit then needs for the keys that they share ...
FUSED_PER_UNIT: Final = 3  # ... and of eight waves with arithmetic "fused", of which conversions are a larger part


class SharedKeys(NamedTuple):
    """Query rows [row, row + rows) of a call see all keys of leaves [begin, end), which lie in the same pages."""

    row: int
    rows: int
    begin: int
    end: int


def _common_leaves(
    limits: Indices, leaves_per_state: Indices, tables: list[NDArray[np.uint32]], page_size: int
) -> Indices:
    """(rows - 1,): leaves, in whole states, that query rows i and i + 1 have in common."""
    common = np.zeros(max(len(limits) - 1, 0), np.int64)
    for i in range(len(common)):
        keys = int(min(limits[i], limits[i + 1])) if leaves_per_state[i] == leaves_per_state[i + 1] else 0
        if tables[i] is not tables[i + 1]:
            size = min(len(tables[i]), len(tables[i + 1]))
            differ = np.flatnonzero(tables[i][:size] != tables[i + 1][:size])
            keys = min(keys, (int(differ[0]) if differ.size else size) * page_size)
        common[i] = keys // (KEYS_PER_LEAF * leaves_per_state[i]) * leaves_per_state[i]
    return common


def shared_leaves(
    limits: Indices, leaves_per_state: Indices, tables: list[NDArray[np.uint32]], page_size: int
) -> tuple[list[SharedKeys], Indices]:
    """What query rows have in common, and (rows,) the leaves at the front of each that are thereby attended.

    limits: (rows,) keys that each row sees; leaves_per_state: of each row; tables: its page table. Rows that
    share a prefix must be neighbors, as they are when sorted by these and table; rows of different ones share nothing.
    A prefix of some rows is followed by a longer one of fewer.
    """
    n = len(limits)
    common = _common_leaves(limits, leaves_per_state, tables, page_size)
    found: list[SharedKeys] = []
    attended = np.zeros(n, np.int64)
    todo = [(0, n, 0)]
    while todo:
        begin, end, done = todo.pop()
        if end - begin < 2:
            attended[begin:end] = done
            continue
        least = int(common[begin : end - 1].min())
        if least > done:
            found.append(SharedKeys(begin, end - begin, done, least))
        edges = [begin, *(begin + 1 + np.flatnonzero(common[begin : end - 1] == least)).tolist(), end]
        todo += [(a, b, max(least, done)) for a, b in pairwise(edges)]
    return sorted(found), attended


def rows_pay(rows: int, workgroups: int, build: Build, compute_units: int, fused: bool) -> bool:
    """Whether rows of one sequence on a GPU share keys where the caller leaves it open.

    Side by side in the grid they find the keys in its caches anyway, so sharing saves conversions alone, at the price
    of fewer and longer ``workgroups``, in ``build``. (docs/cost-model.md)
    """
    needed = FUSED_PER_UNIT if fused and build == "node" else SEQUENCE_PER_UNIT
    return rows >= SEQUENCE_ROWS and workgroups >= needed * compute_units


def shared_items(shared: list[SharedKeys], leaves_per_state: Indices, rows_each: int) -> Records:
    """ITEM records of shared keys: one per state and up to ``rows_each`` rows; items of the same keys are neighbors.

    leaves_per_state: (rows,) of each row.
    """
    parts = [no_records(ITEM)]
    for row, rows, begin, end in shared:
        leaves = int(leaves_per_state[row])
        grid = np.meshgrid(np.arange(begin, end, leaves), np.arange(row, row + rows, rows_each), indexing="ij")
        leaf, first_row = (axis.reshape(-1) for axis in grid)
        items = np.zeros(len(leaf), ITEM)
        items["row"], items["rows"] = first_row, np.minimum(row + rows - first_row, rows_each)
        items["leaf_begin"], items["leaf_end"], items["limit"] = leaf, leaf + leaves, end * KEYS_PER_LEAF
        items["leaves_per_state"] = leaves
        parts.append(items)
    return np.concatenate(parts)


def shared_build(items: Records, rows_each: int, device: DeviceInfo, shape: AttnShape) -> Build:
    """The build of pass 1 for shared keys, of which no item reaches beyond a node: "node" where its workgroups fit."""
    vectors = rows_each * shape.group
    if not np.any(items["leaf_end"] - items["leaf_begin"] > 1):
        return "single"
    needed = node_shared_bytes(vectors, value_passes(shape, vectors))
    return "node" if device.node_workgroups and needed <= device.shared_memory_bytes else "loop"
