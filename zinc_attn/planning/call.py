"""A call of attention as a plan: requests in, submissions out. Pure: no device, no clock, no environment.

``plan_call`` cuts the query rows of all requests into submissions that the device can hold, and ends soon enough.
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
from .arithmetic import EXACT, Arithmetic
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
LEAST_ITEMS: Final = 16  # work items and states, each
LEAST_PAGES: Final = 64


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The submissions of a call, in order. upload_first: the new rows are too many for one submission with the query
    rows, so they are appended beforehand, in submissions of their own. steady: the key of the calls that the plan
    serves if it is one submission that appends the new rows; None: it serves this call alone."""

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
    submissions = tuple(part for submission in whole_rows for part in in_parts(submission, facts))
    alone = len(submissions) == 1 and not upload_first
    return CallPlan(submissions, upload_first, steady_key(requests, options, facts) if alone else None)


def cut_call(
    requests: Sequence[Request], options: CallOptions, facts: CallFacts
) -> tuple[SubmissionPlanner, list[tuple[RowSlice, ...]]]:
    """The planner of a call's submissions, and the query rows of each of them in order."""
    by_matrix = [facts.by_matrix(options.arithmetic, request.q_len) for request in requests]
    layouts = [_layout(*pair, options, facts) for pair in zip(requests, by_matrix, strict=True)]
    order = _sharing_order(requests, options)
    cut: list[tuple[RowSlice, ...]] = []
    for kind in ((False, False), (True, False), (True, True)):  # by matrix units, over the whole context
        chosen = [i for i in order if (by_matrix[i], layouts[i].whole_context) == kind]
        cut += _cut(requests, layouts, chosen, facts, kind[0])
    return SubmissionPlanner(requests, layouts, options, facts), cut


