"""Folds partial states on a device, with the bits of ``zinc_attn.fold``, which does it in NumPy."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from ..canonical.partial import PartialState, gather
from ..canonical.state import F32
from ..checks import Uncopied
from ..decode.workspace import out_and_lse
from ..errors import ArgumentError, ClosedError, ShapeError
from ..kernels.dispatches import merge_call
from ..kernels.records import HeadValues, WorkBuffer
from ..kernels.tuning import SCRATCH_BYTES
from ..planning.padding import padded
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Recording, Use
from ..shapes import AttnShape, filled_up


class _Workspace(NamedTuple):
    """The work words, buffers and recording of one size of call."""

    work: WorkBuffer
    buffers: dict[str, Buffer]
    recording: Recording


class Fold(Uncopied, instead="make one for the other device"):
    """Folds partial states, wherever they were computed, on ``device`` by the second pass of the kernels.

    shape: of the states' layer. max_states: partial states of a submission at most; further query rows go into further
    submissions. Buffers and command buffers are kept between calls, until ``release`` or ``close``.
    """

    def __init__(self, device: Device, shape: AttnShape) -> None:
        if not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device")
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")
        self.device, self.shape, self._open = device, shape, True
        state_bytes = 4 * shape.q_heads * (shape.v_dim + 2)
        self.max_states = min(SCRATCH_BYTES, device.info.max_buffer_bytes) // state_bytes
        self._workspaces: dict[tuple[int, int], _Workspace] = {}

    def __call__(self, parts: Seq[PartialState]) -> tuple[F32, F32]:
        """Return out (q_len, q_heads, head_dim) and lse (q_len, q_heads) with the bits of ``fold``, or its errors.

        ClosedError after ``close``.
        """
        if not self._open:
            raise ClosedError("Fold: used after close()")
        if not isinstance(parts, (Seq, PartialState)):
            raise ArgumentError(f"parts: got {type(parts).__name__}, expected a list of the PartialStates of one call")
        whole = gather(parts)
        q_len, n, heads, dim = whole.o.shape
        if (heads, dim) != (self.shape.q_heads, self.shape.v_head_dim):
            raise ShapeError(f"partial states: got {heads} heads of {dim}, expected those of {self.shape}")
        rows = min(max(self.max_states // max(n, 1), 1), self.device.info.max_workgroups[2])
        with self.device.lock:
            results = [self._fold_rows(whole, first, min(first + rows, q_len)) for first in range(0, q_len, rows)]
        return np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results])

    def _fold_rows(self, whole: PartialState, begin: int, end: int) -> tuple[F32, F32]:
        """Return out and lse of the query rows [begin, end), by one submission."""
        runtime, n, count = self.device.runtime, whole.o.shape[1], end - begin
        heads, dim = self.shape.q_heads, self.shape.v_dim
        rows = padded(count, self.device.info.max_workgroups[2])
        states_room = padded(n * count, self.max_states)
        work, buffers, recording = self._workspace(rows, states_room)
        records = work.rows[:count]
        work.rows["count"][count:] = 0  # rows are rounded up; the surplus ones have no states
        records["state"], records["count"] = np.arange(count) * n, n
        records["node"] = whole.span[0]
        HeadValues(whole.sinks).write(work.heads)
        runtime.write(buffers["work"], work.words)
        runtime.write(buffers["states"], filled_up(whole.o[begin:end], dim).reshape(-1).view(np.uint32))
        pairs = np.stack([whole.m[begin:end], whole.l[begin:end]], axis=-1)
        pairs_start = states_room * heads * dim  # in words: m and l follow all the o
        runtime.write(buffers["states"], np.ascontiguousarray(pairs).reshape(-1).view(np.uint32), pairs_start)
        runtime.run(recording)
        out, lse = out_and_lse(runtime.read(buffers["out"]), rows, self.shape)
        return out[:count], lse[:count]

    def _workspace(self, rows: int, states: int) -> _Workspace:
        """The workspace for these sizes, which is made once."""
        key = rows, states
        if key not in self._workspaces:
            runtime, shape = self.device.runtime, self.shape
            work = WorkBuffer(rows=rows, heads=shape.q_heads)
            work.set_shape(shape, shape.kv_heads)
            work.set(rows=rows, state_stride=states)
            buffers: dict[str, Buffer] = {}
            try:
                buffers["work"] = runtime.buffer(4 * work.words.size, Use.INPUT)
                buffers["states"] = runtime.buffer(4 * states * shape.q_heads * (shape.v_dim + 2), Use.INPUT)
                buffers["out"] = runtime.buffer(4 * rows * shape.q_heads * (shape.v_dim + 1), Use.OUTPUT)
                call = merge_call(shape, self.device.info.kind, rows)
                recording = runtime.record([self.device.dispatch(call, buffers)])
            except BaseException:
                for buffer in buffers.values():
                    buffer.close()
                raise
            self._workspaces[key] = _Workspace(work, buffers, recording)
        return self._workspaces[key]

    def release(self) -> None:
        """Free the buffers and command buffers. A later call makes them anew."""
        while self._workspaces:
            _, workspace = self._workspaces.popitem()
            workspace.recording.close()
            for buffer in workspace.buffers.values():
                buffer.close()

    def close(self) -> None:
        """Free the buffers and command buffers. The object cannot be used any more."""
        self._open = False
        self.release()
