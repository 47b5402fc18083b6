"""The Kompute dispatcher: the only importer of ``kp``.

Kompute's binding has no barrier between two dispatches. Where a step reads what an earlier step wrote, the buffer in
between decides how the two are ordered: a small SCRATCH buffer has a staging twin, and copying it to the host
between the steps records the barriers that are needed; a large one has none, and the steps go into two submissions.
Kompute ignores failed allocations and crashes later, so sizes and the memory budget are checked before it is called.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from ..errors import (
    ArgumentError,
    ClosedError,
    DeviceLostError,
    DeviceMemoryError,
    RuntimeUnavailableError,
    ZincAttnError,
)
from ..kernels.contract import KernelDecl
from .protocol import (
    Buffer,
    DeviceInfo,
    Dispatch,
    Recording,
    Use,
    Words,
    after_close,
    after_fork,
    check_nbytes,
    check_step,
    loader,
    memory_budget,
    no_room,
)

CHAINED_BYTES: Final = 512 * 1024  # SCRATCH up to here has a staging twin: its copy costs less than a submission
_MAX_TENSOR_BYTES: Final = (1 << 32) - 4  # kp counts bytes in 32 bits and wraps silently


def load_kp() -> Any:
    """The ``kp`` module. RuntimeUnavailableError where it is not installed."""
    try:
        import kp
    except ImportError as error:
        raise RuntimeUnavailableError(
            "runtime 'kompute' needs the package kp, which is not installed; build it with scripts/run from a clone of "
            "the repository, or use runtime='vulkan'"
        ) from error
    return kp


class KomputeBuffer:
    """A kp tensor of uint32. ``view`` is its host memory; SCRATCH that is large has none."""

    def __init__(self, runtime: KomputeRuntime, nbytes: int, use: Use, chained: bool | None = None) -> None:
        kp = runtime.kp
        self.nbytes, self.use = nbytes, use
        self.chained = use is Use.SCRATCH and nbytes <= CHAINED_BYTES if chained is None else chained
        staged = use not in (Use.SCRATCH, Use.CACHE) or self.chained
        kind = kp.TensorTypes.device if staged else kp.TensorTypes.storage
        self.tensor = runtime.manager.tensor_t(np.zeros(nbytes // 4, np.uint32) if staged else _unread(nbytes), kind)
        self.view: Words | None = self.tensor.data() if staged else None
        self.closed = False

    def close(self) -> None:
        """Free the tensor. Recordings that use it must not be run afterwards."""
        if not self.closed:
            self.closed = True
            self.view = None
            self.tensor.destroy()


class HostTensor(KomputeBuffer):
    """A kp tensor that belongs to the host program: bound, never synced, never freed."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.view, self.closed, self.chained = tensor, None, False, False
        self.nbytes, self.use = 4 * int(tensor.size()), Use.DATA

    def close(self) -> None:
        """Nothing to free."""


