"""Steps as operations of kp sequences, over the pipelines and buffers of plain Vulkan; and a host program's queue."""

from collections.abc import Sequence
from typing import Any

from ..vulkan.commands import AT_THE_END, BEFORE_STEPS, BETWEEN_STEPS, BoundStep, Commands, waiting
from ..vulkan.device import LogicalDevice, Undo
from ..vulkan.queue import ComputeQueue
from .binding import typed


class KomputeCommands(Commands):
    """A recording is the VkSubmitInfo* of a kp.Sequence. manager: a kp.Manager over the device."""

    def __init__(self, device: LogicalDevice, kp: Any, manager: Any) -> None:
        super().__init__(device)
        self._kp, self._ours, self._manager = kp, kp.zinc_attn, manager

    def record(self, undo: Undo, steps: Sequence[BoundStep], queries: Any = None) -> Any:
        with typed(self._device.check):
            sequence = self._ours.sequence(self._manager)
            undo.append(sequence.destroy)
            if queries is not None:
                sequence.record(self._ours.OpResetTimestamps(self._number(queries), 2 * len(steps)))
            self._steps(sequence, undo, steps, 0 if queries is None else self._number(queries))
            commands = self._device.ffi.cast("VkCommandBuffer", self._ours.commands(sequence))
        table = self._device.vk.array("VkCommandBuffer", [commands])
        return self._device.vk.struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=table)

    def record_into(self, sequence: Any, undo: Undo, steps: Sequence[BoundStep], out: Any) -> Any:
        """Record ``steps`` at the end of a host's kp.Sequence, and then the copy of a kp tensor ``out`` to the host.

        The kp.zinc_attn.OpGuard that is returned lets the sequence be evaluated.
        """
        guard = self._ours.OpGuard()
        with typed(self._device.check):
            sequence.record(guard)
            sequence.record(self._ours.OpBarrier(*BEFORE_STEPS))
            self._steps(sequence, undo, steps, 0)
            sequence.record(self._kp.OpTensorSyncLocal([out]))
        return guard

    def _steps(self, sequence: Any, undo: Undo, steps: Sequence[BoundStep], queries: int) -> None:
        sets = self.descriptor_sets(undo, steps)
        for i, (waits, (kernel, _, groups, _)) in enumerate(zip(waiting(steps), steps, strict=True)):
            if waits:
                sequence.record(self._ours.OpBarrier(*BETWEEN_STEPS))
            handles = (self._number(handle) for handle in (kernel.pipeline, kernel.layout, sets[i]))
            sequence.record(self._ours.OpDispatch(*handles, groups, queries, 2 * i))
        sequence.record(self._ours.OpBarrier(*AT_THE_END))

    def _number(self, handle: Any) -> int:
        return int(self._device.ffi.cast("uintptr_t", handle))


class HostQueue(ComputeQueue):
    """A host program's queue. Its threads share the queue, and wait for each other by Python's lock."""

    def __init__(self, device: LogicalDevice, kp: Any) -> None:
        super().__init__(device)
        self._ours = kp.zinc_attn

    def send(self, recordings: Sequence[Any], fence: Any) -> int:
        handles = self._device.queue, *(recording.pCommandBuffers[0] for recording in recordings), fence
        queue, *commands, signaled = (int(self._device.ffi.cast("uintptr_t", handle)) for handle in handles)
        return int(self._ours.submit(queue, commands, signaled))
