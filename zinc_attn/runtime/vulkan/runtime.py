"""The dispatcher on plain Vulkan: every call enters here, under one lock.

One compute queue, one fence, one submission at a time. A call returns when the device has finished, and after ``start``
the next call waits for that, so what a submission wrote is there for the host and for the next submission.
"""

import os
from collections.abc import Sequence

from ...errors import ArgumentError, ClosedError, DeviceLostError, LimitError, ZincAttnError
from ...kernels.declarations import KernelDecl
from ..base import RuntimeBase, entered
from ..protocol import DeviceInfo, Dispatch, Kernel, Use
from ..refusals import check_compile_room, check_nbytes, check_step, check_timed, closed_device, no_host_memory
from .commands import BoundStep, Commands
from .device import HostDevice, LogicalDevice, Undo, destroy
from .handles import Handles, VulkanBuffer, VulkanRecording, close_collected, collected
from .memory import allocate_buffer
from .pipelines import Pipelines, VulkanKernel
from .queue import ComputeQueue

_QUERY_64_BIT, _QUERY_WAIT = 1, 2  # VkQueryResultFlagBits


class VulkanRuntime(RuntimeBase[VulkanBuffer, VulkanRecording]):
    """The protocol's Runtime, which documents the methods, on plain Vulkan 1.1 or later.

    ``info`` is one of ``devices.list_devices()``. Errors at opening: see ``LogicalDevice``.
    """

    name = "vulkan"
    buffer_type, recording_type = VulkanBuffer, VulkanRecording

    def __init__(self, info: DeviceInfo, host: HostDevice | None = None) -> None:
        close_collected()
        if info.refusal is not None:
            raise LimitError(f"device: {info.name} cannot attend: {info.refusal}; use another device")
        super().__init__(info)
        self._token = object()  # see ``Pipelines``
        self._warm: set[Kernel] = set()  # kernels that have run
        undo: Undo = []  # instance, device and all that lives as long as the runtime
        try:
            check_compile_room(info)
            self._device = LogicalDevice(info, undo, host)
            self.info = self._device.info
            self._queue = self._compute_queue()
            self._commands = self._recorder()
            self._pipelines = Pipelines(self._device, self._token)
            self._handles = Handles(self._device, self._queue, self.lock, self)  # last: from now on it is closed
        except BaseException as error:
            destroy(undo)
            if isinstance(error, MemoryError) and not isinstance(error, ZincAttnError):
                raise no_host_memory(info) from error
            raise

    def _compute_queue(self) -> ComputeQueue:
        return ComputeQueue(self._device)

    def _recorder(self) -> Commands:
        return Commands(self._device)

    def close(self) -> None:
        """Destroy everything made by this runtime; a second call, or one in a forked child, does nothing.

        After a failure it may be unknown whether the last submission has finished. ``close`` then waits in every way
        that Vulkan has, for SETTLE_S at most. Where nothing shows that it finished, its handles live until the process
        ends: a thread of the driver may still use them. A runtime that is dropped open is closed by the next call on
        another runtime, or by opening another.
        """
        if os.getpid() == self.pid:
            with self.lock:
                self._pipelines.forget()
                self._handles.close()

    def check_open(self) -> None:
        if self._handles.closed:
            raise closed_device(self.info)
        if self._device.host is not None and self._device.is_gone():
            raise ClosedError(f"{self.info.name}: used after its kp.Manager was destroyed; close the Device first")
        if self._queue.in_flight and not self._device.lost:
            self._queue.finish()
        if self._device.lost:
            raise DeviceLostError(f"{self.info.name} was lost earlier; open a new Device")
        if self._handles.dropped or collected:
            self._handles.purge()

    # --- buffers ------------------------------------------------------------------------------------------

    @entered
    def buffer(self, nbytes: int, use: Use) -> VulkanBuffer:
        nbytes = check_nbytes(nbytes, self.info)
        new_buffer = VulkanBuffer(self._handles, self, nbytes, use)
        with self._handles.making(new_buffer) as undo:
            new_buffer.handle, new_buffer.view = allocate_buffer(self._device, undo, nbytes, use)
        return new_buffer

    # --- kernels and recordings ---------------------------------------------------------------------------

    @entered
    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> VulkanKernel:
        return self._pipelines.kernel(decl, spirv, spec)

    @entered
    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> VulkanRecording:
        recording = VulkanRecording(self._handles, self, tuple(steps))
        with self._handles.making(recording) as undo:
            bound = [self._bound(i, step) for i, step in enumerate(steps)]
            if timestamps and not self.info.timestamp_period_ns:
                raise ArgumentError(f"timestamps: the compute queue of {self.info.name} has none")
            if timestamps and steps:
                recording.queries = self._commands.timestamps(undo, len(steps))
            recording.commands = self._commands.record(undo, bound, recording.queries)
        register(recording, bound)
        return recording

    def _bound(self, i: int, step: Dispatch) -> BoundStep:
        kernel = step.kernel
        if not isinstance(kernel, VulkanKernel) or kernel.owner is not self._token:
            raise ArgumentError(f"steps[{i}].kernel: got {kernel!r}, expected a kernel of this runtime")
        check_step(i, step, self.info)
        declared = zip(step.buffers, kernel.decl.bindings, strict=True)
        buffers = [self.own_buffer(b, f"steps[{i}].buffers {d.name}") for b, d in declared]
        return kernel, buffers, step.groups, step.independent

    # --- running ------------------------------------------------------------------------------------------

    @entered
    def run(self, recording: object) -> None:
        (started,) = self._start(recording)
        self._queue.finish()
        started.ran = True

    @entered
    def start(self, *recordings: object) -> None:
        if recordings:
            self._start(*recordings)

    def _start(self, *recordings: object) -> list[VulkanRecording]:
        checked = [self.own_recording(recording) for recording in recordings]
        for recording in checked:
            if recording.cold:
                self._check_cold(recording)
            recording.ran = False
        self._queue.start([recording.commands for recording in checked])
        return checked

    def _check_cold(self, recording: VulkanRecording) -> None:
        """Before a recording's first run, in which lavapipe compiles the kernels that have not run before."""
        if cold := {step.kernel for step in recording.steps} - self._warm:
            check_compile_room(self.info)
            self._warm |= cold
            self._queue.cold |= {kernel.decl.name for kernel in cold}
        recording.cold = False

    @entered
    def timings(self, recording: object) -> list[tuple[float, float]]:
        checked, device = self.own_recording(recording), self._device
        check_timed(checked.queries is not None, checked.ran)
        count = 2 * len(checked.steps)
        ticks = device.ffi.new("uint64_t[]", count)
        get, flags = device.lib.vkGetQueryPoolResults, _QUERY_64_BIT | _QUERY_WAIT
        result = get(device.handle, checked.queries, 0, count, 8 * count, ticks, 8, flags)
        device.check(result, "vkGetQueryPoolResults")
        mask = (1 << device.timestamp_bits) - 1  # the counter wraps at its width
        scale = self.info.timestamp_period_ns * 1e-9
        since = [((t - ticks[0]) & mask) * scale for t in ticks]
        return list(zip(since[::2], since[1::2], strict=True))


def register(recording: VulkanRecording, bound: Sequence[BoundStep]) -> None:
    """Let the buffers of a recording close it when they are closed."""
    for _, buffers, *_ in bound:
        for buffer in buffers:
            buffer.users.purge()
            buffer.users.add(recording)
