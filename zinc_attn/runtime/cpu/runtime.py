"""The dispatcher on the host's own threads: a recording is a list of functions, and a buffer is an array."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from ...errors import (
    ArgumentError,
    ClosedError,
    ForkedProcessError,
    KernelError,
    RuntimeUnavailableError,
    ZincAttnError,
)
from ...kernels.declarations import KernelDecl
from ..protocol import DeviceInfo, Dispatch, Use, Words
from ..refusals import (
    check_nbytes,
    check_step,
    check_timed,
    closed_device,
    no_host_memory,
    no_room,
    output_words,
    write_words,
)
from ..registry import Registry
from .device import memory_bytes
from .library import Step, library, pool

_ALIGNMENT: Final = 64  # bytes: a line of a processor's cache
_LARGE: Final = 64 << 20  # bytes of a buffer for which the host is asked whether it has them
P = ParamSpec("P")
R = TypeVar("R")


class CpuBuffer:
    """A storage buffer of ``nbytes`` bytes. Closing it closes the recordings that use it."""

    def __init__(self, runtime: CpuRuntime, nbytes: int, use: Use) -> None:
        self.runtime, self.nbytes, self.use = runtime, nbytes, use
        room = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        first = -room.ctypes.data % _ALIGNMENT
        self.words: Words | None = room[first : first + nbytes].view(np.uint32)
        self.users: Registry[CpuRecording] = Registry()

    @property
    def closed(self) -> bool:
        """Whether its memory is gone."""
        return self.words is None

    def close(self) -> None:
        """Free it; a second call does nothing."""
        for recording in self.users:
            recording.close()
        self.words = None


class CpuKernel:
    """A function of the library with its specialization constants."""

    def __init__(self, decl: KernelDecl, address: int, spec: Sequence[int]) -> None:
        self.decl, self.address = decl, address
        self.spec = np.array([*decl.constants(spec), 0], np.uint32)


class CpuRecording:
    """Steps as the library takes them."""

    def __init__(self, runtime: CpuRuntime, steps: tuple[Dispatch, ...], timestamps: bool) -> None:
        self.runtime, self.timestamps, self.ran, self.closed = runtime, timestamps, False, False
        self._needed: list[object] = [steps]  # what the structs point to
        self.steps = (Step * len(steps))()
        for i, (step, struct) in enumerate(zip(steps, self.steps, strict=True)):
            if not isinstance(step.kernel, CpuKernel):
                raise ArgumentError(f"steps[{i}].kernel: got {step.kernel!r}, expected a kernel of this runtime")
            check_step(i, step, runtime.info)
            names = (f"steps[{i}].buffers {binding.name}" for binding in step.kernel.decl.bindings)
            buffers = [runtime.own_buffer(buffer, name) for buffer, name in zip(step.buffers, names, strict=True)]
            words = [buffer.words for buffer in buffers if buffer.words is not None]
            pointers = (ctypes.c_void_p * len(words))(*(array.ctypes.data for array in words))
            struct.kernel, struct.spec, struct.groups = step.kernel.address, step.kernel.spec.ctypes.data, step.groups
            struct.buffers = ctypes.addressof(pointers)
            self._needed += [pointers, words]
            for buffer in buffers:
                buffer.users.purge()
                buffer.users.add(self)

    def close(self) -> None:
        """Free it; a second call, or one in a forked child, does nothing."""
        if os.getpid() == self.runtime.pid:
            with self.runtime.lock:  # nothing runs that needs it
                self.closed = True
                self._needed.clear()


def entered(method: Callable[Concatenate[CpuRuntime, P], R]) -> Callable[Concatenate[CpuRuntime, P], R]:
    """Runs a method under the runtime's lock, in the process that made it, while it is open."""

    @functools.wraps(method)
    def entered(self: CpuRuntime, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if os.getpid() != self.pid:
            raise ForkedProcessError(f"{self.info.name}: opened before fork(); open a Device in the child process")
        with self.lock:
            if not self._open:
                raise closed_device(self.info)
            try:
                return method(self, *args, **kwargs)
            except MemoryError as error:
                if isinstance(error, ZincAttnError):
                    raise
                raise no_host_memory(self.info) from error

    return entered


class CpuRuntime:
    """The protocol's Runtime, which says what each method does, on the host's processor.

    ``info`` is ``cpu_info``'s. Errors at opening: see ``library``.
    """

    name = "cpu"

    def __init__(self, info: DeviceInfo) -> None:
        if info.refusal is not None:
            raise RuntimeUnavailableError(f"{info.name}: {info.refusal}")
        self.info, self.pid, self.lock = info, os.getpid(), threading.RLock()
        self._library = library()
        try:
            self._pool, self._open = pool(self.pid, info.compute_units), True
        except MemoryError as error:
            raise no_host_memory(info) from error

    def close(self) -> None:
        """Later calls raise ClosedError; a second call, or one in a forked child, does nothing."""
        if os.getpid() == self.pid:
            with self.lock:
                self._open = False

    @entered
    def buffer(self, nbytes: int, use: Use) -> CpuBuffer:
        nbytes = check_nbytes(nbytes, self.info)
        if nbytes >= _LARGE and nbytes > (free := memory_bytes()[1]):
            raise no_room(nbytes, free, self.info)
        return CpuBuffer(self, nbytes, use)

    @entered
    def write(self, buffer: object, data: Words, offset: int = 0) -> None:
        target = self.own_buffer(buffer)
        write_words(target, target.words if target.use in (Use.INPUT, Use.OUTPUT) else None, data, offset)

    @entered
    def read(self, buffer: object) -> Words:
        return self._output(buffer).copy()

    @entered
    def peek(self, buffer: object) -> Words:
        return self._output(buffer)

    def _output(self, buffer: object) -> Words:
        source = self.own_buffer(buffer)
        return output_words(source, source.words)

    def own_buffer(self, buffer: object, name: str = "buffer") -> CpuBuffer:
        """``buffer`` if it is an open buffer of this runtime, else a refusal."""
        if not isinstance(buffer, CpuBuffer) or buffer.runtime is not self:
            raise ArgumentError(f"{name}: got {buffer!r}, expected a buffer of this runtime")
        if buffer.closed:
            raise ClosedError(f"{name}: the {buffer.use.value} buffer of {buffer.nbytes} bytes was closed")
        return buffer

    @entered
    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> CpuKernel:
        module = decl.file.removesuffix(".spv")
        address = self._library.zinc_cpu_kernel(module.encode())
        if address is None:
            raise KernelError(f"kernel {decl.name}: the processor has none")
        return CpuKernel(decl, address, spec)

    @entered
    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> CpuRecording:
        return CpuRecording(self, tuple(steps), timestamps)

    @entered
    def run(self, recording: object) -> None:
        checked = self._own_recording(recording)
        checked.ran = False
        if self._library.zinc_cpu_run(self._pool, checked.steps, len(checked.steps)):
            raise no_host_memory(self.info)
        checked.ran = True

    @entered
    def start(self, *recordings: object) -> None:
        checked = [self._own_recording(recording) for recording in recordings]
        for recording in checked:
            self.run(recording)
            recording.ran = False

    def _own_recording(self, recording: object) -> CpuRecording:
        if not isinstance(recording, CpuRecording) or recording.runtime is not self:
            raise ArgumentError(f"recording: got {recording!r}, expected a recording of this runtime")
        if recording.closed:
            raise ClosedError("recording: it, or a buffer that it uses, was closed")
        return recording

    @entered
    def timings(self, recording: object) -> list[tuple[float, float]]:
        checked = self._own_recording(recording)
        check_timed(checked.timestamps, checked.ran)
        first = checked.steps[0].begin if len(checked.steps) else 0.0
        return [(step.begin - first, step.end - first) for step in checked.steps]
