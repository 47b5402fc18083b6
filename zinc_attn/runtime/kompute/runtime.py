"""A ``Runtime`` over one kp.Manager.

A submission or a wait that failed loses the device: kp cannot make its fence new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import numpy as np

from ...errors import ArgumentError, ClosedError, DeviceLostError, RuntimeUnavailableError, ZincAttnError
from ...kernels.declarations import KernelDecl
from ..devices import memory_budget
from ..loader import loader
from ..protocol import Buffer, DeviceInfo, Dispatch, Recording, Use, Words
from ..refusals import (
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
from ..registry import Registry
from .buffers import MAX_TENSOR_BYTES, HostTensor, KomputeBuffer, is_staged
from .lifetime import Lifetime, has_finished, vulkan_error
from .recording import KomputeKernel, KomputeRecording, StepRecorder


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


class KomputeRuntime:
    """Runtime over one kp.Manager. ``info`` comes from ``devices.list_devices``; kp uses the same device order.

    ``manager``: one that a host program owns, on the same device; it is used and not destroyed.
    """

    name = "kompute"
    has_matrix_units = False  # kp enables no extension of a device
    orders_cache_writes = False  # kp records a barrier neither between two dispatches nor for ``storage`` tensors

    def __init__(self, info: DeviceInfo, manager: Any = None) -> None:
        self.kp = load_kp()
        self.info = info.with_own_subgroups()  # kp cannot ask for a size
        self.lifetime = Lifetime()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._open = True
        # weak: what the program drops, kp frees
        self._buffers: Registry[KomputeBuffer] = Registry()
        self._recordings: Registry[KomputeRecording] = Registry()
        self._sequences: list[Any] = []  # those of no recording
        self._empty: Any = None
        self._lost = False
        self._evaluated: Any = None  # a sequence of which it is not known yet that it has ended
        self._owned = manager is None
        self.manager = manager
        with self._usable():
            check_compile_room(info)  # a CPU driver makes its first code when the device is created
            loader().keep_drivers_loaded()
            if self._owned:
                self.manager = self.kp.Manager(info.index)
        _runtimes.purge()
        _runtimes.add(self)

    @property
    def times_every_run(self) -> bool:
        """kp never resets its queries, which the drivers of CPUs alone allow."""
        return self.info.kind == "cpu"

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Every kp call is made within: under the lock, on an open device, with kp's exceptions made typed ones."""
        if os.getpid() != self._pid:
            raise after_fork(self.info)
        with self._lock:
            if not self._open:
                raise after_close(self.info)
            self._settle()
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
        if found := vulkan_error(error):
            function, result = found
            typed = loader().error(result, f"{function} on {self.info.name}")
            self._lost = self._lost or isinstance(typed, DeviceLostError)
            return typed
        if isinstance(error, MemoryError):
            return no_host_memory(self.info)
        return ZincAttnError(f"Kompute on {self.info.name}: {error}")

    def _eval(self, sequence: Any) -> None:
        """Evaluate a kp.Sequence. A failure loses the device: the submission may still run.

        Ctrl-C is no failure: Python raises it before kp is called or after kp has returned, and ``_settle`` sees which.
        """
        self._evaluated = sequence
        try:
            sequence.eval()
        except Exception:
            self._lose(sequence)
            raise
        self._evaluated = None

    def _settle(self) -> None:
        """After an interrupt: whether the sequence that was evaluated is at its end. A failure leaves it running."""
        if (sequence := self._evaluated) is not None:
            if sequence.is_running():
                self._lose(sequence)
            self._evaluated = None

    def _lose(self, sequence: Any) -> None:
        """Use the device no more, and keep kp's objects unless something shows that ``sequence`` has finished."""
        self._lost = True
        finished = False
        try:
            finished = has_finished(sequence, self._probe)
        finally:
            if not finished:
                self._keep(sequence)
            self._evaluated = None

    def _probe(self) -> Any:
        """Submit the copy of one word, and return its sequence, which runs."""
        tensor = self.manager.tensor_t(np.zeros(1, np.uint32), self.kp.TensorTypes.device)
        sequence = self.manager.sequence()
        self._sequences.append(sequence)
        sequence.eval_async(self.kp.OpTensorSyncDevice([tensor]))
        return sequence

    def _keep(self, *more: Any) -> None:
        """Keep all kp objects for good: their destructors would free what a driver's thread may still use."""
        self.lifetime.keep(chain([self.manager, *more, *self._sequences], self._kp_objects()))

    def _kp_objects(self) -> Iterator[Any]:
        """The kp objects of all buffers and recordings."""
        for buffer in self._buffers:
            yield buffer.tensor
        for recording in self._recordings:
            yield from (*recording.sequences, *recording.algorithms, *(b.tensor for b in recording.buffers))

    def buffer(self, nbytes: int, use: Use, chained: bool = False) -> KomputeBuffer:
        """See Runtime.buffer. Memory is checked against the driver's budget before kp is called.

        chained: give a SCRATCH buffer the staging twin that orders steps of one sequence, whatever its size.
        """
        with self._usable():
            nbytes = check_nbytes(nbytes, self.info, min(self.info.max_buffer_bytes, MAX_TENSOR_BYTES))
            _, free = memory_budget(self.info.index)
            staged = is_staged(nbytes, use, chained)
            twins = 2 if staged else 1
            if nbytes * twins > free:
                raise no_room(nbytes * twins, free, self.info)
            check_buffer_room(self.info, (twins + 1) * nbytes)  # and kp's array on the host
            made = KomputeBuffer(self.kp, self.manager, self.lifetime, nbytes, use, staged)
            self._buffers.purge()
            self._buffers.add(made)
            return made

    def write(self, buffer: Buffer, data: Words, offset: int = 0) -> None:
        """See Runtime.write."""
        with self._usable():
            tensor, view = self._staged("write", buffer)
            view[offset : offset + data.size] = data
            if buffer.use in (Use.DATA, Use.OUTPUT):
                sequence = self.manager.sequence()
                self._sequences.append(sequence)
                try:
                    self._eval(sequence.record(self.kp.OpTensorSyncDevice([tensor])))
                finally:
                    self._settle()
                    self._sequences.remove(sequence)
                    if not self.lifetime.kept:
                        sequence.destroy()

    def read(self, buffer: Buffer) -> Words:
        """See Runtime.read."""
        with self._usable():
            return self._staged("read", buffer)[1].copy()

    def peek(self, buffer: Buffer) -> Words:
        """See Runtime.peek."""
        with self._usable():
            return self._staged("read", buffer)[1]

    @staticmethod
    def _staged(what: str, buffer: Buffer) -> tuple[Any, Words]:
        """The tensor of a buffer and its host memory; a ClosedError names the call ``what``."""
        assert isinstance(buffer, KomputeBuffer)
        if buffer.closed or buffer.view is None:
            raise ClosedError(f"{what}: got a {buffer.use.value} buffer without host memory, expected an open one")
        return buffer.tensor, buffer.view

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
        """Record ``steps`` behind what a host's kp.Sequence holds; the host evaluates it. Closing frees its algorithms.

        INPUT buffers are uploaded, and OUTPUT buffers copied to the host, each time the sequence is evaluated.
        """
        return self._record(steps, False, sequence)

    def _record(self, steps: Sequence[Dispatch], timestamps: bool, into: Any) -> KomputeRecording:
        with self._usable():
            check_compile_room(self.info)
            for at, step in enumerate(steps):
                check_step(at, step, self.info)
            tensors = {id(b): b for step in steps for b in step.buffers}
            buffers = tuple(b for b in tensors.values() if isinstance(b, KomputeBuffer))
            made = KomputeRecording(self.lifetime, buffers, timestamps)
            self._recordings.purge()
            self._recordings.add(made)
            try:
                StepRecorder(self.kp, self.manager, made, into).record(steps)
                if not steps and into is None:
                    made.sequences[0].record(self._no_operation())
            except BaseException:
                made.close()
                raise
            return made

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

    def start(self, *recordings: Recording) -> None:
        """Run to the end: kp's eval waits, and its eval_async cannot be made again without a new recording."""
        for recording in recordings:
            self.run(recording)

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
        """Submit an empty command buffer and wait: the floor of a call's host time."""
        with self._usable():
            if self._empty is None:
                nothing, sequence = self._no_operation(), self.manager.sequence()
                self._sequences.append(sequence)
                self._empty = sequence.record(nothing)
            self._eval(self._empty)

    def _no_operation(self) -> Any:
        """An operation that records no command: the upload of a tensor that has no staging twin.

        kp begins a command buffer at its first operation, and one that was never begun must not be submitted.
        """
        return self.kp.OpTensorSyncDevice([self.buffer(4, Use.CACHE).tensor])

    def close(self) -> None:
        """Destroy everything made by this runtime, unless it may be in use (see the module); later calls refuse."""
        if not self._open or os.getpid() != self._pid:
            return
        with self._lock:
            self._settle()
            self._open = False
            for recording in self._recordings:
                recording.close()
            for buffer in self._buffers:
                buffer.close()
            if not self.lifetime.kept:
                for sequence in self._sequences:
                    sequence.destroy()
                if self._owned:
                    self.manager.destroy()


# For a forked child: kp's destructors wait for threads of the driver, which fork() does not copy.
_runtimes: Final[Registry[KomputeRuntime]] = Registry()


def _keep_in_child() -> None:
    for runtime in _runtimes:
        runtime._keep()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_keep_in_child)
