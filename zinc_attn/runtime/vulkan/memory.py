"""The memory of a buffer: by its use, in the first fitting memory type that has room."""

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.records import Words
from ..loader import Heap
from ..protocol import Use
from ..refusals import check_memory_room, no_room
from .device import LogicalDevice, Undo

_OUT_OF_DEVICE_MEMORY: Final = -2  # VK_ERROR_OUT_OF_DEVICE_MEMORY
_WHOLE_SIZE: Final = (1 << 64) - 1
_LOCAL, _VISIBLE, _COHERENT, _CACHED = 1, 2, 4, 8  # VkMemoryPropertyFlagBits; other bits make a type unfit
_MAPPED: Final = _VISIBLE | _COHERENT
_STORAGE: Final = 0x20  # VK_BUFFER_USAGE_STORAGE_BUFFER_BIT


class Wish(NamedTuple):
    """A kind of memory: its flags, and whether only the largest device-local heap will do."""

    flags: int
    only_main: bool


# Best first. A buffer is mapped where the wish says _VISIBLE.
_WISHES: Final[dict[Use, tuple[Wish, ...]]] = {
    Use.INPUT: (Wish(_LOCAL | _MAPPED, False), Wish(_MAPPED, False)),
    Use.OUTPUT: (Wish(_MAPPED | _CACHED, False), Wish(_MAPPED, False)),
    Use.SCRATCH: (Wish(_LOCAL, True), Wish(_LOCAL, False)),
    Use.CACHE: (Wish(_LOCAL, True), Wish(_LOCAL, False)),
}


def allocate_buffer(device: LogicalDevice, undo: Undo, nbytes: int, use: Use) -> tuple[Any, Words | None]:
    """(VkBuffer, its mapped words or None) of a storage buffer."""
    check_memory_room(device.info, nbytes)
    vk, ffi, lib = device.vk, device.ffi, device.lib
    handle = device.create(undo, "Buffer", vk.struct("VkBufferCreateInfo", size=nbytes, usage=_STORAGE))
    need = ffi.new("VkMemoryRequirements*")
    lib.vkGetBufferMemoryRequirements(device.handle, handle, need)
    heaps = vk.heaps(device.physical, device.has_budget)
    most_free = 0
    for index, heap, flags in _memory_types(device, need.memoryTypeBits, _WISHES[use], heaps):
        most_free = max(most_free, heap.free)
        if need.size > heap.free:
            continue
        memory = ffi.new("VkDeviceMemory*")
        request = vk.struct("VkMemoryAllocateInfo", allocationSize=need.size, memoryTypeIndex=index)
        result = lib.vkAllocateMemory(device.handle, request, device.null, memory)
        if result == _OUT_OF_DEVICE_MEMORY:  # another process was faster, or there is no budget query
            continue
        device.check(result, f"vkAllocateMemory of {nbytes} bytes")
        undo.insert(0, functools.partial(lib.vkFreeMemory, device.handle, memory[0], device.null))
        device.check(lib.vkBindBufferMemory(device.handle, handle, memory[0], 0), "vkBindBufferMemory")
        if not flags & _VISIBLE:
            return handle, None
        mapped = ffi.new("void**")
        result = lib.vkMapMemory(device.handle, memory[0], 0, _WHOLE_SIZE, 0, mapped)
        device.check(result, f"vkMapMemory of {nbytes} bytes")
        return handle, np.frombuffer(ffi.buffer(mapped[0], nbytes), np.uint32)
    raise no_room(nbytes, most_free, device.info)


def _memory_types(
    device: LogicalDevice, bits: int, wishes: tuple[Wish, ...], heaps: list[Heap]
) -> Iterator[tuple[int, Heap, int]]:
    """(memory type, its heap, the wished flags), best first, without types of special behavior."""
    memory = device.ffi.new("VkPhysicalDeviceMemoryProperties*")
    device.lib.vkGetPhysicalDeviceMemoryProperties(device.physical, memory)
    main = max((heap.size for heap in heaps if heap.device_local), default=0)
    for wish in wishes:
        for index in range(memory.memoryTypeCount):
            kind = memory.memoryTypes[index]
            heap = heaps[kind.heapIndex]
            fits = bits >> index & 1 and kind.propertyFlags & wish.flags == wish.flags and kind.propertyFlags < 16
            if fits and not (wish.only_main and not (heap.device_local and heap.size == main)):
                yield index, heap, wish.flags