def _unread(nbytes: int) -> Words:
    """An array of the right size for kp's constructor, which does not read it; costs address space only."""
    return np.empty(nbytes // 4, np.uint32)


class KomputeKernel:
    """SPIR-V and constants; kp fuses pipeline, tensors and grid into an algorithm when a step is recorded."""

    def __init__(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> None:
        self.decl, self.spirv, self.spec = decl, spirv, np.array(decl.constants(spec), np.uint32)


class KomputeRecording:
    """Sequences to evaluate in order. ``spans`` maps each step to (sequence, position of its operation)."""

    def __init__(self, sequences: list[Any], algorithms: list[Any], spans: list[tuple[int, int]], timed: bool) -> None:
        self.sequences, self.algorithms, self.spans, self.timed = sequences, algorithms, spans, timed
        self.buffers: tuple[KomputeBuffer, ...] = ()

    def close(self) -> None:
        """Free the command buffers and pipelines."""
        for item in (*self.sequences, *self.algorithms):
            item.destroy()
        self.sequences, self.algorithms = [], []


class KomputeRuntime:
    """Runtime over one kp.Manager. ``info`` comes from ``runtime.list_devices``; kp uses the same device order.

    ``manager``: one that a host program owns, on the same device; it is used and not destroyed.
    """

    name = "kompute"
    orders_cache_writes = False  # kp records a barrier neither between two dispatches nor for ``storage`` tensors

    def __init__(self, info: DeviceInfo, manager: Any = None) -> None:
        self.kp = load_kp()
        self.info = info
        loader().keep_drivers_loaded()
        self._owned = manager is None
        self.manager = self.kp.Manager(info.index) if manager is None else manager
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._open = True
        # weak: what the program drops, kp frees
        self._buffers: weakref.WeakSet[KomputeBuffer] = weakref.WeakSet()
        self._recordings: weakref.WeakSet[KomputeRecording] = weakref.WeakSet()
        self._lost = False

    @contextmanager
    def _usable(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise after_fork(self.info)
        with self._lock:
            if not self._open:
                raise after_close(self.info)
            if self._lost:
                raise DeviceLostError(f"{self.info.name} was lost earlier; open a new Device")
            yield

    def _eval(self, sequence: Any) -> None:
        """Evaluate a kp.Sequence; the Vulkan errors that kp lets through become typed ones."""
        try:
            sequence.eval()
        except RuntimeError as error:
            self._lost = self._lost or "DeviceLost" in str(error)
            kind = DeviceLostError if self._lost else DeviceMemoryError if "OutOf" in str(error) else ZincAttnError
            raise kind(f"a submission on {self.info.name}: {error}") from error

    def buffer(self, nbytes: int, use: Use, chained: bool | None = None) -> KomputeBuffer:
        """See Runtime.buffer. Memory is checked against the driver's budget before kp is called.

        chained: give a SCRATCH buffer the staging twin that orders steps of one sequence, whatever its size.
        """
        with self._usable():
            nbytes = check_nbytes(nbytes, self.info, min(self.info.max_buffer_bytes, _MAX_TENSOR_BYTES))
            _, free = memory_budget(self.info.index)
            twins = 1 if use is Use.CACHE or (use is Use.SCRATCH and nbytes > CHAINED_BYTES and not chained) else 2
            if nbytes * twins > free:
                raise no_room(nbytes * twins, free, self.info)
            made = KomputeBuffer(self, nbytes, use, chained)
            self._buffers.add(made)
            return made

    def write(self, buffer: Buffer, data: Words, offset: int = 0) -> None:
        """See Runtime.write."""
        with self._usable():
            assert isinstance(buffer, KomputeBuffer)
            if buffer.closed or buffer.view is None:
                raise ClosedError(f"write: got a {buffer.use.value} buffer without host memory, expected an open one")
            buffer.view[offset : offset + data.size] = data
            if buffer.use in (Use.DATA, Use.OUTPUT):
                sequence = self.manager.sequence()
                self._eval(sequence.record(self.kp.OpTensorSyncDevice([buffer.tensor])))
                sequence.destroy()

    def read(self, buffer: Buffer) -> Words:
        """See Runtime.read."""
        with self._usable():
            assert isinstance(buffer, KomputeBuffer)
            if buffer.closed or buffer.view is None:
                raise ClosedError(f"read: got a {buffer.use.value} buffer without host memory, expected an open one")
            return buffer.view.copy()

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> KomputeKernel:
        """See Runtime.kernel."""
        with self._usable():
            return KomputeKernel(decl, spirv, spec)

    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> KomputeRecording:
        """See Runtime.record."""
        return self._record(steps, timestamps, None)

    def host_tensor(self, tensor: Any) -> HostTensor:
        """See HostSequences.host_tensor."""
        return HostTensor(tensor)

    def chained_buffer(self, nbytes: int) -> KomputeBuffer:
        """See HostSequences.chained_buffer."""
        return self.buffer(nbytes, Use.SCRATCH, chained=True)

    def record_into(self, sequence: Any, steps: Sequence[Dispatch]) -> KomputeRecording:
        """Record ``steps`` behind what a host's kp.Sequence holds; the host evaluates it. Closing frees the pipelines.

        INPUT buffers are uploaded, and OUTPUT buffers copied to the host, each time the sequence is evaluated.
        """
        return self._record(steps, False, sequence)

    def _record(self, steps: Sequence[Dispatch], timestamps: bool, into: Any) -> KomputeRecording:
        with self._usable():
            kp = self.kp
            tensors = {id(b): b for step in steps for b in step.buffers}
            buffers = [b for b in tensors.values() if isinstance(b, KomputeBuffer)]
            inputs = [b.tensor for b in buffers if b.use is Use.INPUT]
            outputs = [b.tensor for b in buffers if b.use is Use.OUTPUT]
            marks = 2 * len(steps) + 4 if timestamps else 0
            algorithms: list[Any] = []
            sequences, position = [self.manager.sequence(0, marks) if into is None else into], 0
            spans: list[tuple[int, int]] = []
            pending: set[int] = set()  # buffers written by a step that nothing has ordered yet
            read: set[int] = set()  # buffers read by such a step
            synced = False  # outputs are in host memory as the last step left them

            def add(operation: Any) -> None:
                nonlocal position
                sequences[-1].record(operation)
                position += 1

            if inputs:
                add(kp.OpTensorSyncDevice(inputs))
            for at, step in enumerate(steps):
                check_step(at, step, self.info)
                kernel = step.kernel
                assert isinstance(kernel, KomputeKernel)
                declared = list(zip(step.buffers, kernel.decl.bindings, strict=True))
                writes = {id(b) for b, binding in declared if binding.access == "write"}
                conflicts = [b for b in buffers if id(b) in pending and any(b is used for used in step.buffers)]
                if conflicts:
                    if all(b.chained for b in conflicts):
                        add(kp.OpTensorSyncLocal([b.tensor for b in conflicts]))
                    elif into is not None:
                        raise ArgumentError(
                            f"steps[{at}]: needs a submission of its own, expected one sequence for all"
                        )
                    else:
                        sequences.append(self.manager.sequence(0, marks))
                        position = 0
                    pending.clear()
                    read.clear()
                elif writes & read and outputs:
                    # a write after a read needs order, not visibility: any copy between the two gives it
                    add(kp.OpTensorSyncLocal(outputs))
                    pending -= {id(b) for b in buffers if b.use is Use.OUTPUT}
                    read.clear()
                    synced = True
                args = [b.tensor for b in step.buffers if isinstance(b, KomputeBuffer)]
                grid, none = list(step.groups), np.array([], np.uint32)
                algorithms.append(self.manager.algorithm(args, kernel.spirv, grid, kernel.spec, none))
                add(kp.OpAlgoDispatch(algorithms[-1]))
                spans.append((len(sequences) - 1, position))
                pending |= writes
                read |= {id(b) for b, binding in declared if binding.access == "read"}
                synced = synced and not any(b.use is Use.OUTPUT and id(b) in writes for b in buffers)
            if outputs and not synced:
                add(kp.OpTensorSyncLocal(outputs))
            made = KomputeRecording([] if into is not None else sequences, algorithms, spans, timestamps)
            made.buffers = tuple(buffers)
            self._recordings.add(made)
            return made

    def run(self, recording: Recording) -> None:
        """See Runtime.run."""
        with self._usable():
            assert isinstance(recording, KomputeRecording)
            if not recording.sequences or any(b.closed for b in recording.buffers):
                raise ClosedError("run: the recording, or a buffer that it uses, was closed; record it again")
            for sequence in recording.sequences:
                self._eval(sequence)

    def timings(self, recording: Recording) -> list[tuple[float, float]]:
        """See Runtime.timings. kp marks the end of every operation; the mark before a step is its begin."""
        with self._usable():
            assert isinstance(recording, KomputeRecording)
            if not recording.timed or not self.info.timestamp_period_ns:
                raise ArgumentError("timings: recorded without timestamps, or the device has none")
            tick = self.info.timestamp_period_ns * 1e-9
            marks = [s.get_timestamps() for s in recording.sequences]
            return [(marks[s][at - 1] * tick, marks[s][at] * tick) for s, at in recording.spans]

    def empty_submit(self) -> None:
        """Submit nothing and wait: the floor of a call's host time."""
        with self._usable():
            sequence = getattr(self, "_empty", None)
            if sequence is None:
                sequence = self._empty = self.manager.sequence()
            self._eval(sequence)

    def close(self) -> None:
        """See Runtime.close."""
        if not self._open or os.getpid() != self._pid:
            return
        with self._lock:
            self._open = False
            for recording in list(self._recordings):
                recording.close()
            for buffer in list(self._buffers):
                buffer.close()
            if self._owned:
                self.manager.destroy()