def call_works(
    plan: SplitPlan,
    layout: Callable[[int, int, int | None], SplitLayout],
    device: DeviceInfo,
    arithmetic: Arithmetic = "canonical",
) -> tuple[int | None, list[int]]:
    """(bound of a submission's work, most work of each submission of a sequence). layout: of the plan."""
    facts = CallFacts(device, plan.shape, KEYS_PER_LEAF, units=device.matrix.int8 is not None and device.kind != "cpu")
    request = Request(plan.q_len, plan.context_len, 0, np.zeros(0, np.uint32))
    bound, works = work_bound(facts, facts.by_matrix(arithmetic, plan.q_len)), list[int]()
    for (rows,) in cut_call([request], CallOptions(layout, arithmetic=arithmetic), facts)[1]:
        work = (rows.end - rows.begin) * (plan.context_len - plan.begin) * key_work(facts)
        parts = -(-work // bound) if bound and work and rows.end - rows.begin == 1 else 1
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
    """The requests in an order that makes neighbors of requests which share pages."""
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
    cuts: list[list[RowSlice]] = [[]]
    states = items = rows = 0
    for index in order:
        layout, row = layouts[index], 0
        cost = row_cost(layout, facts, by_matrix)
        width = len(layout.ranges)
        while row < requests[index].q_len:
            left = requests[index].q_len - row
            room = min(
                (facts.max_states - states) // cost,
                (facts.device.max_items - items) // width,
                facts.device.max_workgroups[2] - rows,
                left,
            )
            if (row or room < (left if layout.whole_context else 1)) and cuts[-1]:
                cuts.append([])
                states = items = rows = 0
                continue
            room = max(room, 1)
            if layout.whole_context:
                room = -(-left // -(-left // room))  # the parts of a call are even
            cuts[-1].append(RowSlice(index, row, row + room))
            states, items, rows = states + room * cost, items + room * width, rows + room
            row += room
    return [tuple(slices) for slices in cuts if slices]


class _Placement(NamedTuple):
    """The places of each request's keys, and of its new rows."""

    tables: NDArray[np.uint32]
    table_at: dict[int, int]  # by request: the first word of its page table
    appends: Records


@dataclass(frozen=True, eq=False)
class SubmissionPlanner:
    requests: Sequence[Request]
    layouts: Sequence[SplitLayout]
    options: CallOptions
    facts: CallFacts

    def plan(
        self, slices: tuple[RowSlice, ...], uploads: tuple[int, ...], *, partial: bool = False, two_pass: bool = False
    ) -> Submission:
        """The submission of ``slices`` that also appends the new rows of the requests ``uploads``.

        partial: pass 1 alone; two_pass: pass 2 even if every row has one state. All slices go to matrix units, or none.
        """
        facts, device, layouts = self.facts, self.facts.device, [self.layouts[piece.request] for piece in slices]
        whole = layouts[0].whole_context
        single_pass = whole or (not (partial or two_pass) and all(layout.plan.states == 1 for layout in layouts))
        matrix = self._matrix_workgroup(slices)
        shared, attended, rows_each = self._share(slices, single_pass or partial or matrix is not None)
        placement = self._placement(slices, uploads)
        items, rows, spans = self._records(slices, layouts, placement, single_pass, attended, matrix)
        masks = self._place_rows(rows, slices)
        self._place_shared(shared, slices, placement)
        counts = (1 if whole else layout.plan.states for layout in layouts)
        states = sum((piece.end - piece.begin) * count for piece, count in zip(slices, counts, strict=True))
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
                facts.shape, len(items), device.compute_units, device.shared_memory_bytes, device.layout
            ),
            matrix=matrix,
            arithmetic=self.options.arithmetic if self.options.arithmetic in EXACT else "canonical",
            whole_context=whole,
        )
        tables_at = tuple(placement.table_at[piece.request] for piece in slices)
        return Submission(
            key, slices, items, rows, placement.tables, spans, tables_at, uploads, placement.appends, shared, masks
        )

    def _matrix_workgroup(self, slices: tuple[RowSlice, ...]) -> MatrixWorkgroup | None:
        """The matrix workgroup that suits the longest of the slices; None where their arithmetic is the canonical."""
        facts, arithmetic = self.facts, self.options.arithmetic
        if not facts.by_matrix(arithmetic, self.requests[slices[0].request].q_len):
            return None
        rows = max(piece.end - piece.begin for piece in slices)
        workgroup = facts.matrix_workgroup(arithmetic, rows * facts.shape.group)
        assert workgroup is not None, "checked when the arithmetic was chosen"
        return workgroup

    def _visible(self, piece: RowSlice) -> Visible:
        request = self.requests[piece.request]
        first, limit = request.visible or key_ranges(request.tokens, request.q_len, request.causal, self.options.window)
        return first[piece.begin : piece.end], limit[piece.begin : piece.end]

    def _placement(self, slices: tuple[RowSlice, ...], uploads: tuple[int, ...]) -> _Placement:
        tables, table_at, offset = [np.zeros(0, np.uint32)], dict[int, int](), 0
        for index in dict.fromkeys((*uploads, *(piece.request for piece in slices))):
            table_at[index] = offset
            table, leaf = self.requests[index].table, pages_per_leaf(self.facts.page_size)
            tables += [table, np.zeros(-len(table) % leaf, np.uint32)]
            offset += -(-len(table) // leaf) * leaf
        appends = [no_records(APPEND)]
        for index in uploads:
            request = self.requests[index]
            records = np.zeros(request.new_rows, APPEND)
            records["position"] = np.arange(request.tokens - request.new_rows, request.tokens)
            records["page_table"] = table_at[index]
            appends.append(records)
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
        """The slices' ITEM records, their ROW records, and the items of each slice."""
        items, rows, spans, item, row, state = [], [], [], 0, 0, 0
        for i, (piece, layout) in enumerate(zip(slices, layouts, strict=True)):
            visible, shared = self._visible(piece), None if attended is None else attended[i]
            rows_each = 1 if matrix is None else matrix.rows(self.facts.shape.group)
            new_items = item_records(visible, layout.ranges, keep_empty=single_pass, shared=shared, rows_each=rows_each)
            new_items["row"] += np.uint32(row)
            if layout.whole_context:
                new_items = new_items[::-1]  # the longest items begin first
            if (shifts := self.requests[piece.request].shifts) is not None:  # no item reaches into another node
                new_items["key_shift"] = shifts[new_items["node_begin"]]
            new_items["page_table"] = placement.table_at[piece.request]
            records = row_records(visible, layout.plan)
            records["state"] += np.uint32(state)
            items.append(new_items)
            rows.append(records)
            spans.append(slice(item, item + len(new_items)))
            item, row, state = item + len(new_items), row + len(records), state + len(records) * layout.plan.states
        return np.concatenate(items), np.concatenate(rows), tuple(spans)

    def _place_rows(self, rows: Records, slices: tuple[RowSlice, ...]) -> NDArray[np.uint32]:
        """Set the rows' positions and the places of their masks in the returned words."""
        masks, row, word = [np.zeros(0, np.uint32)], 0, 0
        for piece in slices:
            request, count = self.requests[piece.request], piece.end - piece.begin
            records, row = rows[row : row + count], row + count
            end = request.tokens if request.end is None else request.end
            positions = end - request.q_len + np.arange(piece.begin, piece.end)  # negative before the first key
            records["position"] = positions.astype(np.uint32)
            if request.mask is not None:
                words = request.mask.words[piece.begin : piece.end]
                width = words.shape[1]
                records["mask"] = word + np.arange(count) * width
                records["mask_begin"], records["mask_end"] = request.mask.begin, request.mask.begin + width
                masks.append(words.reshape(-1))
                word += words.size
        return np.concatenate(masks)

    def _share(self, slices: tuple[RowSlice, ...], apart: bool) -> tuple[Records, list[Indices] | None, int]:
        """(items of keys that rows share, shared nodes of each slice's rows, rows of an item); none if ``apart``."""
        nothing = no_records(ITEM), None, 1
        facts, cascade, sizes = self.facts, self.options.cascade, [piece.end - piece.begin for piece in slices]
        device = facts.device  # a CPU's driver keeps the sums of more vectors in memory
        few = device.kind == "cpu" and cascade is None and not device.native
        vectors = MAX_HEADS_PER_WORKGROUP if few else SHARED_VECTORS
        most = shared_rows(facts.shape, device.shared_memory_bytes, vectors, device.layout)
        if apart or self.options.window is not None or cascade is False or sum(sizes) < 2 or most < 2:
            return nothing
        limits = np.concatenate([self._visible(piece)[1] for piece in slices])
        tables = [self.requests[piece.request].table for piece in slices for _ in range(piece.begin, piece.end)]
        shared, attended = shared_nodes(limits, tables, facts.page_size)
        if not shared:
            return nothing
        each = min(most, power_of_two(max(prefix.rows for prefix in shared)))
        saved = sum((prefix.rows - -(-prefix.rows // each)) * (prefix.end - prefix.begin) for prefix in shared)
        items = shared_items(shared, each)
        if cascade is None:
            owners, rows = np.repeat([piece.request for piece in slices], sizes), max(prefix.rows for prefix in shared)
            # requests are neighbors
            single = all(owners[prefix.row] == owners[prefix.row + prefix.rows - 1] for prefix in shared)
            fused, units = int(self.options.arithmetic == "fused"), facts.device.compute_units
            rule = SHARING_RULE.values(rows, len(items), saved, fused, facts.shape.kv_heads, units)
            if not rule["PAYS" if single else "FILLS"]:
                return nothing
        if len(items) > facts.device.max_items:  # the rows alone need fewer, and fit
            return nothing
        return items, np.split(attended, np.cumsum(sizes)[:-1]), each

    def _place_shared(self, shared: Records, slices: tuple[RowSlice, ...], placement: _Placement) -> None:
        """Give shared items the page table of their first row."""
        if not len(shared):
            return
        sizes = [piece.end - piece.begin for piece in slices]
        owner = np.repeat([piece.request for piece in slices], sizes)[shared["row"]]
        for request in dict.fromkeys(piece.request for piece in slices):
            shared["page_table"][owner == request] = placement.table_at[request]
