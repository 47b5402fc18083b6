"""A call of attention as a plan: requests in, submissions out. Pure: no device, no clock, no environment.

``plan_call`` cuts the query rows of all requests into submissions that the device can hold, and ends soon enough. A
``Submission`` has the work records of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.arguments import key_ranges
from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.device_info import DeviceInfo
from ..kernels.matrix import MatrixWorkgroup
from ..kernels.records import APPEND, ITEM, Records, no_records
from ..kernels.split_rule import SHARING_RULE
from ..kernels.tuning import SHARED_VECTORS, most_heads, shared_rows
from ..limits import MAX_HEADS_PER_WORKGROUP
from .arithmetic import EXACT
from .duration import in_parts, key_work, row_cost, work_bound
from .inputs import CallFacts, CallOptions, Request, SplitLayout
from .items import Indices, Visible, item_records, row_records
from .padding import padded, power_of_two
from .sharing import shared_items, shared_nodes
from .splits import SplitPlan
from .steady import SteadyKey, pages_per_leaf, steady_key
from .submission import RecordingKey, RowSlice, Submission
from .whole_context import whole_context_pays

UPLOAD_ROWS: Final = 4096  # new rows up to which a call appends and attends in one submission
# A recording has room for these at least: a context that grows from nothing then needs few.
LEAST_ITEMS: Final = 16  # work items, and states
LEAST_PAGES: Final = 64


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The submissions of a call, in order. upload_first: the new rows are too many for one submission with the query
    rows, so they are appended beforehand, in submissions of their own. steady: of the calls that it holds for, where
    it is one submission that appends what is new; None: for no other call."""

    submissions: tuple[Submission, ...]
    upload_first: bool
    steady: SteadyKey | None = None


def plan_call(requests: Sequence[Request], options: CallOptions, facts: CallFacts) -> CallPlan:
    """The submissions of all query rows: as few as scratch memory, grid and time allow, nearly always one."""
    upload_first = sum(request.new_rows for request in requests) > UPLOAD_ROWS
    uploads = () if upload_first else tuple(i for i, request in enumerate(requests) if request.new_rows)
    planner, cut = cut_call(requests, options, facts)
    # the first submission appends the new rows of all requests; later ones find them in the cache
    whole_rows = (planner.plan(slices, () if i else uploads) for i, slices in enumerate(cut))
    made = tuple(part for one in whole_rows for part in in_parts(one, facts))
    alone = len(made) == 1 and not upload_first
    return CallPlan(made, upload_first, steady_key(requests, options, facts) if alone else None)


def cut_call(
    requests: Sequence[Request], options: CallOptions, facts: CallFacts
) -> tuple[SubmissionPlanner, list[tuple[RowSlice, ...]]]:
    """The planner of a call's submissions, and the query rows of each of them in order."""
    by_matrix = [facts.by_matrix(options.arithmetic, request.q_len) for request in requests]
    layouts = [_layout(*one, options, facts) for one in zip(requests, by_matrix, strict=True)]
    order = _sharing_order(requests, options)
    cut: list[tuple[RowSlice, ...]] = []
    for kind in ((False, False), (True, False), (True, True)):  # by matrix units, over the whole context
        mine = [i for i in order if (by_matrix[i], layouts[i].whole_context) == kind]
        cut += _cut(requests, layouts, mine, facts, kind[0])
    return SubmissionPlanner(requests, layouts, options, facts), cut


