"""An engine for the tests of the C library: a Vulkan device, memory and command buffers that are not the library's."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from c_host import CODES, CachePlaces, Call, Host, Place, Places, Request, declared
from faults import Layer

import zinc_attn as za
from zinc_attn.runtime.device import DeviceInfo
from zinc_attn.runtime.devices import MATRIX_FEATURES
from zinc_attn.runtime.loader import loader
from zinc_attn.runtime.protocol import Use
from zinc_attn.runtime.vulkan import memory
from zinc_attn.runtime.vulkan.commands import Commands
from zinc_attn.runtime.vulkan.device import LogicalDevice, Undo, destroy

USAGE = 1 | 2 | 0x20  # VkBufferUsageFlagBits: copies from and to it, and kernels


def address(array: Any) -> int | None:
    return None if array is None else array.ctypes.data


class Owner:
    """The device, with one buffer that the host sees, of which places are cut."""

    def __init__(self, info: DeviceInfo, nbytes: int) -> None:
        self.undo: Undo = []  # the device and what is made of it
        self.memory: Undo = []
        self.device = LogicalDevice(info, self.undo)
        self.ffi, self.lib, self.vk = self.device.ffi, self.device.lib, self.device.vk
        self.features = [self.vk.struct("VkPhysicalDeviceFeatures2")]  # that the device was made with: matrix units
        if self.device.info.matrix.int8:
            for struct, names in MATRIX_FEATURES.items():
                self.features.append(self.vk.struct(struct, pNext=self.features[0].pNext, **dict.fromkeys(names, 1)))
                self.features[0].pNext = self.features[-1]
        self.recorder = Commands(self.device)
        self.fence = self.device.create(self.undo, "Fence", self.vk.struct("VkFenceCreateInfo"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_STORAGE", USAGE)
            handle, self.words = memory.allocate_buffer(self.device, self.memory, nbytes, Use.OUTPUT)
        self.buffer, self.used = self.number(handle), 0
        self.words[:] = 0xFFFFFFFF  # NaNs: what nobody writes must not be read

    def number(self, handle: Any) -> int:
        return int(self.ffi.cast("uintptr_t", handle))

    def host(self, **changes: Any) -> Any:
        """struct za_host."""
        device = self.device
        numbers = {name: self.number(getattr(device, name)) for name in ("instance", "physical", "queue")}
        numbers["get_proc"] = self.number(self.lib.vkGetInstanceProcAddr)
        numbers["enabled"] = self.number(self.features[0])
        return Host(**{**numbers, "device": self.number(device.handle), "family": device.family, **changes})

    def place(self, nbytes: int, behind: int = 0) -> tuple[Any, np.ndarray]:
        """A place of the buffer and its words; ``behind``: bytes that are left free behind it."""
        offset, self.used = self.used, -(-(self.used + nbytes + behind) // 256) * 256
        assert self.used <= self.words.nbytes, "the engine's buffer is too small"
        return Place(self.buffer, offset, nbytes), self.words[offset // 4 : (offset + nbytes) // 4]

    def commands(self) -> tuple[Any, Any]:
        """(VkCommandBuffer, VkSubmitInfo*), recording."""
        command, submit = self.recorder.allocate(self.undo)
        begin = self.vk.struct("VkCommandBufferBeginInfo")
        self.device.check(self.lib.vkBeginCommandBuffer(command, begin), "vkBeginCommandBuffer")
        return command, submit

    def end(self, command: Any) -> None:
        self.device.check(self.lib.vkEndCommandBuffer(command), "vkEndCommandBuffer")

    def submit(self, submit: Any) -> None:
        """Submit and wait."""
        fences, device = self.vk.array("VkFence", [self.fence]), self.device
        device.check(self.lib.vkQueueSubmit(device.queue, 1, submit, self.fence), "vkQueueSubmit")
        device.check(self.lib.vkWaitForFences(device.handle, 1, fences, 1, 60_000_000_000), "vkWaitForFences")
        device.check(self.lib.vkResetFences(device.handle, 1, fences), "vkResetFences")

    def close(self) -> None:
        destroy(self.memory)
        destroy(self.undo)


def call_of(requests: list[dict[str, Any]], **options: Any) -> Any:
    """struct za_call of requests; arrays are given as such. It keeps them. One list is one table."""
    arrays: list[Any] = []
    tables = {id(request.get("page_table")): np.array(request.get("page_table", ()), np.uint32) for request in requests}
    structs = (Request * len(requests))()
    for struct, request in zip(structs, requests, strict=True):
        table, mask = tables[id(request.get("page_table"))], request.get("mask")
        mask = None if mask is None or not mask.shape[1] else np.ascontiguousarray(mask, np.float32)
        arrays += [table, mask]
        fields = {"pages": len(table), **request, "page_table": address(table), "mask": address(mask)}
        fields["mask_keys"] = 0 if mask is None else mask.shape[1]
        for name, value in fields.items():
            setattr(struct, name, value)
    fields = {}
    for name, value in options.items():
        if isinstance(value, np.ndarray):
            arrays.append(np.ascontiguousarray(value, np.float32))
        fields[name] = address(arrays[-1]) if isinstance(value, np.ndarray) else value or 0
    call = Call(request=c.addressof(structs), requests=len(requests), **fields)
    call.kept = structs, arrays
    return call


class Failed(Exception):
    """A function of the library that failed."""


class Made:
    """Calls of the library, each of which raises if it fails, and what they make, freed in the opposite order."""

    def __init__(self, loaded: c.CDLL) -> None:
        self.c, self.frees = loaded, list[tuple[str, Any]]()

    def __call__(self, name: str, *arguments: Any, free: str | None = None) -> Any:
        handle = getattr(self.c, name)(*arguments)
        if not handle:
            raise Failed(f"{CODES[self.c.za_error_code()]}: {self.c.za_error().decode()}")
        if free is None:
            return None
        self.frees.append((free, c.c_void_p(handle)))
        return self.frees[-1][1]

    def close(self) -> None:
        for name, handle in reversed(self.frees):
            getattr(self.c, name)(handle)


class Opened:
    """The library ``c`` with a device, its kernels for a shape, and a cache, by their addresses."""

    c: Any
    device: c.c_void_p
    attn: c.c_void_p
    cache: c.c_void_p

    @property
    def error(self) -> str:
        return self.c.za_error().decode()

    @property
    def code(self) -> str:
        return CODES[self.c.za_error_code()]

    def close(self) -> None:
        self.c.za_cache_free(self.cache)
        assert self.c.za_close(self.attn) and self.c.za_device_close(self.device), self.error


class Engine(Opened):
    """The library on an engine's device, for a shape and its types: K and V in the engine's memory, layer after layer.

    scales: (layers, kv_heads) of K and of V, each or both None. get_proc: the address of a vkGetInstanceProcAddr.
    steps: of rows, from a token to the next and from a KV head to the next; (0, 0) for kv_heads and 1, or for tiles.
    """

    def __init__(
        self,
        loaded: c.CDLL,
        owner: Owner,
        options: Any,
        layers: int,
        pages: int,
        scales: Any = None,
        get_proc: int | None = None,
        steps: tuple[int, int] = (0, 0),
    ) -> None:
        self.c, self.owner, self.options = declared(loaded), owner, options
        self.get_proc = get_proc or owner.number(owner.lib.vkGetInstanceProcAddr)
        host = owner.host(get_proc=self.get_proc)
        self.device = c.c_void_p(self.c.za_device_from(c.byref(host)))
        assert self.device, self.error
        self.attn = c.c_void_p(self.c.za_open(self.device, c.byref(options)))
        assert self.attn, self.error
        self.info = self.c.za_info(self.attn)
        (k, _), (v, _) = (owner.place(self.bytes_of(layers * pages, of_v, steps)) for of_v in (False, True))
        scale_arrays = [None if x is None else np.ascontiguousarray(x) for x in scales or (None, None)]
        self.cache_places = CachePlaces(layers, pages, k, v if self.info.v_page_bytes else Place())
        self.cache_places.k_scales, self.cache_places.v_scales = map(address, scale_arrays)
        self.cache_places.token_rows, self.cache_places.head_rows = steps
        self.cache = c.c_void_p(self.c.za_cache_from(self.attn, c.byref(self.cache_places)))
        assert self.cache, self.error

    def bytes_of(self, pages: int, of_v: bool, steps: tuple[int, int]) -> int:
        """Of K or V of so many pages."""
        page_bytes, o = self.info.v_page_bytes if of_v else self.info.k_page_bytes, self.options
        if not any(steps) or not page_bytes:
            return -(-pages * page_bytes // 4) * 4
        rows = (pages * o.page_size - 1) * steps[0] + (o.kv_heads - 1) * steps[1] + 1
        return -(-rows * (o.v_stride if of_v else o.k_stride) // 4) * 4

    def places(self, shape: za.AttnShape, rows: int, new_rows: int, apart: bool = False) -> tuple[Any, Any]:
        """struct za_places for a layer, and words of its rows, and q, out and lse by row and head.

        apart: lse does not lie behind out.
        """
        n = rows * shape.q_heads
        sizes = new_rows * shape.kv_heads * self.info.row_words * 4, n * shape.head_dim * 4, n * shape.v_head_dim * 4
        (new, new_words), (q, q_words), (out, out_words) = (
            self.owner.place(size, behind) for size, behind in zip(sizes, (0, 0, 0 if apart else 4 * n), strict=True)
        )
        lse = self.owner.place(4 * n)[0] if apart else Place(out.buffer, out.offset + out.size, 4 * n)
        lse_words = self.owner.words[lse.offset // 4 :][:n]
        floats = (x.view(np.float32).reshape(rows, shape.q_heads, -1) for x in (q_words, out_words))
        return Places(new, q, out, lse), (new_words, *floats, lse_words.view(np.float32).reshape(rows, -1))


# --- what no driver here does ---------------------------------------------------------------------------------


def in_chain(struct: Any, kind: str) -> Any:
    """The struct of a kind in the chain of another one, or a null pointer."""
    vk = loader()
    part, number = vk.ffi.cast(f"{kind} *", struct.pNext), vk.struct(kind).sType
    while part and part.sType != number:
        part = vk.ffi.cast(f"{kind} *", part.pNext)
    return part


@contextmanager
def subgroups_from(layer: Layer, size: int) -> Iterator[list[tuple[int, int]]]:
    """The library sees subgroups of ``size`` (16: those of an Intel GPU) to 64; the driver is asked for what it has.

    Yields what is asked for: (subgroupSizeControl, computeFullSubgroups) of a device, (size, flags) of pipelines.
    """
    asked, control = list[tuple[int, int]](), "VkPhysicalDeviceSubgroupSizeControl"

    def properties(real: Any, physical: Any, result: Any) -> None:
        real(physical, result)
        if size == 16:
            result.vendorID, result.deviceType = 0x8086, 1

    def properties2(real: Any, physical: Any, result: Any) -> None:
        real(physical, result)
        if sizes := in_chain(result, f"{control}Properties"):
            sizes.minSubgroupSize, sizes.maxSubgroupSize, sizes.requiredSubgroupSizeStages = size, 64, 0x20

    def features2(real: Any, physical: Any, result: Any) -> None:
        real(physical, result)
        if features := in_chain(result, f"{control}Features"):
            features.subgroupSizeControl = features.computeFullSubgroups = 1

    def device(real: Any, physical: Any, info: Any, *more: Any) -> int:
        features = in_chain(info, f"{control}Features")
        asked.append((features.subgroupSizeControl, features.computeFullSubgroups))
        info.pNext = loader().ffi.NULL
        return int(real(physical, info, *more))

    def pipelines(real: Any, device: Any, cache: Any, count: int, info: Any, *more: Any) -> int:
        required = in_chain(info.stage, "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo")
        asked.append((required.requiredSubgroupSize if required else 0, info.stage.flags))
        info.stage.pNext, info.stage.flags = loader().ffi.NULL, 0
        return int(real(device, cache, count, info, *more))

    functions = {"vkGetPhysicalDeviceProperties": properties, "vkGetPhysicalDeviceProperties2": properties2}
    functions |= {"vkGetPhysicalDeviceFeatures2": features2, "vkCreateDevice": device}
    with ExitStack() as stack:
        for name, function in (functions | {"vkCreateComputePipelines": pipelines}).items():
            stack.enter_context(layer.replaced(name, function))
        yield asked
