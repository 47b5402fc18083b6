"""Step 3 of a call: a workspace takes the words of a submission, or patches the few that a steady call changes.

A workspace has the buffers to which a recorded submission of its ``RecordingKey`` is bound. The layers of a cache share
a workspace: their calls of one step differ in the page where the layer begins. Calls wait for each other, so workspaces
of different keys share the larger tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache.device_encoding import upload_values, value_words
from ..cache.layer_storage import LayerStorage
from ..cache.mover import PageGeometry
from ..canonical.integer import rounded_rows
from ..kernels import declarations
from ..kernels.dispatches import (
    AttendVariant,
    KernelCall,
    MatrixVariant,
    attend_call,
    encode_call,
    merge_call,
    move_call,
)
from ..kernels.records import ROW, Records, Words, WorkBuffer
from ..kernels.tuning import heads_together
from ..planning.inputs import Request
from ..planning.items import item_keys
from ..planning.padding import padded
from ..planning.steady import SteadyWords
from ..planning.submission import RecordingKey, Submission
from ..runtime.device import Device, QueuedRecordings
from ..runtime.protocol import Buffer, Dispatch, Runtime, Use
from ..shapes import AttnShape, filled_up, row_format
from .scoring import Scoring

Encode = Callable[[Words, NDArray[Any], NDArray[Any], int], None]  # as ``KVCache.encode_into``
FIRST_PAGE: Final = list(declarations.HEADER).index("first_page")


class PagedStorage(NamedTuple):
    """The places of K and V of layers in the pages of a KVCache."""

    device: Device
    layout: PageGeometry
    layers: Seq[LayerStorage]


class SharedTensors:
    """The tensors that workspaces share, by name and size class: each has at most twice the words that are needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, int], Buffer] = {}

    def __call__(self, name: str, words: int, use: Use) -> Buffer:
        """A tensor of at least ``words`` words."""
        size = padded(words, max(words, self._device.info.max_buffer_bytes // 4))
        if (name, size) not in self._tensors:
            self._tensors[name, size] = self._device.runtime.buffer(4 * size, use)
        return self._tensors[name, size]

    def close(self) -> None:
        tensors, self._tensors = self._tensors, {}
        for buffer in tensors.values():
            buffer.close()


@dataclass
class Tensors:
    """The buffers of a recording beside K, V and the work words, by their names in kernel calls.

    q: (rows, q_heads, k_dim) float32; states and out: see ``kernels.declarations``; rows: the new rows, uploaded, or
    encoded on the device from the uploaded ``values``.
    """

    q: Buffer
    states: Buffer
    out: Buffer
    rows: Buffer | None
    values: Buffer | None = None

    @classmethod
    def of(cls, key: RecordingKey, pages: PagedStorage, tensors: Callable[[str, int, Use], Buffer]) -> Tensors:
        """The tensors of a key's calls. tensors: returns a tensor for a name, a number of words and a use."""
        words = TensorWords.of(key, pages)
        name, use = ("partials", Use.OUTPUT) if key.partial else ("states", Use.SCRATCH)
        rows = ("encoded", Use.SCRATCH) if words.values else ("rows", Use.INPUT)
        return cls(
            states=tensors(name, words.states, use),
            out=tensors("out", words.out, Use.OUTPUT),
            q=tensors("q", words.q, Use.INPUT),
            rows=tensors(rows[0], words.rows, rows[1]) if key.appends else None,
            values=tensors("values", words.values, Use.INPUT) if words.values else None,
        )


@dataclass(frozen=True)
class TensorWords:
    """Sizes of a recording's tensors in words. values: 0 where the host encodes the new rows."""

    q: int
    states: int
    out: int
    rows: int
    values: int

    @classmethod
    def of(cls, key: RecordingKey, pages: PagedStorage) -> TensorWords:
        layout = pages.layout
        heads, dim, values = layout.shape.q_heads, layout.shape.v_dim, value_words(layout.shape, key.appends)
        if not layout.encodes(key.appends) or 4 * values > pages.device.info.max_buffer_bytes:
            values = 0
        return cls(
            q=key.rows * heads * layout.shape.k_dim,
            states=0 if key.single_pass and not key.whole_context else key.states * heads * (dim + 2),
            out=key.rows * heads * (dim + 1),
            rows=key.appends * layout.row_words,
            values=values,
        )


@dataclass(eq=False)
class Workspace:
    """Work words, on the host and in a buffer for every head slice of a layer, and the tensors of a key.

    submission: the last submission whose words it took; queued: the recordings of a ``together`` block that will run
    it; steady: the words that a steady call sets, None while words are written, and where no later call can use them;
    first_page: of the layer for which the buffers hold the words, None while they are written.
    """

    key: RecordingKey
    pages: PagedStorage
    tensors: Tensors
    work: WorkBuffer
    shared: WorkBuffer | None
    scoring: Scoring
    work_buffers: list[Buffer] = field(default_factory=list)
    shared_buffers: list[Buffer] = field(default_factory=list)
    submission: Submission | None = None
    queued: QueuedRecordings | None = None
    steady: SteadyWords | None = None
    first_page: int | None = None
    row_words: Words = field(default_factory=lambda: np.zeros(0, np.uint32))

    @classmethod
    def make(cls, key: RecordingKey, pages: PagedStorage, scoring: Scoring, tensors: Tensors) -> Workspace:
        """A workspace with new work buffers. A failed call leaves none."""
        layout, slices, runtime = pages.layout, pages.layers[0].slices, pages.device.runtime
        heads = layout.shape.q_heads
        work = WorkBuffer(key.items, key.rows, key.appends, key.tables, heads, key.masks)
        shared = WorkBuffer(key.shared, key.rows, 0, key.tables, heads, key.masks) if key.shared else None
        workspace = cls(key, pages, tensors, work, shared, scoring)
        for records in (work, shared):
            if records is not None:
                layout.set_header(records, slices[0])
                records.set(**scoring.header(), state_stride=key.states, rows=key.rows)
                scoring.heads.write(records.heads)
        work.set(single_pass=int(key.single_pass))
        heads_each = layout.shape.kv_heads
        encoded = 0 if tensors.values is not None else key.appends  # by the host
        workspace.row_words = np.zeros((encoded, heads_each, row_format(layout.shape, layout.dtype).words), np.uint32)
        try:
            for records, buffers in ((work, workspace.work_buffers), (shared, workspace.shared_buffers)):
                for _ in slices:
                    if records is not None:
                        buffers.append(runtime.buffer(4 * records.words.size, Use.INPUT))
        except BaseException:
            workspace.close()
            raise
        return workspace

    def close(self) -> None:
        """Free the work buffers; the tensors are their owner's."""
        for buffer in (*self.work_buffers, *self.shared_buffers):
            buffer.close()

    # --- filling ------------------------------------------------------------------------------------------

    def fill(self, submission: Submission, layer: int, requests: Seq[Request] | None = None) -> None:
        """Write the words of a submission that fits the key, on the host and in the buffers of a layer.

        requests: the call's, if the submission is a whole plan that serves steady calls. If its words are there
        already, only the words that depend on the requests' keys and page tables are written.
        """
        steady, self.steady = self.steady, None  # an interrupted call leaves words that the next one must fill again
        lengths = None if requests is None else [request.tokens for request in requests]
        if steady is None or steady.submission is not submission or requests is None:
            self.submission = submission
            self._take(submission)
            rows = [records.rows for records in (self.work, self.shared) if records is not None]
            layout, work = self.pages.layout, self.work
            views = work.items, work.appends, rows, work.tables, layout.tile * layout.page_tiles
            steady = SteadyWords.of(submission, self.scoring.window, *views)
        if lengths == steady.lengths:
            self._rebind_layer(layer)
            self.steady = steady
            return
        if requests is not None:
            steady.set(requests)
        self._upload_words(layer)
        self.steady = None if requests is None else steady

    def _take(self, submission: Submission) -> None:
        """Write the records of a submission on the host."""
        work = self.work
        work.tables[: len(submission.tables)] = submission.tables
        _set_items(work, submission.items)
        work.rows[: len(submission.rows)] = submission.rows
        work.rows[len(submission.rows) :] = np.zeros((), ROW)  # no states
        appended = len(submission.appends)
        work.appends[:appended] = submission.appends
        work.appends["page_table"][:appended] += np.uint32(work.tables_at)
        work.appends["position"][appended:] = declarations.NO_TOKEN
        if self.shared is not None:
            self.shared.tables[:] = work.tables
            self.shared.rows[:] = work.rows
            _set_items(self.shared, submission.shared_items)
        for records in (work, self.shared):
            if records is not None and len(submission.masks):
                records.masks[: len(submission.masks)] = submission.masks
                records.rows["mask"] += np.uint32(records.masks_at)

    def _upload_words(self, layer: int) -> None:
        """Write the work words for the head slices of ``layer``."""
        runtime, storage = self.pages.device.runtime, self.pages.layers[layer]
        self.first_page = None
        for work, buffers in ((self.work, self.work_buffers), (self.shared, self.shared_buffers)):
            if work is None:
                continue
            work.words[FIRST_PAGE] = storage.first_page
            for head_slice, buffer in zip(storage.slices, buffers, strict=True):
                if len(buffers) > 1:
                    self.pages.layout.set_header(work, head_slice)
                runtime.write(buffer, work.words)
        self.first_page = storage.first_page

    def _rebind_layer(self, layer: int) -> None:
        """Write the one word in which calls of different layers differ, if it differs."""
        first_page = self.pages.layers[layer].first_page
        if first_page != self.first_page:
            self.first_page = None
            self.work.words[FIRST_PAGE] = first_page
            word = self.work.words[FIRST_PAGE : FIRST_PAGE + 1]
            for buffer in (*self.work_buffers, *self.shared_buffers):
                self.pages.device.runtime.write(buffer, word, FIRST_PAGE)
            self.first_page = first_page

    def upload_q(self, q: NDArray[Any]) -> None:
        """Write the query rows, (rows, q_heads, head_dim)."""
        k_dim = self.pages.layout.shape.k_dim
        if self.key.arithmetic == "integer":
            q = rounded_rows(q)
        if q.dtype != np.float32 or q.shape[-1] != k_dim or not q.flags.c_contiguous:
            q = filled_up(q, k_dim)
        self.pages.device.runtime.write(self.tensors.q, q.reshape(-1).view(np.uint32))

    def upload_rows(self, new: Seq[tuple[NDArray[Any], NDArray[Any]]], layer: int, encode: Encode) -> None:
        """Write the new rows of a layer, stored values k and v (n, kv_heads, head_dim) of each request in order."""
        runtime, row = self.pages.device.runtime, 0
        if self.tensors.rows is None:
            return
        if self.tensors.values is not None:
            upload_values(runtime, self.tensors.values, self.pages.layout.shape, self.key.appends, new)
            return
        for keys, values in new:
            encode(self.row_words[row : row + len(keys)], keys, values, layer)
            row += len(keys)
        runtime.write(self.tensors.rows, self.pages.layout.to_device(self.row_words[:row]).reshape(-1))

    def keys_read(self) -> int:
        """Keys, of one KV head, that the workgroups of pass 1 read."""
        shape, key, matrix = self.pages.layout.shape, self.key, self.key.matrix
        vectors = heads_together(shape, key.most_heads, self.pages.device.info.layout)
        shares = -(-shape.group // vectors)  # workgroups of a KV head
        total = (shares if matrix is None else matrix.blocks(shape.group)) * item_keys(self.work.items)
        return total + (item_keys(self.shared.items) if self.shared is not None else 0)

    # --- results ------------------------------------------------------------------------------------------

    def results(self, copy: bool = True) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """out (rows, q_heads, v_head_dim) and lse (rows, q_heads) of the submission's query rows.

        Without ``copy`` they are valid until the next submission.
        """
        runtime, rows = self.ran(), 0 if self.submission is None else len(self.submission.rows)
        words = (runtime.read if copy else runtime.peek)(self.tensors.out)
        out, lse = out_and_lse(words, self.key.rows, self.pages.layout.shape)
        return out[:rows], lse[:rows]

    def states(self, rows: int, nodes: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """m and l (rows, nodes, q_heads), o (rows, nodes, q_heads, v_head_dim) of a partial submission."""
        shape = self.pages.layout.shape
        heads, dim = shape.q_heads, shape.v_dim
        words = self.ran().read(self.tensors.states).view(np.float32)
        o = words[: rows * nodes * heads * dim].reshape(rows, nodes, heads, dim)[..., : shape.v_head_dim]
        pairs = words[self.key.states * heads * dim :][: 2 * rows * nodes * heads].reshape(rows, nodes, heads, 2)
        return pairs[..., 0], pairs[..., 1], o

    def spoil(self) -> None:
        """Fill the output with NaN, so that an element which no kernel writes cannot pass a tool's comparison."""
        self.pages.device.runtime.write(self.tensors.out, np.full(self.tensors.out.nbytes // 4, 0x7FC0DEAD, np.uint32))

    def ran(self) -> Runtime:
        """The runtime, after the queued recordings were sent."""
        if self.queued is not None:
            self.queued.send()
        return self.pages.device.runtime

    # --- dispatches ---------------------------------------------------------------------------------------

    def dispatches(self, layer: int) -> list[Dispatch]:
        """Append, attend, merge; encode first where the device encodes the new rows.

        The same dispatches serve every layer that shares ``layer``'s K and V buffers.
        """
        key, layout, device, scoring = self.key, self.pages.layout, self.pages.device, self.scoring
        alone = AttendVariant(
            layout.shape,
            layout.dtype,
            device.info.kind,
            layout.tile,
            softcap=scoring.softcap is not None,
            biases=scoring.bias_bits,
            mask=key.masks > 0,
            arithmetic=device.arithmetic_constant(key.arithmetic),
            layout=device.info.layout,
            subgroups=device.info.wave_subgroups,
            walks=key.walks,
            strides=layout.strides,
            most_heads=key.most_heads,
        )
        together = replace(alone, rows=key.shared_rows, walks=False)
        target = "out" if key.single_pass else "states"
        dispatch, tensors = device.dispatch, {"work": self.work_buffers[0], **vars(self.tensors)}
        encodes, appends, attends = list[Dispatch](), list[Dispatch](), list[Dispatch]()
        if self.tensors.values is not None:
            encodes.append(dispatch(encode_call(layout.shape, layout.dtype, key.appends), tensors))
        for i, head_slice in enumerate(self.pages.layers[layer].slices):
            bound = {**tensors, "work": self.work_buffers[i], "k": head_slice.k, "v": head_slice.v}
            if key.appends:
                moved = layout.shape, layout.dtype, layout.tile, key.appends, head_slice.heads, layout.strides
                appends.append(dispatch(move_call(declarations.APPEND_KERNEL, *moved), bound))
            if key.shared:
                bound["shared"] = self.shared_buffers[i]
                attends.append(dispatch(attend_call(together, key.shared, head_slice.heads, target, "shared"), bound))
            if key.items:
                single = replace(self._pass_1(alone, head_slice.heads, target), independent=key.shared > 0)
                attends.append(dispatch(single, bound))
        if not (key.single_pass or key.partial or key.unmerged):
            attends.append(dispatch(merge_call(layout.shape, device.info.kind, key.rows), tensors))
        return [*encodes, *appends, *attends]

    def _pass_1(self, alone: AttendVariant, kv_heads: int, target: str) -> KernelCall:
        """Pass 1 over the items of single rows, or, by matrix units, over all items."""
        key, facts = self.key, self.pages.device.info.matrix
        mat = facts.int8 if key.arithmetic == "integer" else facts.fragment
        if key.matrix is None or mat is None:
            return attend_call(alone, key.items, kv_heads, target)
        states = "states" if key.whole_context else target
        return attend_call(MatrixVariant.of(alone, mat, key.matrix), key.items, kv_heads, target, states=states)


def out_and_lse(words: Words, rows: int, shape: AttnShape) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """out (rows, q_heads, v_head_dim) and lse (rows, q_heads) in the words of an out buffer for ``rows`` rows."""
    heads, dim = shape.q_heads, shape.v_dim
    floats, size = words.view(np.float32), rows * heads * dim
    out = floats[:size].reshape(rows, heads, dim)[..., : shape.v_head_dim]
    return out, floats[size : size + rows * heads].reshape(rows, heads)


def _set_items(work: WorkBuffer, items: Records) -> None:
    """Write a submission's items, whose page tables count from the begin of the tables. Surplus items get no nodes."""
    work.items[: len(items)] = items
    work.items["page_table"][: len(items)] += np.uint32(work.tables_at)
    work.items["node_begin"][len(items) :] = work.items["node_end"][len(items) :] = 0
