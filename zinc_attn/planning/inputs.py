"""The inputs of a call's plan, all of them: requests, options and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.device_info import DeviceInfo
from ..kernels.matrix import MatrixWorkgroup, matrix_workgroup
from ..kernels.tuning import SCRATCH_BYTES
from ..shapes import AttnShape
from .arithmetic import Arithmetic, on_matrices
from .items import Indices, Mask, Visible
from .splits import SplitPlan


class Request(NamedTuple):
    """The query rows of one sequence.

    q_len: query rows; tokens: keys of the sequence, the new rows included; new_rows: how many of these the call
    appends; table: the sequence's page table, the new rows' pages included; stamp: the table's
    (``Sequence.stamp``), None where the plan is for this call alone; causal: whether a row sees only the keys up to its
    own, or all keys; mask: the addends of the rows' scores, or None; visible: the keys that each
    query row sees, None where the causal rule and the window say it. Of a shard, end: the position after the last query
    row; shifts: for each node, how far its keys' positions are from their numbers in the shard.
    """

    q_len: int
    tokens: int
    new_rows: int
    table: NDArray[np.uint32]
    stamp: int | None = None
    causal: bool = True
    mask: Mask | None = None
    visible: Visible | None = None
    end: int | None = None
    shifts: Indices | None = None


class SplitLayout(NamedTuple):
    """A split plan with its node ranges (splits, 2).

    by_rule: the plan is the split rule's, so a call may go without splits. whole_context: the call has no splits: a
    workgroup with matrix units attends all keys of its rows.
    """

    plan: SplitPlan
    ranges: Indices
    by_rule: bool = False
    whole_context: bool = False

    @classmethod
    def of(cls, plan: SplitPlan, *, by_rule: bool = False) -> SplitLayout:
        return cls(plan, np.array(plan.node_ranges()), by_rule)

    def without_splits(self) -> SplitLayout:
        """The same nodes as one range."""
        return self._replace(ranges=np.array([[0, self.ranges.max()]]), whole_context=True)


@dataclass(frozen=True, eq=False)
class CallFacts:
    """The facts that a plan depends on, beside requests and options: device, shape and the cache's pages. units:
    whether int8 matrix units attend many rows of arithmetic "integer"."""

    device: DeviceInfo
    shape: AttnShape
    page_size: int
    units: bool = False

    def by_matrix(self, arithmetic: Arithmetic, q_len: int) -> bool:
        """Whether the rows of a request go to the matrix units."""
        return (arithmetic != "integer" or self.units) and on_matrices(arithmetic, q_len, self.shape)

    def matrix_workgroup(self, arithmetic: Arithmetic, vectors: int) -> MatrixWorkgroup | None:
        """``kernels.matrix.matrix_workgroup`` of the device and the shape."""
        facts, integer = self.device.matrix, arithmetic == "integer"
        return matrix_workgroup(self.shape, facts, self.device.kind, vectors, integer)

    @property
    def max_states(self) -> int:
        """Partial states, over all rows, that one submission may have; a row alone may have more."""
        return min(SCRATCH_BYTES // (4 * self.shape.q_heads * (self.shape.v_dim + 2)), self.buffer_states)

    @property
    def buffer_states(self) -> int:
        """Partial states that a buffer holds."""
        return self.device.max_buffer_bytes // (4 * self.shape.q_heads * (self.shape.v_dim + 2))


@dataclass(frozen=True, eq=False)
class CallOptions:
    """layout: the split layout of (tokens, q_len, window); window: keys that a row sees at most, or None;
    cascade: see ``Attention``; scoring: the number of the header words' scoring; arithmetic: the rows'."""

    layout: Callable[[int, int, int | None], SplitLayout]
    window: int | None = None
    cascade: bool | None = None
    scoring: int = 0
    arithmetic: Arithmetic = "canonical"
