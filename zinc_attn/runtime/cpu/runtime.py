"""The dispatcher on the host's own threads: a recording is a list of functions, and a buffer is an array."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

import numpy as np

from ...errors import ArgumentError, KernelError, RuntimeUnavailableError
from ...kernels.declarations import KernelDecl
from ...kernels.records import Words
from ..base import RuntimeBase, entered
from ..protocol import DeviceInfo, Dispatch, Use
from ..refusals import check_nbytes, check_step, check_timed, closed_device, no_host_memory, no_room
from ..registry import Registry
from .device import memory_bytes
from .library import Step, library, pool

_ALIGNMENT: Final = 64  # bytes: a line of a processor's cache
_LARGE: Final = 64 << 20  # bytes of a buffer for which the host is asked whether it has them


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

    @property
    def view(self) -> Words | None:
        """The words, if the host reads or writes them."""
        return self.words if self.use in (Use.INPUT, Use.OUTPUT) else None

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
    """Steps in the structs of the library."""

    def __init__(self, runtime: CpuRuntime, steps: tuple[Dispatch, ...], timestamps: bool) -> None:
        self.runtime, self.timestamps, self.ran, self.closed = runtime, timestamps, False, False
        self._needed: list[object] = [steps]  # objects that the structs point to
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


class CpuRuntime(RuntimeBase[CpuBuffer, CpuRecording]):
    """The protocol's Runtime, which documents the methods, on the host's processor.

    ``info`` is ``cpu_info``'s. Errors at opening: see ``library``.
    """

    name = "cpu"
    buffer_type, recording_type = CpuBuffer, CpuRecording

    def __init__(self, info: DeviceInfo) -> None:
        if info.refusal is not None:
            raise RuntimeUnavailableError(f"{info.name}: {info.refusal}")
        super().__init__(info)
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

    def check_open(self) -> None:
        if not self._open:
            raise closed_device(self.info)

    @entered
    def buffer(self, nbytes: int, use: Use) -> CpuBuffer:
        nbytes = check_nbytes(nbytes, self.info)
        if nbytes >= _LARGE and nbytes > (free := memory_bytes()[1]):
            raise no_room(nbytes, free, self.info)
        return CpuBuffer(self, nbytes, use)

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
        checked = self.own_recording(recording)
        checked.ran = False
        if self._library.zinc_cpu_run(self._pool, checked.steps, len(checked.steps)):
            raise no_host_memory(self.info)
        checked.ran = True

    @entered
    def start(self, *recordings: object) -> None:
        checked = [self.own_recording(recording) for recording in recordings]
        for recording in checked:
            self.run(recording)
            recording.ran = False

    @entered
    def timings(self, recording: object) -> list[tuple[float, float]]:
        checked = self.own_recording(recording)
        check_timed(checked.timestamps, checked.ran)
        first = checked.steps[0].begin if len(checked.steps) else 0.0
        return [(step.begin - first, step.end - first) for step in checked.steps]
