"""Command buffers: what they record, with the descriptor sets and barriers that the steps need."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from .device import LogicalDevice, Undo
from .handles import VulkanBuffer
from .pipelines import STORAGE_DESCRIPTOR, VulkanKernel

# A step of this runtime, checked: kernel, buffers, groups, and Dispatch's ``independent``.
BoundStep = tuple[VulkanKernel, list[VulkanBuffer], tuple[int, int, int], bool]

_RESET_COMMAND_BUFFER: Final = 2  # VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
_TIMESTAMP_QUERY: Final = 2  # VK_QUERY_TYPE_TIMESTAMP
_COMPUTE_BIND: Final = 1  # VK_PIPELINE_BIND_POINT_COMPUTE
_TOP, _COMPUTE, _TRANSFER, _BOTTOM, _HOST = 0x1, 0x800, 0x1000, 0x2000, 0x4000  # VkPipelineStageFlagBits
_SHADER_READ, _SHADER_WRITE, _TRANSFER_READ, _TRANSFER_WRITE, _HOST_READ = 0x20, 0x40, 0x800, 0x1000, 0x2000


class Barrier(NamedTuple):
    """A memory barrier: writes by stages ``source`` and ``writes`` are visible to stages ``later`` by ``access``."""

    source: int
    writes: int
    later: int
    access: int


_SHADER: Final = _SHADER_READ | _SHADER_WRITE
_LATER: Final = _COMPUTE | _TRANSFER | _HOST
BETWEEN_STEPS: Final = Barrier(_COMPUTE, _SHADER_WRITE, _COMPUTE, _SHADER)
# Before steps in a host program's sequence: its own dispatches, and copies to tensors.
BEFORE_STEPS: Final = Barrier(_COMPUTE | _TRANSFER, _SHADER_WRITE | _TRANSFER_WRITE, _COMPUTE, _SHADER)
# For the host and for all later submissions, since the second scope does not end with this submission.
AT_THE_END: Final = Barrier(_COMPUTE, _SHADER_WRITE, _LATER, _SHADER | _TRANSFER_READ | _TRANSFER_WRITE | _HOST_READ)


class Access(NamedTuple):
    """Bytes of a buffer that a command reads or writes."""

    buffer: Hashable
    begin: int
    end: int
    written: bool

    def meets(self, other: Access) -> bool:
        """Whether both have a byte that one of them writes."""
        apart = self.buffer != other.buffer or self.end <= other.begin or other.end <= self.begin
        return not apart and (self.written or other.written)


def levels(commands: Iterable[tuple[Sequence[Access], bool]], in_order: bool = True) -> Iterator[int]:
    """The level of each command, (accesses, ``independent``), as ``za_level`` of native/src/levels.h computes it.

    in_order: no command is in a lower level than the one before it.
    """
    known, last, before = list[tuple[Access, int]](), 0, 0
    for accesses, independent in commands:
        before = before if independent else len(known)  # the commands before the last one that is not independent
        level = last if in_order or independent else 0
        needed = (number for other, number in known[:before] if any(access.meets(other) for access in accesses))
        level = max([level, *(number + 1 for number in needed)])
        if in_order and level > last:
            known, before = [], 0  # all later commands wait for these anyway
        known += [(access, level) for access in accesses]
        last = level
        yield level


def waiting(steps: Sequence[BoundStep]) -> Iterator[bool]:
    """Whether a barrier comes before each step. A step accesses whole buffers."""
    commands, last = list[tuple[list[Access], bool]](), 0
    for kernel, buffers, _, independent in steps:
        bound = zip(buffers, kernel.decl.bindings, strict=True)
        commands.append(([Access(x, 0, x.nbytes, binding.access == "write") for x, binding in bound], independent))
    for level in levels(commands):
        yield level > last
        last = level


class Commands:
    """The command pool of a device, and what is recorded into its command buffers.

    A recording is what a queue's ``send`` takes: the VkSubmitInfo* of a command buffer.
    """

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        pool = device.vk.struct("VkCommandPoolCreateInfo", flags=_RESET_COMMAND_BUFFER, queueFamilyIndex=device.family)
        self._pool = device.create(device.undo, "CommandPool", pool)

    def allocate(self, undo: Undo) -> tuple[Any, Any]:
        """(VkCommandBuffer, the VkSubmitInfo* that submits it)."""
        device, vk, lib = self._device, self._device.vk, self._device.lib
        request = vk.struct("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        handles = device.ffi.new("VkCommandBuffer[]", 1)
        device.check(lib.vkAllocateCommandBuffers(device.handle, request, handles), "vkAllocateCommandBuffers")
        undo.append(functools.partial(lib.vkFreeCommandBuffers, device.handle, self._pool, 1, handles))
        return handles[0], vk.struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=handles)

    def timestamps(self, undo: Undo, steps: int) -> Any:
        """A query pool with a begin and an end for each of ``steps`` steps."""
        create = self._device.vk.struct("VkQueryPoolCreateInfo", queryType=_TIMESTAMP_QUERY, queryCount=2 * steps)
        return self._device.create(undo, "QueryPool", create)

    def record(self, undo: Undo, steps: Sequence[BoundStep], queries: Any = None) -> Any:
        """A recording of ``steps`` in order, with a barrier before each step that depends on an earlier one.

        queries: from ``timestamps``, or None.
        """
        lib, null = self._device.lib, self._device.null
        command, submit = self.allocate(undo)
        sets = self.descriptor_sets(undo, steps)
        self._begin(command)
        if queries is not None:
            lib.vkCmdResetQueryPool(command, queries, 0, 2 * len(steps))
        for i, (waits, (kernel, _, groups, _)) in enumerate(zip(waiting(steps), steps, strict=True)):
            if waits:
                self._barrier(command, BETWEEN_STEPS)
            bind = self._device.vk.array("VkDescriptorSet", [sets[i]])
            lib.vkCmdBindPipeline(command, _COMPUTE_BIND, kernel.pipeline)
            lib.vkCmdBindDescriptorSets(command, _COMPUTE_BIND, kernel.layout, 0, 1, bind, 0, null)
            if queries is not None:
                lib.vkCmdWriteTimestamp(command, _TOP, queries, 2 * i)
            lib.vkCmdDispatch(command, *groups)
            if queries is not None:
                lib.vkCmdWriteTimestamp(command, _BOTTOM, queries, 2 * i + 1)
        self._barrier(command, AT_THE_END)
        self._device.check(self._device.lib.vkEndCommandBuffer(command), "vkEndCommandBuffer")
        return submit

    def _barrier(self, command: Any, barrier: Barrier) -> None:
        source, writes, later, access = barrier
        memory = self._device.vk.struct("VkMemoryBarrier", srcAccessMask=writes, dstAccessMask=access)
        null = self._device.null
        self._device.lib.vkCmdPipelineBarrier(command, source, later, 0, 1, memory, 0, null, 0, null)

    def descriptor_sets(self, undo: Undo, steps: Sequence[BoundStep]) -> Any:
        """A VkDescriptorSet of each step's buffers."""
        if not steps:
            return []
        device, vk, count = self._device, self._device.vk, len(steps)
        total = max(1, sum(len(buffers) for _, buffers, *_ in steps))
        size = vk.struct("VkDescriptorPoolSize", type=STORAGE_DESCRIPTOR, descriptorCount=total)
        create = vk.struct("VkDescriptorPoolCreateInfo", maxSets=count, poolSizeCount=1, pPoolSizes=size)
        pool = device.create(undo, "DescriptorPool", create)
        layouts = vk.array("VkDescriptorSetLayout", [kernel.set_layout for kernel, *_ in steps])
        request = vk.struct(
            "VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=count, pSetLayouts=layouts
        )
        sets = device.ffi.new("VkDescriptorSet[]", count)
        result = device.lib.vkAllocateDescriptorSets(device.handle, request, sets)
        device.check(result, "vkAllocateDescriptorSets")
        writes = []
        for i, (_, buffers, *_) in enumerate(steps):
            parts = [vk.struct("VkDescriptorBufferInfo", buffer=b.handle, range=b.nbytes) for b in buffers]
            if parts:  # one write fills consecutive bindings
                write = vk.struct(
                    "VkWriteDescriptorSet",
                    dstSet=sets[i],
                    descriptorCount=len(parts),
                    descriptorType=STORAGE_DESCRIPTOR,
                    pBufferInfo=vk.array("VkDescriptorBufferInfo", parts),
                )
                writes.append(write)
        table = vk.array("VkWriteDescriptorSet", writes)
        device.lib.vkUpdateDescriptorSets(device.handle, len(writes), table, 0, device.null)
        return sets

    def _begin(self, command: Any) -> None:
        begin = self._device.vk.struct("VkCommandBufferBeginInfo")
        self._device.check(self._device.lib.vkBeginCommandBuffer(command, begin), "vkBeginCommandBuffer")
