"""The Kompute dispatcher: the only importer of ``kp``.

Kompute's binding has no barrier between two dispatches. Where a step reads what an earlier step wrote, the buffer in
between decides how the two are ordered: a small SCRATCH buffer has a staging twin, and copying it to the host
between the steps records the barriers that are needed; a large one has none, and the steps go into two submissions.

Kompute as published ignores most of Vulkan's errors. The build of scripts/build_kp.sh raises them, and no other is
used. A submission or a wait that failed loses the device. kp's destructors free what the device may still use, so where
nothing shows that the last submission finished, and in a forked child, kp's objects are kept for good.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from ..errors import (
    ArgumentError,
    ClosedError,
    DeviceLostError,
    RuntimeUnavailableError,
    ZincAttnError,
)
from ..kernels.declarations import KernelDecl
from .devices import memory_budget
from .loader import loader
from .protocol import Buffer, DeviceInfo, Dispatch, Recording, Use, Words
from .refusals import (
    after_close,
    after_fork,
    check_buffer_room,
    check_compile_room,
    check_nbytes,
    check_step,
    no_host_memory,
    no_room,
    was_lost,
)

CHAINED_BYTES: Final = 512 * 1024  # SCRATCH up to here has a staging twin: its copy costs less than a submission
_MAX_TENSOR_BYTES: Final = (1 << 32) - 4  # kp counts bytes in 32 bits and wraps silently


SETTLE_S: Final = 2.0  # how long a failed submission is waited for
_WAIT_NS: Final = 100_000_000  # one wait of these; kp takes 32 bits
_DEVICE_LOST: Final = -4  # VK_ERROR_DEVICE_LOST
_RESULT: Final = re.compile(r"zinc_attn: (vk\w+): VkResult (-?\d+)")  # scripts/lib/kp_checked.hpp writes it


def load_kp() -> Any:
    """The ``kp`` module. RuntimeUnavailableError where it is not installed, or is a build that hides errors."""
    try:
        import kp
    except ImportError as error:
        raise RuntimeUnavailableError(
            "runtime 'kompute' needs the package kp, which is not installed; build it with scripts/build_kp.sh from a "
            "clone of the repository, or use runtime='vulkan'"
        ) from error
    if not getattr(kp, "results_are_checked", False):
        raise RuntimeUnavailableError(
            "runtime 'kompute': the installed kp ignores Vulkan's errors, so a failed wait would give wrong results "
            "without an error; build kp with scripts/build_kp.sh from a clone of the repository, which makes it raise "
            "them, or use runtime='vulkan'"
        )
    return kp


class _Lifetime:
    """Whether kp objects may be destroyed: not in a forked child, nor while the device may use them."""

    kept = False


class KomputeBuffer:
    """A kp tensor of uint32. ``view`` is its host memory; SCRATCH that is large has none."""

    def __init__(self, runtime: KomputeRuntime, nbytes: int, use: Use, chained: bool | None = None) -> None:
        kp = runtime.kp
        self.nbytes, self.use = nbytes, use
        self._lifetime = runtime.lifetime
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
            if not self._lifetime.kept:
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

    def __init__(self, lifetime: _Lifetime, buffers: tuple[KomputeBuffer, ...], timed: bool) -> None:
        self.lifetime, self.buffers, self.timed = lifetime, buffers, timed
        self.sequences: list[Any] = []
        self.algorithms: list[Any] = []
        self.spans: list[tuple[int, int]] = []
        self.cold = True  # until its first run

    def close(self) -> None:
        """Free the command buffers and pipelines."""
        if not self.lifetime.kept:
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
        self.lifetime = _Lifetime()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._open = True
        # weak: what the program drops, kp frees
        self._buffers: weakref.WeakSet[KomputeBuffer] = weakref.WeakSet()
        self._recordings: weakref.WeakSet[KomputeRecording] = weakref.WeakSet()
        self._sequences: list[Any] = []  # those of no recording
        self._empty: Any = None
        self._lost = False
        self._owned = manager is None
        self.manager = manager
        with self._usable():
            check_compile_room(info)  # a CPU driver makes its first code when the device is created
            loader().keep_drivers_loaded()
            if self._owned:
                self.manager = self.kp.Manager(info.index)
        _runtimes.add(self)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Every kp call is made within: under the lock, on an open device, with kp's exceptions made typed ones."""
        if os.getpid() != self._pid:
            raise after_fork(self.info)
        with self._lock:
            if not self._open:
                raise after_close(self.info)
            if self._lost:
                raise was_lost(self.info)
            try:
                yield
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, ZincAttnError):
                    raise
                raise self._typed(error) from error

    def _typed(self, error: Exception) -> ZincAttnError:
        """The typed error of an exception that kp or NumPy raised."""
        if found := _RESULT.search(str(error)):
            typed = loader().error(int(found[2]), f"{found[1]} on {self.info.name}")
            self._lost = self._lost or isinstance(typed, DeviceLostError)
            return typed
        if isinstance(error, MemoryError):
            return no_host_memory(self.info)
        return ZincAttnError(f"Kompute on {self.info.name}: {error}")

    def _eval(self, sequence: Any) -> None:
        """Evaluate a kp.Sequence. A failure loses the device: the submission may still run."""
        try:
            sequence.eval()
        except BaseException:
            self._lost = True
            if not self._has_finished(sequence):
                self._keep(sequence)
            raise

    def _has_finished(self, sequence: Any) -> bool:
        """Whether something shows, within SETTLE_S, that nothing of what was submitted runs.

        Asked are the sequence's own fence and that of one more submission, which signals after all earlier ones.
        """
        waits, end, result = [sequence], time.monotonic() + SETTLE_S, 0
        while time.monotonic() < end:
            for wait in waits:
                try:
                    wait.eval_await(_WAIT_NS)
                    return True
                except RuntimeError as error:
                    found = _RESULT.search(str(error))
                    result = int(found[2]) if found else 0
            if len(waits) == 1:
                try:
                    tensor = self.manager.tensor_t(np.zeros(1, np.uint32), self.kp.TensorTypes.device)
                    probe = self.manager.sequence()
                    self._sequences.append(probe)
                    probe.eval_async(self.kp.OpTensorSyncDevice([tensor]))
                    waits.append(probe)
                except (RuntimeError, MemoryError):
                    pass
            time.sleep(0.01)  # a wait that fails returns at once
        # The specification: what is in use on a lost device is in use no more once a wait has returned this.
        return result == _DEVICE_LOST

    def _keep(self, *more: Any) -> None:
        """Keep all kp objects for good: their destructors would free what a driver's thread may still use."""
        if self.lifetime.kept:
            return
        self.lifetime.kept = True
        kept = [self.manager, *more, *self._sequences, *(b.tensor for b in self._buffers)]
        for recording in self._recordings:
            kept += [*recording.sequences, *recording.algorithms, *(b.tensor for b in recording.buffers)]
        for item in kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))

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
            check_buffer_room(self.info, (twins + 1) * nbytes)  # and kp's array on the host
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
                self._sequences.append(sequence)
                try:
                    self._eval(sequence.record(self.kp.OpTensorSyncDevice([buffer.tensor])))
                finally:
                    self._sequences.remove(sequence)
                    if not self.lifetime.kept:
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
            check_compile_room(self.info)
            tensors = {id(b): b for step in steps for b in step.buffers}
            buffers = tuple(b for b in tensors.values() if isinstance(b, KomputeBuffer))
            made = KomputeRecording(self.lifetime, buffers, timestamps)
            self._recordings.add(made)
            try:
                self._fill(made, steps, into)
            except BaseException:
                made.close()
                raise
            return made

    def _fill(self, made: KomputeRecording, steps: Sequence[Dispatch], into: Any) -> None:
        kp, buffers, algorithms = self.kp, made.buffers, made.algorithms
        inputs = [b.tensor for b in buffers if b.use is Use.INPUT]
        outputs = [b.tensor for b in buffers if b.use is Use.OUTPUT]
        marks = 2 * len(steps) + 4 if made.timed else 0
        sequences, position = made.sequences if into is None else [into], 0
        if into is None:
            sequences.append(self.manager.sequence(0, marks))
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
                    raise ArgumentError(f"steps[{at}]: needs a submission of its own, expected one sequence for all")
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
            made.spans.append((len(sequences) - 1, position))
            pending |= writes
            read |= {id(b) for b, binding in declared if binding.access == "read"}
            synced = synced and not any(b.use is Use.OUTPUT and id(b) in writes for b in buffers)
        if outputs and not synced:
            add(kp.OpTensorSyncLocal(outputs))

    def run(self, recording: Recording) -> None:
        """See Runtime.run."""
        with self._usable():
            assert isinstance(recording, KomputeRecording)
            if not recording.sequences or any(b.closed for b in recording.buffers):
                raise ClosedError("run: the recording, or a buffer that it uses, was closed; record it again")
            if recording.cold:  # lavapipe compiles at a pipeline's first run
                check_compile_room(self.info)
                recording.cold = False
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
            if self._empty is None:
                self._empty = self.manager.sequence()
                self._sequences.append(self._empty)
            self._eval(self._empty)

    def close(self) -> None:
        """Destroy everything made by this runtime, unless it may be in use (see the module); later calls refuse."""
        if not self._open or os.getpid() != self._pid:
            return
        with self._lock:
            self._open = False
            for recording in list(self._recordings):
                recording.close()
            for buffer in list(self._buffers):
                buffer.close()
            if not self.lifetime.kept:
                for sequence in self._sequences:
                    sequence.destroy()
                if self._owned:
                    self.manager.destroy()


# For a forked child: kp's destructors wait for threads of the driver, which fork() does not copy.
_runtimes: Final[weakref.WeakSet[KomputeRuntime]] = weakref.WeakSet()


def _keep_in_child() -> None:
    for runtime in list(_runtimes):
        runtime._keep()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_keep_in_child)