def call_works(
    plan: SplitPlan, layout: Callable[[int, int, int | None], SplitLayout], device: DeviceInfo
) -> tuple[int | None, list[int]]:
    """The bound of a submission's work, and the work at most of those of a sequence's rows; layout: of the plan."""
    facts = CallFacts(device, plan.shape, KEYS_PER_LEAF)
    request = Request(plan.q_len, plan.context_len, 0, np.zeros(0, np.uint32))
    bound, works = work_bound(facts), list[int]()
    for (one,) in cut_call([request], CallOptions(layout), facts)[1]:
        work = (one.end - one.begin) * (plan.context_len - plan.begin) * key_work(facts)
        parts = -(-work // bound) if bound and work and one.end - one.begin == 1 else 1
        works += [-(-work // parts)] * parts
    return bound, works


def _layout(request: Request, by_matrix: bool, options: CallOptions, facts: CallFacts) -> SplitLayout:
    """The layout of a request. Keys of a shard are not all that its rows see, so these rows have splits."""
    layout = options.layout(request.tokens, request.q_len, options.window)
    if not by_matrix or not layout.by_rule or request.shifts is not None:
        return layout
    pays = whole_context_pays(layout.plan, request.q_len, facts, options.arithmetic)
    whole = layout.without_splits()
    return whole if pays and row_cost(whole, facts, by_matrix) <= facts.max_states else layout


def _sharing_order(requests: Sequence[Request], options: CallOptions) -> list[int]:
    """The requests in an order in which those that share pages are neighbors."""
    order = list(range(len(requests)))
    if options.cascade is False or options.window is not None or len(requests) < 2:
        return order
    first_pages = [int(request.table[0]) for request in requests if len(request.table)]
    if len(set(first_pages)) == len(first_pages):
        return order
    tables = [request.table.astype(">u4").tobytes() for request in requests]
    return sorted(order, key=lambda i: tables[i])


def _cut(
    requests: Sequence[Request], layouts: Sequence[SplitLayout], order: list[int], facts: CallFacts, by_matrix: bool
) -> list[tuple[RowSlice, ...]]:
    """The query rows, cut where a submission's partial states, its work or its workgroups would be too many."""
    found: list[list[RowSlice]] = [[]]
    states = items = rows = 0
    for at in order:
        layout, row = layouts[at], 0
        cost = row_cost(layout, facts, by_matrix)
        width = len(layout.ranges)
        while row < requests[at].q_len:
            left = requests[at].q_len - row
            room = min(
                (facts.max_states - states) // cost,
                (facts.device.max_items - items) // width,
                facts.device.max_workgroups[2] - rows,
                left,
            )
            if (row or room < (left if layout.whole_context else 1)) and found[-1]:
                found.append([])
                states = items = rows = 0
                continue
            room = max(room, 1)
            if layout.whole_context:
                room = -(-left // -(-left // room))  # the parts of a call are even
            found[-1].append(RowSlice(at, row, row + room))
            states, items, rows = states + room * cost, items + room * width, rows + room
            row += room
    return [tuple(slices) for slices in found if slices]


class _Placement(NamedTuple):
    """Where the keys of each request lie, and where its new rows go."""

    tables: NDArray[np.uint32]
    table_at: dict[int, int]  # by request: the first word of its page table
    appends: Records


@dataclass(frozen=True, eq=False)
class SubmissionPlanner:
    """Makes the submissions of one call."""

    requests: Sequence[Request]
    layouts: Sequence[SplitLayout]
    options: CallOptions
    facts: CallFacts

    def plan(
        self, slices: tuple[RowSlice, ...], uploads: tuple[int, ...], *, partial: bool = False, two_pass: bool = False
    ) -> Submission:
        """The submission of ``slices`` that also appends the new rows of the requests ``uploads``.

        partial: pass 1 alone; two_pass: pass 2 also where every row has one state. The requests of all slices go to the
        matrix units, or none.
        """
        facts, layouts = self.facts, [self.layouts[one.request] for one in slices]
        whole = layouts[0].whole_context
        single_pass = whole or (not (partial or two_pass) and all(layout.plan.states == 1 for layout in layouts))
        matrix = self._matrix_workgroup(slices)
        shared, attended, rows_each = self._share(slices, single_pass or partial or matrix is not None)
        placement = self._placement(slices, uploads)
        items, rows, spans = self._records(slices, layouts, placement, single_pass, attended, matrix)
        masks = self._place_rows(rows, slices)
        self._place_shared(shared, slices, placement)
        counts = (1 if whole else layout.plan.states for layout in layouts)
        states = sum((one.end - one.begin) * count for one, count in zip(slices, counts, strict=True))
        key = RecordingKey(
            single_pass=single_pass,
            items=padded(len(items), facts.device.max_items, LEAST_ITEMS),
            rows=padded(len(rows), facts.device.max_workgroups[2]),
            states=padded(states, facts.max_states if len(rows) > 1 else facts.buffer_states, LEAST_ITEMS),
            appends=power_of_two(len(placement.appends)) if uploads else 0,
            tables=power_of_two(max(len(placement.tables), LEAST_PAGES)),
            scoring=self.options.scoring,
            partial=partial,
            shared=padded(len(shared), facts.device.max_items, LEAST_ITEMS) if len(shared) else 0,
            shared_rows=rows_each,
            walks=bool(np.any(items["node_end"] - items["node_begin"] > 1)),
            masks=power_of_two(len(masks)) if len(masks) else 0,
            most_heads=most_heads(
                facts.shape,
                len(items),
                facts.device.compute_units,
                facts.device.shared_memory_bytes,
                facts.device.layout,
            ),
            matrix=matrix,
            arithmetic=self.options.arithmetic if self.options.arithmetic in EXACT else "canonical",
            whole_context=whole,
        )
        at = tuple(placement.table_at[one.request] for one in slices)
        return Submission(
            key, slices, items, rows, placement.tables, spans, at, uploads, placement.appends, shared, masks
        )

    def _matrix_workgroup(self, slices: tuple[RowSlice, ...]) -> MatrixWorkgroup | None:
        """The matrix workgroup that suits the longest of the slices; None where their arithmetic is the canonical."""
        facts, arithmetic = self.facts, self.options.arithmetic
        if not facts.by_matrix(arithmetic, self.requests[slices[0].request].q_len):
            return None
        rows = max(one.end - one.begin for one in slices)
        found = facts.matrix_workgroup(arithmetic, rows * facts.shape.group)
        assert found is not None, "checked when the arithmetic was chosen"
        return found

    def _visible(self, one: RowSlice) -> Visible:
        request = self.requests[one.request]
        first, limit = request.visible or key_ranges(request.tokens, request.q_len, request.causal, self.options.window)
        return first[one.begin : one.end], limit[one.begin : one.end]

    def _placement(self, slices: tuple[RowSlice, ...], uploads: tuple[int, ...]) -> _Placement:
        tables, table_at, offset = [np.zeros(0, np.uint32)], dict[int, int](), 0
        for at in dict.fromkeys((*uploads, *(one.request for one in slices))):
            table_at[at] = offset
            table, leaf = self.requests[at].table, pages_per_leaf(self.facts.page_size)
            tables += [table, np.zeros(-len(table) % leaf, np.uint32)]
            offset += -(-len(table) // leaf) * leaf
        appends = [no_records(APPEND)]
        for at in uploads:
            request = self.requests[at]
            mine = np.zeros(request.new_rows, APPEND)
            mine["position"] = np.arange(request.tokens - request.new_rows, request.tokens)
            mine["page_table"] = table_at[at]
            appends.append(mine)
        return _Placement(np.concatenate(tables), table_at, np.concatenate(appends))

    def _records(
        self,
        slices: tuple[RowSlice, ...],
        layouts: list[SplitLayout],
        placement: _Placement,
        single_pass: bool,
        attended: list[Indices] | None,
        matrix: MatrixWorkgroup | None,
    ) -> tuple[Records, Records, tuple[slice, ...]]:
        """ITEM and ROW records of the slices one behind the other, and the items of each slice."""
        items, rows, spans, item, row, state = [], [], [], 0, 0, 0
        for i, (one, layout) in enumerate(zip(slices, layouts, strict=True)):
            visible, shared = self._visible(one), None if attended is None else attended[i]
            rows_each = 1 if matrix is None else matrix.rows(self.facts.shape.group)
            mine = item_records(visible, layout.ranges, keep_empty=single_pass, shared=shared, rows_each=rows_each)
            mine["row"] += np.uint32(row)
            if layout.whole_context:
                mine = mine[::-1]  # the longest items begin first
            if (shifts := self.requests[one.request].shifts) is not None:  # no item reaches into another node
                mine["key_shift"] = shifts[mine["node_begin"]]
            mine["page_table"] = placement.table_at[one.request]
            records = row_records(visible, layout.plan)
            records["state"] += np.uint32(state)
            items.append(mine)
            rows.append(records)
            spans.append(slice(item, item + len(mine)))
            item, row, state = item + len(mine), row + len(records), state + len(records) * layout.plan.states
        return np.concatenate(items), np.concatenate(rows), tuple(spans)

    def _place_rows(self, rows: Records, slices: tuple[RowSlice, ...]) -> NDArray[np.uint32]:
        """Set the rows' positions, and where their masks lie in the words that are returned."""
        masks, row, word = [np.zeros(0, np.uint32)], 0, 0
        for one in slices:
            request, count = self.requests[one.request], one.end - one.begin
            mine, row = rows[row : row + count], row + count
            end = request.tokens if request.end is None else request.end
            positions = end - request.q_len + np.arange(one.begin, one.end)  # negative for rows before the first key
            mine["position"] = positions.astype(np.uint32)
            if request.mask is not None:
                words = request.mask.words[one.begin : one.end]
                width = words.shape[1]
                mine["mask"] = word + np.arange(count) * width
                mine["mask_begin"], mine["mask_end"] = request.mask.begin, request.mask.begin + width
                masks.append(words.reshape(-1))
                word += words.size
        return np.concatenate(masks)

    def _share(self, slices: tuple[RowSlice, ...], apart: bool) -> tuple[Records, list[Indices] | None, int]:
        """Items of keys that rows share, nodes so attended of each slice's rows, and an item's rows; none if
        ``apart``."""
        nothing = no_records(ITEM), None, 1
        facts, cascade, sizes = self.facts, self.options.cascade, [one.end - one.begin for one in slices]
        few = facts.device.kind == "cpu" and cascade is None  # a CPU's driver keeps the sums of more vectors in memory
        few = few and not facts.device.native
        most = shared_rows(
            facts.shape,
            facts.device.shared_memory_bytes,
            MAX_HEADS_PER_WORKGROUP if few else SHARED_VECTORS,
            facts.device.layout,
        )
        if apart or self.options.window is not None or cascade is False or sum(sizes) < 2 or most < 2:
            return nothing
        limits = np.concatenate([self._visible(one)[1] for one in slices])
        tables = [self.requests[one.request].table for one in slices for _ in range(one.begin, one.end)]
        shared, attended = shared_nodes(limits, tables, facts.page_size)
        if not shared:
            return nothing
        each = min(most, power_of_two(max(one.rows for one in shared)))
        saved = sum((one.rows - -(-one.rows // each)) * (one.end - one.begin) for one in shared)
        items = shared_items(shared, each)
        if cascade is None:
            owners, rows = np.repeat([one.request for one in slices], sizes), max(one.rows for one in shared)
            of_one = all(owners[one.row] == owners[one.row + one.rows - 1] for one in shared)  # requests are neighbors
            fused, units = int(self.options.arithmetic == "fused"), facts.device.compute_units
            rule = SHARING_RULE.values(rows, len(items), saved, fused, facts.shape.kv_heads, units)
            if not rule["PAYS" if of_one else "FILLS"]:
                return nothing
        if len(items) > facts.device.max_items:  # the rows alone need fewer, and fit
            return nothing
        return items, np.split(attended, np.cumsum(sizes)[:-1]), each

    def _place_shared(self, shared: Records, slices: tuple[RowSlice, ...], placement: _Placement) -> None:
        """Shared items find their keys where the first of their rows finds its own."""
        if not len(shared):
            return
        owner = np.repeat([one.request for one in slices], [one.end - one.begin for one in slices])[shared["row"]]
        for request in dict.fromkeys(one.request for one in slices):
            shared["page_table"][owner == request] = placement.table_at[request]
