"""Step 3 of a call: a workspace takes the words of a submission, or patches the few that a steady call changes.

A workspace belongs to a ``RecordingKey``: it has the buffers that a recorded submission of that key is bound to. The
layers of a cache share it: their calls of one step differ in the page where the layer begins. Calls wait for each
other, so workspaces of different keys share the larger tensors.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache.device_encoding import encodes_on_device, upload_values, value_words
from ..cache.kv_cache import KVCache
from ..kernels import declarations
from ..kernels.dispatches import (
    AttendVariant,
    KernelCall,
    MatrixVariant,
    append_call,
    attend_call,
    encode_call,
    matrix_call,
    merge_call,
)
from ..kernels.records import ROW, Records, WorkBuffer, out_and_lse
from ..planning.call import RecordingKey, Submission
from ..planning.inputs import SteadyKey
from ..planning.items import item_keys
from ..planning.sizes import padded
from ..planning.steady import SteadyWords
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Dispatch, Runtime, Use
from ..runtime.submission import DeviceSubmission
from ..shapes import filled_up
from .scoring import Scoring

Words = NDArray[np.uint32]
FIRST_PAGE: Final = declarations.HEADER.index("first_page")


class SharedTensors:
    """The tensors that workspaces share, by name and size class: each has at most twice the words that are needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[tuple[str, int], Buffer] = {}

    def __call__(self, name: str, words: int, use: Use) -> Buffer:
        """A tensor of at least ``words`` words."""
        size = padded(words, max(words, self._device.info.max_buffer_bytes // 4))
        if (name, size) not in self._made:
            self._made[name, size] = self._device.runtime.buffer(4 * size, use)
        return self._made[name, size]

    def close(self) -> None:
        """Free them."""
        made, self._made = self._made, {}
        for buffer in made.values():
            buffer.close()


@dataclass
class Tensors:
    """What a recording is bound to beside K, V and the work words, by the names that kernel calls have for it.

    q: (rows, q_heads, k_dim) float32; states and out: see ``kernels.declarations``; rows: the new rows, uploaded, or
    encoded on the device from the uploaded ``values``.
    """

    q: Buffer
    states: Buffer
    out: Buffer
    rows: Buffer | None
    values: Buffer | None = None

    @classmethod
    def shared(cls, key: RecordingKey, cache: KVCache, tensors: SharedTensors) -> Tensors:
        """Those of a call of the package's own."""
        words = TensorWords.of(key, cache)
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
    def of(cls, key: RecordingKey, cache: KVCache) -> TensorWords:
        """Those of a key."""
        heads, dim, values = cache.shape.q_heads, cache.shape.v_dim, value_words(cache.shape, key.appends)
        if not encodes_on_device(cache.dtype, key.appends) or 4 * values > cache.device.info.max_buffer_bytes:
            values = 0
        return cls(
            q=key.rows * heads * cache.shape.k_dim,
            states=0 if key.single_pass and not key.walks else key.states * heads * (dim + 2),
            out=key.rows * heads * (dim + 1),
            rows=key.appends * cache.row_words,
            values=values,
        )


class SteadyState(NamedTuple):
    """What the work words and their buffers hold: the submission of the plan that holds for calls of ``key``, with
    these lengths."""

    key: SteadyKey
    lengths: tuple[int, ...]
    words: SteadyWords


@dataclass(eq=False)
class Workspace:
    """Work words, on the host and in a buffer for every head slice of a layer, and the tensors of a key.

    steady: None while the words are written, and where no later call can use them. first_page: that of the layer for
    which the buffers hold the words; None while they are written. submission: the last one.
    """

    key: RecordingKey
    cache: KVCache
    tensors: Tensors
    work: WorkBuffer
    shared: WorkBuffer | None
    work_buffers: list[Buffer] = field(default_factory=list)
    shared_buffers: list[Buffer] = field(default_factory=list)
    steady: SteadyState | None = None
    first_page: int | None = None
    submission: DeviceSubmission | None = None
    row_words: Words = field(default_factory=lambda: np.zeros(0, np.uint32))

    @classmethod
    def make(cls, key: RecordingKey, cache: KVCache, scoring: Scoring, tensors: Tensors) -> Workspace:
        """A workspace with new work buffers. A failed call leaves none."""
        shape, runtime = cache.shape, cache.device.runtime
        work = WorkBuffer(key.items, key.rows, key.appends, key.tables, scoring.heads, key.masks)
        heads = scoring.heads._replace(sinks=None)  # which pass 2 alone reads
        shared = WorkBuffer(key.shared, key.rows, 0, key.tables, heads, key.masks) if key.shared else None
        made = cls(key, cache, tensors, work, shared)
        for one in (work, shared):
            if one is not None:
                cache.layout.set_header(one, cache.layers[0].slices[0])
                one.set(**scoring.header(shape.head_dim), state_stride=key.states, rows=key.rows)
        work.set(single_pass=int(key.single_pass))
        encoded = 0 if tensors.values is not None else key.appends  # by the host
        made.row_words = np.zeros((encoded, shape.kv_heads, cache.row_words // shape.kv_heads), np.uint32)
        try:
            for one, buffers in ((work, made.work_buffers), (shared, made.shared_buffers)):
                for _ in cache.layers[0].slices:
                    if one is not None:
                        buffers.append(runtime.buffer(4 * one.words.size, Use.INPUT))
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Free the work buffers; the tensors are their owner's."""
        for buffer in (*self.work_buffers, *self.shared_buffers):
            buffer.close()

    # --- filling ------------------------------------------------------------------------------------------

    def fill(self, submission: Submission) -> None:
        """Take the records of a submission that fits the key."""
        self.steady = None
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
        for one in (work, self.shared):
            if one is not None and len(submission.masks):
                one.masks[: len(submission.masks)] = submission.masks
                one.rows["mask"] += np.uint32(one.masks_at)

    def steady_words(self, submission: Submission, window: int | None) -> SteadyWords:
        """Those of a submission that was filled in."""
        rows = [one.rows for one in (self.work, self.shared) if one is not None]
        return SteadyWords.of(submission, window, self.work.items, self.work.appends, rows)

    def upload_words(self, layer: int) -> None:
        """Write the work words for the head slices of ``layer``."""
        runtime, storage = self.cache.device.runtime, self.cache.layers[layer]
        self.first_page = None
        for work, buffers in ((self.work, self.work_buffers), (self.shared, self.shared_buffers)):
            if work is None:
                continue
            work.set(first_page=storage.first_page)
            for one, buffer in zip(storage.slices, buffers, strict=True):
                if len(buffers) > 1:
                    self.cache.layout.set_header(work, one)
                runtime.write(buffer, work.words)
        self.first_page = storage.first_page

    def rebind_layer(self, layer: int) -> None:
        """Write the one word in which the call of another layer differs from the one before, where it does."""
        first_page = self.cache.layers[layer].first_page
        if first_page != self.first_page:
            self.first_page = None
            self.work.set(first_page=first_page)
            word = self.work.words[FIRST_PAGE : FIRST_PAGE + 1]
            for buffer in (*self.work_buffers, *self.shared_buffers):
                self.cache.device.runtime.write(buffer, word, FIRST_PAGE)
            self.first_page = first_page

    def upload_q(self, q: NDArray[Any]) -> None:
        """Write the query rows, (rows, q_heads, head_dim)."""
        words = filled_up(q, self.cache.shape.k_dim).reshape(-1).view(np.uint32)
        self.cache.device.runtime.write(self.tensors.q, words)

    def upload_rows(self, new: Seq[tuple[NDArray[Any], NDArray[Any]]], layer: int) -> None:
        """Write the new rows of a layer, stored values k and v (n, kv_heads, head_dim) of each request in order."""
        runtime, at = self.cache.device.runtime, 0
        if self.tensors.rows is None:
            return
        if self.tensors.values is not None:
            upload_values(runtime, self.tensors.values, self.cache.shape, self.key.appends, new)
            return
        for keys, values in new:
            self.cache.encode_into(self.row_words[at : at + len(keys)], keys, values, layer)
            at += len(keys)
        runtime.write(self.tensors.rows, self.row_words[:at].reshape(-1))

    def keys_read(self) -> int:
        """Keys, of one KV head, that the workgroups of pass 1 read."""
        shape, matrix = self.cache.shape, self.key.matrix
        total = (shape.head_chunks if matrix is None else matrix.blocks(shape.group)) * item_keys(self.work.items)
        return total + (item_keys(self.shared.items) if self.shared is not None else 0)

    # --- results ------------------------------------------------------------------------------------------

    def results(self, rows: int, copy: bool = True) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """out (rows, q_heads, v_head_dim) and lse (rows, q_heads) of the last submission.

        Without ``copy`` they are valid until the next submission.
        """
        runtime = self._sent()
        words = (runtime.read if copy else runtime.peek)(self.tensors.out)
        out, lse = out_and_lse(words, self.key.rows, self.cache.shape)
        return out[:rows], lse[:rows]

    def states(self, rows: int, units: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """m and l (rows, units, q_heads), o (rows, units, q_heads, v_head_dim) of a partial submission."""
        shape = self.cache.shape
        heads, dim = shape.q_heads, shape.v_dim
        words = self._sent().read(self.tensors.states).view(np.float32)
        o = words[: rows * units * heads * dim].reshape(rows, units, heads, dim)[..., : shape.v_head_dim]
        pairs = words[self.key.states * heads * dim :][: 2 * rows * units * heads].reshape(rows, units, heads, 2)
        return pairs[..., 0], pairs[..., 1], o

    def _sent(self) -> Runtime:
        if self.submission is not None:
            self.submission.send()
        return self.cache.device.runtime

    # --- dispatches ---------------------------------------------------------------------------------------

    def dispatches(self, layer: int, scoring: Scoring) -> list[Dispatch]:
        """Append, attend, merge; or attend, merge, append where attend reads the new rows from the upload. Encode comes
        first where the device encodes them.

        They are those of every layer that shares ``layer``'s K and V buffers.
        """
        key, cache, info = self.key, self.cache, self.cache.device.info
        alone = AttendVariant(
            cache.shape,
            cache.dtype,
            key.build,
            info.kind,
            cache.tile,
            softcap=scoring.softcap is not None,
            alibi=scoring.alibi is not None,
            mask=key.masks > 0,
            from_upload=key.from_upload,
            lanes=info.attend_lanes,
        )
        together = replace(alone, build=key.shared_build, rows=key.shared_rows)
        target = "out" if key.single_pass else "states"
        dispatch, tensors = cache.device.dispatch, {"work": self.work_buffers[0], **vars(self.tensors)}
        encodes, appends, attends = list[Dispatch](), list[Dispatch](), list[Dispatch]()
        if self.tensors.values is not None:
            encodes.append(dispatch(encode_call(cache.shape, cache.dtype, key.appends), tensors))
        for i, one in enumerate(cache.layers[layer].slices):
            bound = {**tensors, "work": self.work_buffers[i], "k": one.k, "v": one.v}
            if key.appends:
                call = append_call(cache.shape, cache.dtype, cache.tile, key.appends, one.heads)
                appends.append(dispatch(call, bound))
            if key.shared:
                bound["shared"] = self.shared_buffers[i]
                attends.append(dispatch(attend_call(together, key.shared, one.heads, target, "shared"), bound))
            attends.append(dispatch(self._pass_1(alone, one.heads, target), bound))
        if not key.single_pass and not key.partial:
            attends.append(dispatch(merge_call(cache.shape, info.kind, key.rows), tensors))
        return [*encodes, *attends, *appends] if key.from_upload else [*encodes, *appends, *attends]

    def _pass_1(self, alone: AttendVariant, kv_heads: int, target: str) -> KernelCall:
        """Pass 1 over the items of single rows, or, by matrix units, over all items."""
        key, mat = self.key, self.cache.device.info.matrix.tile
        if key.matrix is None or mat is None:
            return attend_call(alone, key.items, kv_heads, target)
        states = "states" if key.walks else None
        return matrix_call(MatrixVariant.of(alone, mat, key.matrix), key.items, kv_heads, target, states)


def _set_items(work: WorkBuffer, items: Records) -> None:
    """Items of a submission, whose page tables count from the begin of the tables; the surplus ones have no leaves."""
    work.items[: len(items)] = items
    work.items["page_table"][: len(items)] += np.uint32(work.tables_at)
    work.items["leaf_begin"][len(items) :] = work.items["leaf_end"][len(items) :] = 0
