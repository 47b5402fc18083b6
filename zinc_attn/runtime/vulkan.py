"""The plain Vulkan dispatcher: libvulkan's raw functions through the `vulkan` package, nothing compiled.

One compute queue, one fence, one submission at a time. A call returns when the device has finished, so what a
submission wrote is there for the host and for the next submission.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from weakref import WeakSet

import numpy as np

from ..checks import check_int
from ..errors import (
    ArgumentError,
    ClosedError,
    DeviceLostError,
    DeviceNotFoundError,
    DTypeError,
    KernelError,
    LimitError,
    NoVulkanError,
    ZincAttnError,
)
from ..kernels.declarations import KernelDecl
from ..limits import WAVE
from .devices import device_info
from .loader import API_1_1, API_1_3, Heap, loader
from .protocol import DeviceInfo, Dispatch, Kernel, Use, Words
from .refusals import (
    after_close,
    after_fork,
    check_compile_room,
    check_nbytes,
    check_step,
    no_host_memory,
    no_room,
    was_lost,
)

P = ParamSpec("P")
R = TypeVar("R")
Undo = list[Callable[[], object]]  # what destroys the parts of an object, to be called last to first

STAGING_BYTES: Final = 16 << 20  # upload chunk to DATA memory that the host cannot map
WAIT_NS: Final = 200_000_000  # Ctrl-C is seen between two waits of this length
SETTLE_S: Final = 2.0  # how long a failed submission is waited for
_NOT_READY: Final = 1  # VK_NOT_READY
_TIMEOUT: Final = 2  # VK_TIMEOUT
_DEVICE_LOST: Final = -4  # VK_ERROR_DEVICE_LOST
_LOCAL, _VISIBLE, _COHERENT, _CACHED = 1, 2, 4, 8  # VkMemoryPropertyFlagBits; other bits make a type unfit
_MAPPED: Final = _VISIBLE | _COHERENT
_TRANSFER_SRC, _TRANSFER_DST, _STORAGE = 1, 2, 0x20  # VkBufferUsageFlagBits
# Memory wanted per use, best first: (flags, only in the largest device-local heap). Buffers are mapped where
# the wish says _VISIBLE: for DATA only where the host sees all of the device's memory (resizable BAR, CPU).
_WISHES: Final[dict[Use, tuple[tuple[int, bool], ...]]] = {
    Use.INPUT: ((_LOCAL | _MAPPED, False), (_MAPPED, False)),
    Use.OUTPUT: ((_MAPPED | _CACHED, False), (_MAPPED, False)),
    Use.DATA: ((_LOCAL | _MAPPED, True), (_LOCAL, True), (_LOCAL, False)),
    Use.SCRATCH: ((_LOCAL, True), (_LOCAL, False)),
    Use.CACHE: ((_LOCAL, True), (_LOCAL, False)),
}
_STAGING_WISH: Final = ((_MAPPED, False),)
_TOP, _COMPUTE, _TRANSFER, _BOTTOM, _HOST = 0x1, 0x800, 0x1000, 0x2000, 0x4000  # VkPipelineStageFlagBits
_SHADER_READ, _SHADER_WRITE, _TRANSFER_READ, _TRANSFER_WRITE, _HOST_READ = 0x20, 0x40, 0x800, 0x1000, 0x2000
_COMPUTE_BIND = 1  # VK_PIPELINE_BIND_POINT_COMPUTE
_COMPUTE_STAGE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_STORAGE_DESCRIPTOR = 7  # VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_WHOLE_SIZE = (1 << 64) - 1
_CACHE_MAGIC: Final = b"zinc_attn pipeline cache 1\n"  # then the SHA-256 of the driver's data, then the data


def _entered(
    method: Callable[Concatenate[VulkanRuntime, P], R],
) -> Callable[Concatenate[VulkanRuntime, P], R]:
    """Runs a method under the runtime's lock, in the process that made it, while it is open and not lost."""

    @functools.wraps(method)
    def entered(self: VulkanRuntime, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if os.getpid() != self._pid:
            raise after_fork(self._info)
        with self._lock:
            if self._closed:
                raise after_close(self._info)
            if self._in_flight and not self._lost:
                self._settle()
            if self._lost:
                raise was_lost(self._info)
            while self._dropped:
                self._release(self._dropped.popleft())
            try:
                return method(self, *args, **kwargs)
            except MemoryError as error:
                if isinstance(error, ZincAttnError):
                    raise
                raise no_host_memory(self._info) from error

    return entered


class _Owned:
    """Vulkan handles, destroyed once: by close(), by the runtime's close(), or after it was dropped."""

    def __init__(self, runtime: VulkanRuntime) -> None:
        self._runtime = runtime
        self._key = next(runtime._keys)
        runtime._undo[self._key] = []

    @property
    def closed(self) -> bool:
        return self._key not in self._runtime._undo

    def close(self) -> None:
        """Free it; a second call, or one in a forked child, does nothing."""
        runtime = self._runtime
        if os.getpid() == runtime._pid:
            with runtime._lock:
                if runtime._in_flight and not runtime._lost:
                    runtime._settle()  # where that fails, the next call says so
                runtime._release(self._key)

    def __del__(self) -> None:
        # Finalizers run anywhere, also inside a call of this runtime: the next call destroys the handles.
        with suppress(AttributeError):
            self._runtime._dropped.append(self._key)


class VulkanBuffer(_Owned):
    """A storage buffer of ``nbytes`` bytes. Closing it closes the recordings that use it."""

    def __init__(self, runtime: VulkanRuntime, nbytes: int, use: Use) -> None:
        super().__init__(runtime)
        self._nbytes = nbytes
        self._use = use
        self._handle: Any = None
        self._view: Words | None = None  # (nbytes / 4,) mapped memory
        self._users: WeakSet[VulkanRecording] = WeakSet()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def use(self) -> Use:
        return self._use

    def close(self) -> None:
        for recording in list(self._users):
            recording.close()
        self._view = None
        super().close()


@dataclass(frozen=True)
class VulkanKernel:
    """A compute pipeline; lives as long as its runtime."""

    decl: KernelDecl
    owner: object  # the runtime's token
    pipeline: Any
    layouts: tuple[Any, Any]  # of the descriptor set, of the pipeline


class VulkanRecording(_Owned):
    """A command buffer recorded once, with its descriptor sets and, where asked for, its timestamps."""

    def __init__(self, runtime: VulkanRuntime, steps: tuple[Dispatch, ...]) -> None:
        super().__init__(runtime)
        self._steps = steps  # keeps the buffers alive
        self._submit: Any = None
        self._queries: Any = None
        self._cold = True  # until its first run
        self._ran = False  # whether the last run finished


class VulkanRuntime:
    """Runtime (see ``runtime.Runtime``) on plain Vulkan 1.1 or later.

    ``info`` is one of ``runtime.list_devices()``. Errors at opening: NoVulkanError, DeviceNotFoundError (the
    devices changed since they were listed), DeviceMemoryError, DeviceLostError.
    """

    _closed = True  # until __init__ is through
    _lost = False
    _in_flight = False  # a submission may be running: no wait has said that it finished

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._token = object()  # says that a kernel is this runtime's, without keeping the runtime alive
        self._keys = itertools.count(1)
        self._own: Undo = []  # instance, device and all that lives as long as the runtime
        self._undo: dict[int, Undo] = {}  # per open buffer and recording; below 0: closed while it may be in use
        self._dropped: deque[int] = deque()
        self._kernels: dict[tuple[KernelDecl, tuple[int, ...], bytes], VulkanKernel] = {}
        self._warm: set[Kernel] = set()  # kernels that have run
        self._layouts: dict[int, tuple[Any, Any]] = {}
        self._staging: tuple[Any, Words] | None = None
        self._empty: Any = None
        self._vk = loader()
        self._ffi, self._lib, self._null = self._vk.ffi, self._vk.lib, self._vk.ffi.NULL
        try:
            check_compile_room(info)
            self._open()
        except BaseException as error:
            self._destroy(self._own)
            if isinstance(error, MemoryError) and not isinstance(error, ZincAttnError):
                raise no_host_memory(info) from error
            raise
        self._closed = False

    name: Final = "vulkan"
    orders_cache_writes: Final = True

    @property
    def info(self) -> DeviceInfo:
        return self._info

    # --- opening and closing ------------------------------------------------------------------------------

    def _open(self) -> None:
        vk, ffi, lib, null = self._vk, self._ffi, self._lib, self._null
        vk.keep_drivers_loaded()
        instance, api = vk.create_instance()
        self._own.append(functools.partial(lib.vkDestroyInstance, instance, null))
        found = vk.physical_devices(instance)
        at = self._info.index
        if at >= len(found) or device_info(vk, api, found[at], at).uuid != self._info.uuid:
            raise DeviceNotFoundError(f"device {at}: {self._info.name} is not there any more; list again")
        self._physical = physical = found[at]
        props, sizes, wave = vk.properties(
            physical,
            "VkPhysicalDeviceMaintenance3Properties",
            "VkPhysicalDeviceSubgroupSizeControlProperties",
        )
        if props.apiVersion < API_1_1:
            raise NoVulkanError(f"{self._info.name} offers Vulkan 1.0, this package needs 1.1: update its driver")
        self._max_allocation = int(sizes.maxMemoryAllocationSize)
        self._max_bindings = int(props.limits.maxPerStageDescriptorStorageBuffers)
        family, self._timestamp_bits = vk.compute_family(physical)
        if family < 0:
            raise NoVulkanError(f"{self._info.name} has no compute queue; choose another device")

        extensions = vk.extensions(physical)
        self._has_budget = "VK_EXT_memory_budget" in extensions
        enable, features = [], null
        if (core := min(api, props.apiVersion) >= API_1_3) or "VK_EXT_subgroup_size_control" in extensions:
            features = vk.struct("VkPhysicalDeviceSubgroupSizeControlFeatures")
            query = vk.struct("VkPhysicalDeviceFeatures2", pNext=features)
            lib.vkGetPhysicalDeviceFeatures2(physical, query)
            if not core:
                enable.append(ffi.new("char[]", b"VK_EXT_subgroup_size_control"))
        self._wave32 = bool(
            features != null
            and features.subgroupSizeControl
            and features.computeFullSubgroups
            and wave.minSubgroupSize <= WAVE <= wave.maxSubgroupSize
            and wave.requiredSubgroupSizeStages & _COMPUTE_STAGE
        )
        queues = vk.struct(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=family,
            queueCount=1,
            pQueuePriorities=vk.array("float", [1.0]),
        )
        opened = ffi.new("VkDevice*")
        create = vk.struct(
            "VkDeviceCreateInfo",
            pNext=features,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(enable),
            ppEnabledExtensionNames=vk.array("char*", enable),
        )
        self._check(lib.vkCreateDevice(physical, create, null, opened), "vkCreateDevice")
        self._device = opened[0]
        self._own.append(functools.partial(lib.vkDestroyDevice, self._device, null))
        queue = ffi.new("VkQueue*")
        lib.vkGetDeviceQueue(self._device, family, 0, queue)
        self._queue = queue[0]
        # The hot path calls the driver's own entry points, past the loader's dispatch.
        self._queue_submit, self._wait_fences, self._reset_fences = (
            ffi.cast(f"PFN_{name}", lib.vkGetDeviceProcAddr(self._device, ffi.new("char[]", name.encode())))
            for name in ("vkQueueSubmit", "vkWaitForFences", "vkResetFences")
        )
        self._fences = vk.array("VkFence", [null])
        self._fence = null
        device, fences = self._device, self._fences  # not self, which would keep the runtime alive
        self._own.append(lambda: lib.vkDestroyFence(device, fences[0], null))
        self._replace_fence()
        reset = 2  # VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        pool = vk.struct("VkCommandPoolCreateInfo", flags=reset, queueFamilyIndex=family)
        self._pool = self._create(self._own, "CommandPool", pool)
        self._open_cache(props)

    def close(self) -> None:
        """Destroy everything made by this runtime; a second call, or one in a forked child, does nothing.

        After a failure it may be unknown whether the last submission has finished. It is waited for, for SETTLE_S at
        most, in every way that Vulkan has. Where nothing shows that it finished, its handles are left to the end of
        the process: a thread of the driver may still use them.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._staging = None
            if self._in_flight and not self._is_idle():
                self._undo.clear()
                self._own.clear()
                return
            self._in_flight = False
            for key in reversed(list(self._undo)):
                self._release(key)
            self._kernels.clear()
            self._destroy(self._own)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def _release(self, key: int) -> None:
        """Destroy what an object holds; while a submission may use it, leave that to close()."""
        undo = self._undo.pop(key, [])
        if self._in_flight and undo:
            self._undo[-next(self._keys)] = undo
        else:
            self._destroy(undo)

    @staticmethod
    def _destroy(undo: Undo) -> None:
        while undo:
            undo.pop()()

    def _check(self, result: int, what: str, other: type[ZincAttnError] = ZincAttnError) -> None:
        if result:
            error = self._vk.error(result, f"{what} on {self._info.name}", other)
            self._lost = self._lost or isinstance(error, DeviceLostError)
            raise error

    def _create(self, undo: Undo, kind: str, info: Any) -> Any:
        """vkCreate<kind>(info); its vkDestroy goes to ``undo``."""
        made = self._ffi.new(f"Vk{kind}*")
        result = getattr(self._lib, f"vkCreate{kind}")(self._device, info, self._null, made)
        self._check(result, f"vkCreate{kind}")
        destroy = getattr(self._lib, f"vkDestroy{kind}")
        undo.append(functools.partial(destroy, self._device, made[0], self._null))
        return made[0]

    @contextmanager
    def _kept(self) -> Iterator[Undo]:
        """The undo list of something that lives as long as the runtime; undone if making it fails."""
        undo: Undo = []
        try:
            yield undo
        except BaseException:
            self._destroy(undo)
            raise
        self._own.extend(undo)

    @contextmanager
    def _making(self, made: _Owned) -> Iterator[Undo]:
        """The undo list of an object under construction, which is closed if that fails."""
        try:
            yield self._undo[made._key]
        except BaseException:
            self._release(made._key)
            raise

    # --- buffers ------------------------------------------------------------------------------------------

    @_entered
    def buffer(self, nbytes: int, use: Use) -> VulkanBuffer:
        """A buffer of ``nbytes`` bytes, contents undefined. LimitError beyond what one buffer of the device
        may hold, DeviceMemoryError where the memory budget or the driver has no room."""
        nbytes = check_nbytes(nbytes, self._info, min(self._info.max_buffer_bytes, self._max_allocation))
        made = VulkanBuffer(self, nbytes, use)
        with self._making(made) as undo:
            usage = _STORAGE | (_TRANSFER_DST if use is Use.DATA else 0)
            made._handle, made._view = self._allocate(undo, nbytes, usage, _WISHES[use])
        return made

    def _allocate(
        self, undo: Undo, nbytes: int, usage: int, wishes: Sequence[tuple[int, bool]]
    ) -> tuple[Any, Words | None]:
        """(VkBuffer, its mapped words or None) in the first memory type that fits a wish and has room."""
        vk, ffi, lib = self._vk, self._ffi, self._lib
        create = vk.struct("VkBufferCreateInfo", size=nbytes, usage=usage)
        handle = self._create(undo, "Buffer", create)
        need = ffi.new("VkMemoryRequirements*")
        lib.vkGetBufferMemoryRequirements(self._device, handle, need)
        heaps = vk.heaps(self._physical, self._has_budget)
        most_free = 0
        for index, heap, flags in self._memory_types(need.memoryTypeBits, wishes, heaps):
            most_free = max(most_free, heap.free)
            if need.size > heap.free:
                continue
            memory = ffi.new("VkDeviceMemory*")
            request = vk.struct("VkMemoryAllocateInfo", allocationSize=need.size, memoryTypeIndex=index)
            result = lib.vkAllocateMemory(self._device, request, self._null, memory)
            if result == -2:  # out of device memory: another process was faster, or there is no budget query
                continue
            self._check(result, f"vkAllocateMemory of {nbytes} bytes")
            undo.insert(0, functools.partial(lib.vkFreeMemory, self._device, memory[0], self._null))
            self._check(lib.vkBindBufferMemory(self._device, handle, memory[0], 0), "vkBindBufferMemory")
            if not flags & _VISIBLE:
                return handle, None
            mapped = ffi.new("void**")
            result = lib.vkMapMemory(self._device, memory[0], 0, _WHOLE_SIZE, 0, mapped)
            self._check(result, f"vkMapMemory of {nbytes} bytes")
            return handle, np.frombuffer(ffi.buffer(mapped[0], nbytes), np.uint32)
        raise no_room(nbytes, most_free, self._info)

    def _memory_types(
        self, bits: int, wishes: Sequence[tuple[int, bool]], heaps: list[Heap]
    ) -> Iterator[tuple[int, Heap, int]]:
        """(memory type, its heap, the wished flags), best first, without types of special behaviour."""
        memory = self._ffi.new("VkPhysicalDeviceMemoryProperties*")
        self._lib.vkGetPhysicalDeviceMemoryProperties(self._physical, memory)
        main = max((h.size for h in heaps if h.device_local), default=0)
        for flags, only_main in wishes:
            for index in range(memory.memoryTypeCount):
                kind = memory.memoryTypes[index]
                heap = heaps[kind.heapIndex]
                fits = bits >> index & 1 and kind.propertyFlags & flags == flags and kind.propertyFlags < 16
                if fits and not (only_main and not (heap.device_local and heap.size == main)):
                    yield index, heap, flags

    def _buffer(self, buffer: object, name: str = "buffer") -> VulkanBuffer:
        if not isinstance(buffer, VulkanBuffer) or buffer._runtime is not self:
            raise ArgumentError(f"{name}: got {buffer!r}, expected a buffer of this runtime")
        if buffer.closed:
            raise ClosedError(f"{name}: the {buffer.use.value} buffer of {buffer.nbytes} bytes was closed")
        return buffer

    @_entered
    def write(self, buffer: object, data: Words, offset: int = 0) -> None:
        """Copy ``data``, (n,) uint32, to an INPUT, OUTPUT or DATA buffer from word ``offset``."""
        target = self._buffer(buffer)
        if target._use in (Use.SCRATCH, Use.CACHE):
            raise ArgumentError(f"buffer: got a {target._use.value} buffer, which the host cannot write")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint32:
            raise DTypeError(f"data: got {getattr(data, 'dtype', type(data).__name__)}, expected uint32 words")
        count, size = data.size, target._nbytes // 4
        if data.ndim != 1 or offset < 0 or offset + count > size:
            room = f"expected (n,) within a buffer of {size} words"
            raise ArgumentError(f"data: got shape {data.shape} from word {offset}, {room}")
        if target._view is not None:
            target._view[offset : offset + count] = data
        elif count:
            self._upload(target, data, offset)

    def _upload(self, target: VulkanBuffer, data: Words, offset: int) -> None:
        if self._staging is None:
            with self._kept() as undo:
                source, view = self._allocate(undo, STAGING_BYTES, _TRANSFER_SRC, _STAGING_WISH)
                assert view is not None
            self._staging = source, view
        source, staging = self._staging
        key = next(self._keys)
        command, submit = self._command_buffer(self._undo.setdefault(key, []))
        try:
            for start in range(0, data.size, staging.size):
                part = data[start : start + staging.size]
                staging[: part.size] = part
                self._begin(command)
                at = 4 * (offset + start)
                region = self._vk.struct("VkBufferCopy", dstOffset=at, size=part.nbytes)
                self._lib.vkCmdCopyBuffer(command, source, target._handle, 1, region)
                # its second scope holds everything submitted later
                self._barrier(command, _TRANSFER, _TRANSFER_WRITE, _COMPUTE, _SHADER_READ | _SHADER_WRITE)
                self._check(self._lib.vkEndCommandBuffer(command), "vkEndCommandBuffer")
                self._submit(submit)
        finally:
            if self._in_flight and not self._lost:  # a second Ctrl-C during the wait for the first one's submission
                self._settle()
            self._release(key)

    @_entered
    def read(self, buffer: object) -> Words:
        """A copy of an OUTPUT buffer's words, (nbytes / 4,) uint32."""
        source = self._buffer(buffer)
        if source._use is not Use.OUTPUT or source._view is None:
            raise ArgumentError(f"buffer: got a {source._use.value} buffer, expected an output buffer")
        return source._view.copy()

    # --- kernels ------------------------------------------------------------------------------------------

    @_entered
    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> VulkanKernel:
        """The pipeline of entry point main, made once per (decl, spec, SPIR-V). KernelError: refused."""
        values = tuple(check_int(f"spec[{i}]", v, 0, (1 << 32) - 1) for i, v in enumerate(spec))
        if len(values) != len(decl.spec):
            names = ", ".join(decl.spec)
            raise ArgumentError(f"spec of kernel {decl.name}: got {len(values)} values, expected ({names})")
        if len(decl.bindings) > self._max_bindings:
            raise LimitError(
                f"kernel {decl.name}: has {len(decl.bindings)} buffers, but {self._info.name} takes at most "
                f"{self._max_bindings}"
            )
        key = (decl, values, hashlib.sha256(spirv).digest())
        if (known := self._kernels.get(key)) is not None:
            return known
        # drivers do not validate: what is not SPIR-V at all would crash them
        if len(spirv) < 20 or len(spirv) % 4 or spirv[:4] != struct.pack("=I", 0x07230203):
            raise KernelError(f"kernel {decl.name}: {len(spirv)} bytes that are no SPIR-V of this byte order")
        check_compile_room(self._info)
        scratch: Undo = []
        try:
            pipeline, layouts = self._compile(scratch, decl, np.frombuffer(spirv, np.uint32), decl.constants(values))
        finally:
            self._destroy(scratch)
        made = self._kernels[key] = VulkanKernel(decl, self._token, pipeline, layouts)
        self._save_cache()
        return made

    def _compile(
        self, scratch: Undo, decl: KernelDecl, words: Words, values: tuple[int, ...]
    ) -> tuple[Any, tuple[Any, Any]]:
        vk, ffi, lib = self._vk, self._ffi, self._lib
        code = ffi.from_buffer("uint32_t[]", words)
        module = self._create(
            scratch, "ShaderModule", vk.struct("VkShaderModuleCreateInfo", codeSize=words.nbytes, pCode=code)
        )
        layouts = self._layout(len(decl.bindings))
        entries = [
            vk.struct("VkSpecializationMapEntry", constantID=i, offset=4 * i, size=4) for i in range(len(values))
        ]
        constants = vk.struct(
            "VkSpecializationInfo",
            mapEntryCount=len(values),
            pMapEntries=vk.array("VkSpecializationMapEntry", entries),
            dataSize=4 * len(values),
            pData=vk.array("uint32_t", values),
        )
        full, chain = 0, self._null
        if self._wave32 and _local_size_x(words) % WAVE == 0:
            full = 2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
            chain = vk.struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=WAVE)
        stage = vk.struct(
            "VkPipelineShaderStageCreateInfo",
            pNext=chain,
            flags=full,
            stage=_COMPUTE_STAGE,
            module=module,
            pName=ffi.new("char[]", b"main"),
            pSpecializationInfo=constants,
        )
        create = vk.struct("VkComputePipelineCreateInfo", stage=stage[0], layout=layouts[1])
        made = ffi.new("VkPipeline*")
        result = lib.vkCreateComputePipelines(self._device, self._cache, 1, create, self._null, made)
        del stage  # alive until here: `create` holds a copy that points at its name and constants
        self._check(result, f"compiling kernel {decl.name}", KernelError)
        self._own.append(functools.partial(lib.vkDestroyPipeline, self._device, made[0], self._null))
        return made[0], layouts

    def _layout(self, count: int) -> tuple[Any, Any]:
        """(set layout, pipeline layout) of ``count`` storage buffers."""
        if count not in self._layouts:
            vk = self._vk
            each = {"descriptorType": _STORAGE_DESCRIPTOR, "descriptorCount": 1, "stageFlags": _COMPUTE_STAGE}
            bindings = [vk.struct("VkDescriptorSetLayoutBinding", binding=i, **each) for i in range(count)]
            table = vk.array("VkDescriptorSetLayoutBinding", bindings)
            create = vk.struct("VkDescriptorSetLayoutCreateInfo", bindingCount=count, pBindings=table)
            with self._kept() as undo:
                sets = self._create(undo, "DescriptorSetLayout", create)
                layouts = vk.array("VkDescriptorSetLayout", [sets])
                create = vk.struct("VkPipelineLayoutCreateInfo", setLayoutCount=1, pSetLayouts=layouts)
                layout = self._create(undo, "PipelineLayout", create)
            self._layouts[count] = sets, layout
        return self._layouts[count]

    # --- pipeline cache on disk: what cannot be read or written is done without -----------------------------

    def _open_cache(self, props: Any) -> None:
        uuid = bytes(props.pipelineCacheUUID)
        self._cache_head = struct.pack("=IIII", 32, 1, props.vendorID, props.deviceID) + uuid
        key = self._cache_head + struct.pack("=I", props.driverVersion) + self._info.driver.encode()
        self._cache_file: Path | None = None
        self._cache_sum = b""
        data = b""
        with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            folder = os.environ.get("ZINC_ATTN_CACHE_DIR")
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            root = Path(folder) if folder else Path(base) / "zinc_attn"
            self._cache_file = root / "pipelines" / f"{hashlib.sha256(key).hexdigest()[:32]}.bin"
            stored = self._cache_file.read_bytes().removeprefix(_CACHE_MAGIC)
            if hashlib.sha256(stored[32:]).digest() == stored[:32] and stored[32:64] == self._cache_head:
                data, self._cache_sum = stored[32:], stored[:32]
        create = self._vk.struct(
            "VkPipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=self._ffi.from_buffer(data)
        )
        self._cache = self._create(self._own, "PipelineCache", create)

    def _save_cache(self) -> None:
        size = self._ffi.new("size_t*")
        get = self._lib.vkGetPipelineCacheData
        if self._cache_file is None or get(self._device, self._cache, size, self._null) or size[0] <= 32:
            return  # 32 bytes: a driver that keeps nothing but the header
        raw = self._ffi.new("char[]", size[0])
        if get(self._device, self._cache, size, raw):
            return
        data = bytes(self._ffi.buffer(raw, size[0]))
        digest = hashlib.sha256(data).digest()
        if digest == self._cache_sum:
            return
        with suppress(OSError):
            self._cache_file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._cache_file.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_CACHE_MAGIC + digest + data)
                Path(temporary).replace(self._cache_file)
                self._cache_sum = digest
            finally:
                Path(temporary).unlink(missing_ok=True)

    # --- recordings ---------------------------------------------------------------------------------------

    @_entered
    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> VulkanRecording:
        """Record ``steps`` in order, with a barrier before each step that depends on an earlier one.

        ``timestamps`` on a device without them (timestamp_period_ns 0) is refused with ArgumentError.
        """
        vk, lib = self._vk, self._lib
        made = VulkanRecording(self, tuple(steps))
        with self._making(made) as undo:
            bound = [self._checked(i, step) for i, step in enumerate(steps)]
            if timestamps and not self._info.timestamp_period_ns:
                raise ArgumentError(f"timestamps: the compute queue of {self._info.name} has none")
            sets = self._descriptor_sets(undo, bound)
            command, made._submit = self._command_buffer(undo)
            queries = None
            if timestamps and steps:
                # queryType 2: VK_QUERY_TYPE_TIMESTAMP
                create = vk.struct("VkQueryPoolCreateInfo", queryType=2, queryCount=2 * len(steps))
                queries = made._queries = self._create(undo, "QueryPool", create)
            self._begin(command)
            if queries is not None:
                lib.vkCmdResetQueryPool(command, queries, 0, 2 * len(steps))
            written: set[VulkanBuffer] = set()  # by steps since the last barrier
            touched: set[VulkanBuffer] = set()
            for i, ((kernel, buffers), step) in enumerate(zip(bound, steps, strict=True)):
                access = [b.access for b in kernel.decl.bindings]
                writes = {b for b, a in zip(buffers, access, strict=True) if a == "write"}
                if not written.isdisjoint(buffers) or not touched.isdisjoint(writes):
                    self._barrier(command, _COMPUTE, _SHADER_WRITE, _COMPUTE, _SHADER_READ | _SHADER_WRITE)
                    written, touched = set(), set()
                written |= writes
                touched.update(buffers)
                bind = vk.array("VkDescriptorSet", [sets[i]])
                lib.vkCmdBindPipeline(command, _COMPUTE_BIND, kernel.pipeline)
                layout = kernel.layouts[1]
                lib.vkCmdBindDescriptorSets(command, _COMPUTE_BIND, layout, 0, 1, bind, 0, self._null)
                if queries is not None:
                    lib.vkCmdWriteTimestamp(command, _TOP, queries, 2 * i)
                lib.vkCmdDispatch(command, *step.groups)
                if queries is not None:
                    lib.vkCmdWriteTimestamp(command, _BOTTOM, queries, 2 * i + 1)
            # For the host, and for all later submissions: the second scope is not bounded by this one.
            later = _SHADER_READ | _SHADER_WRITE | _TRANSFER_READ | _TRANSFER_WRITE | _HOST_READ
            self._barrier(command, _COMPUTE, _SHADER_WRITE, _COMPUTE | _TRANSFER | _HOST, later)
            self._check(lib.vkEndCommandBuffer(command), "vkEndCommandBuffer")
        for _, buffers in bound:
            for buffer in buffers:
                buffer._users.add(made)
        return made

    def _checked(self, i: int, step: Dispatch) -> tuple[VulkanKernel, list[VulkanBuffer]]:
        kernel = step.kernel
        if not isinstance(kernel, VulkanKernel) or kernel.owner is not self._token:
            raise ArgumentError(f"steps[{i}].kernel: got {kernel!r}, expected a kernel of this runtime")
        check_step(i, step, self._info)
        names = [b.name for b in kernel.decl.bindings]
        what = f"steps[{i}].buffers"
        return kernel, [self._buffer(b, f"{what} {n}") for b, n in zip(step.buffers, names, strict=True)]

    def _descriptor_sets(self, undo: Undo, bound: Sequence[tuple[VulkanKernel, list[VulkanBuffer]]]) -> Any:
        if not bound:
            return []
        vk, count = self._vk, len(bound)
        total = max(1, sum(len(buffers) for _, buffers in bound))
        size = vk.struct("VkDescriptorPoolSize", type=_STORAGE_DESCRIPTOR, descriptorCount=total)
        create = vk.struct("VkDescriptorPoolCreateInfo", maxSets=count, poolSizeCount=1, pPoolSizes=size)
        pool = self._create(undo, "DescriptorPool", create)
        layouts = vk.array("VkDescriptorSetLayout", [kernel.layouts[0] for kernel, _ in bound])
        request = vk.struct(
            "VkDescriptorSetAllocateInfo", descriptorPool=pool, descriptorSetCount=count, pSetLayouts=layouts
        )
        sets = self._ffi.new("VkDescriptorSet[]", count)
        self._check(self._lib.vkAllocateDescriptorSets(self._device, request, sets), "vkAllocateDescriptorSets")
        writes = []
        for i, (_, buffers) in enumerate(bound):
            parts = [vk.struct("VkDescriptorBufferInfo", buffer=b._handle, range=b._nbytes) for b in buffers]
            if parts:  # one write fills consecutive bindings
                write = vk.struct(
                    "VkWriteDescriptorSet",
                    dstSet=sets[i],
                    descriptorCount=len(parts),
                    descriptorType=_STORAGE_DESCRIPTOR,
                    pBufferInfo=vk.array("VkDescriptorBufferInfo", parts),
                )
                writes.append(write)
        table = vk.array("VkWriteDescriptorSet", writes)
        self._lib.vkUpdateDescriptorSets(self._device, len(writes), table, 0, self._null)
        return sets

    def _barrier(self, command: Any, source: int, written: int, later: int, access: int) -> None:
        memory = self._vk.struct("VkMemoryBarrier", srcAccessMask=written, dstAccessMask=access)
        null = self._null
        self._lib.vkCmdPipelineBarrier(command, source, later, 0, 1, memory, 0, null, 0, null)

    def _command_buffer(self, undo: Undo) -> tuple[Any, Any]:
        """(VkCommandBuffer, the VkSubmitInfo* that submits it)."""
        vk, lib = self._vk, self._lib
        request = vk.struct("VkCommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1)
        made = self._ffi.new("VkCommandBuffer[]", 1)
        self._check(lib.vkAllocateCommandBuffers(self._device, request, made), "vkAllocateCommandBuffers")
        undo.append(functools.partial(lib.vkFreeCommandBuffers, self._device, self._pool, 1, made))
        return made[0], vk.struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=made)

    def _begin(self, command: Any) -> None:
        begin = self._vk.struct("VkCommandBufferBeginInfo")
        self._check(self._lib.vkBeginCommandBuffer(command, begin), "vkBeginCommandBuffer")

    # --- running ------------------------------------------------------------------------------------------

    @_entered
    def run(self, recording: object) -> None:
        """Submit, and wait until it has finished. Ctrl-C is raised after the device has finished."""
        mine = self._recording(recording)
        if mine._cold:
            self._check_cold(mine)
        mine._ran = False
        self._submit(mine._submit)
        mine._ran = True

    def _check_cold(self, recording: VulkanRecording) -> None:
        """Before a recording's first run, in which lavapipe compiles the kernels that have not run before."""
        kernels = {step.kernel for step in recording._steps}
        if not self._warm.issuperset(kernels):
            check_compile_room(self._info)
            self._warm |= kernels
        recording._cold = False

    def _recording(self, recording: object) -> VulkanRecording:
        if not isinstance(recording, VulkanRecording) or recording._runtime is not self:
            raise ArgumentError(f"recording: got {recording!r}, expected a recording of this runtime")
        if recording._key not in self._undo:
            raise ClosedError("recording: it, or a buffer that it uses, was closed")
        return recording

    @_entered
    def empty_submit(self) -> None:
        """Submit a command buffer without commands and wait: the floor of what run() costs on this device."""
        if self._empty is None:
            with self._kept() as undo:
                command, submit = self._command_buffer(undo)
                self._begin(command)
                self._check(self._lib.vkEndCommandBuffer(command), "vkEndCommandBuffer")
            self._empty = submit
        self._submit(self._empty)

    def _submit(self, submit: Any) -> None:
        self._in_flight = True
        try:
            result = self._queue_submit(self._queue, 1, submit, self._fence)
            if not result:
                result = _TIMEOUT
                while result == _TIMEOUT:
                    result = self._wait_fences(self._device, 1, self._fences, 1, WAIT_NS)
                result = result or self._reset_fences(self._device, 1, self._fences)
        except BaseException:  # an interrupt hides whether the submission was made
            self._settle()
            raise
        if result:
            self._settle()
            if self._lost and result != _DEVICE_LOST:
                text = self._vk.error(result, f"a submission on {self._info.name}")
                raise DeviceLostError(f"{text}, and the queue could not be made idle; open a new Device")
            self._check(result, "a submission")
        self._in_flight = False

    def _settle(self) -> None:
        """The one place after a submission, a wait or a reset that failed: make the queue idle and the fence new.

        Where either cannot be had the device is lost; ``_in_flight`` says whether the submission may still run.
        """
        idle, fresh = self._is_idle(), False
        if idle:
            fresh = self._renew_fence()
        self._lost = self._lost or not fresh
        self._in_flight = not idle

    def _is_idle(self) -> bool:
        """Whether something shows, within SETTLE_S, that no submission runs.

        vkQueueWaitIdle and vkDeviceWaitIdle return in finite time also on a lost device.
        """
        lib, device = self._lib, self._device
        if not lib.vkQueueWaitIdle(self._queue) or not lib.vkDeviceWaitIdle(device):
            return True
        self._lost = True  # a device of which neither wait works is not used again, whatever the fence says
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            if not self._wait_fences(device, 1, self._fences, 1, WAIT_NS // 10):
                return True
            if not lib.vkGetFenceStatus(device, self._fence) or not lib.vkQueueWaitIdle(self._queue):
                return True
            time.sleep(0.01)  # a wait that fails returns at once
        # The specification: what is in use on a lost device is in use no more once a wait has returned this.
        return bool(lib.vkDeviceWaitIdle(device) == _DEVICE_LOST)

    def _renew_fence(self) -> bool:
        """Make the fence known to be unsignalled, or put a new one in its place, on an idle queue; False: neither."""
        device = self._device
        was_reset = not self._reset_fences(device, 1, self._fences)
        if was_reset and self._lib.vkGetFenceStatus(device, self._fence) == _NOT_READY:
            return True
        with suppress(ZincAttnError):
            self._replace_fence()
            return True
        return False

    def _replace_fence(self) -> None:
        undo: Undo = []
        made = self._create(undo, "Fence", self._vk.struct("VkFenceCreateInfo"))
        self._lib.vkDestroyFence(self._device, self._fence, self._null)
        self._fence = self._fences[0] = made

    @_entered
    def timings(self, recording: object) -> list[tuple[float, float]]:
        """(begin, end) per step of the last run, in seconds since the first step's begin."""
        mine = self._recording(recording)
        if mine._queries is None:
            raise ArgumentError("recording: it has no timestamps; use record(steps, timestamps=True)")
        if not mine._ran:
            raise ArgumentError("recording: it has no timings before its first run, nor after one that failed")
        count = 2 * len(mine._steps)
        ticks = self._ffi.new("uint64_t[]", count)
        flags = 1 | 2  # VK_QUERY_RESULT_64_BIT, VK_QUERY_RESULT_WAIT_BIT
        get = self._lib.vkGetQueryPoolResults
        result = get(self._device, mine._queries, 0, count, 8 * count, ticks, 8, flags)
        self._check(result, "vkGetQueryPoolResults")
        mask = (1 << self._timestamp_bits) - 1  # the counter wraps at its width
        scale = self._info.timestamp_period_ns * 1e-9
        since = [((t - ticks[0]) & mask) * scale for t in ticks]
        return list(zip(since[::2], since[1::2], strict=True))


def _local_size_x(words: Words) -> int:
    """x of the LocalSize execution mode of a SPIR-V module, 1 where a constant gives it."""
    at = 5
    while at < len(words):
        length, opcode = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        if opcode == 16 and length == 6 and words[at + 2] == 17:  # OpExecutionMode LocalSize x y z
            return int(words[at + 3])
        if opcode == 54 or not length:  # OpFunction: execution modes come earlier
            break
        at += length
    return 1
