"""The protocol between this package and a dispatcher. ``kompute`` and ``vulkan`` implement it; nothing else does.

A runtime makes buffers and kernels, records lists of dispatches once, and replays them. It knows nothing of
attention. All data are uint32 words; every method may raise DeviceMemoryError, DeviceLostError or ClosedError.

Which Vulkan devices there are is asked through the ``vulkan`` package (cffi over libvulkan). Each question makes an
instance and destroys it, so the answers are right after fork(), too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

try:
    import resource
except ImportError:  # Windows has no address-space limit
    resource = None  # type: ignore[assignment]

from ..checks import check_int, parse_digits, shown
from ..errors import (
    ArgumentError,
    ClosedError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceNotFoundError,
    ForkedProcessError,
    LimitError,
    NoVulkanError,
    RuntimeUnavailableError,
    ZincAttnError,
)
from ..kernels.contract import KernelDecl

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one Vulkan device. compute_units is the driver's count, or the CPU's threads on a CPU device."""

    index: int  # in the loader's enumeration order
    name: str
    kind: str  # "discrete", "integrated", "virtual", "cpu" or "other"
    vendor: str
    driver: str  # driver name and version
    api_version: str
    uuid: str  # hexadecimal
    compute_units: int
    compute_units_source: str  # which query gave compute_units, or "assumed"
    subgroup_size: int
    memory_bytes: int  # largest device-local heap
    max_buffer_bytes: int  # maxStorageBufferRange
    max_workgroups: tuple[int, int, int]
    timestamp_period_ns: float  # 0 where the compute queue has no timestamps


class Use(Enum):
    """What a buffer is for; a runtime picks memory by it."""

    INPUT = "input"  # small; written by the host before a recording is submitted, read by kernels
    OUTPUT = "output"  # small; written by kernels, read by the host afterwards
    DATA = "data"  # large; uploaded now and then, read by kernels
    SCRATCH = "scratch"  # written and read by kernels within a recording
    CACHE = "cache"  # device memory only, large; written and read by kernels, kept between recordings


class Buffer(Protocol):
    """A storage buffer of ``nbytes`` bytes (a multiple of 4)."""

    @property
    def nbytes(self) -> int: ...

    @property
    def use(self) -> Use: ...

    def close(self) -> None: ...


class Kernel(Protocol):
    """A compute pipeline: one SPIR-V module with its specialisation constants fixed."""

    @property
    def decl(self) -> KernelDecl: ...


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch: ``buffers`` in binding order, ``groups`` workgroups in x, y, z."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]
    groups: tuple[int, int, int]


class Recording(Protocol):
    """A list of dispatches that can be submitted any number of times."""

    def close(self) -> None: ...


class Runtime(Protocol):
    """One dispatcher on one device."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> DeviceInfo: ...

    @property
    def orders_cache_writes(self) -> bool:
        """Whether a dispatch of a recording sees what an earlier one of the same recording wrote to a CACHE buffer."""

    def buffer(self, nbytes: int, use: Use) -> Buffer:
        """A new buffer. LimitError beyond max_buffer_bytes, DeviceMemoryError when there is no room."""

    def write(self, buffer: Buffer, data: Words, offset: int = 0) -> None:
        """Copy ``data`` to the buffer from word ``offset``. INPUT: takes effect at the next submission; DATA: now.

        INPUT writes cost no submission. DATA writes may make one, and so may OUTPUT writes (a test poisons with them).
        """

    def read(self, buffer: Buffer) -> Words:
        """The words of an OUTPUT buffer as the last finished submission left them (a copy)."""

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> Kernel:
        """A pipeline; ``spec`` gives decl.spec's uint32 values in order. Compiles here or at the first run."""

    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> Recording:
        """Record ``steps`` in order. A step sees what earlier steps wrote (by the kernels' declared access).

        INPUT buffers among the steps' buffers are made current first, OUTPUT buffers can be read after wait().
        """

    def run(self, recording: Recording) -> None:
        """Submit, and wait until it has finished."""

    def timings(self, recording: Recording) -> list[tuple[float, float]]:
        """(begin, end) seconds of every step of the last run, from one arbitrary zero; recorded with timestamps."""

    def empty_submit(self) -> None:
        """Submit nothing and wait: the floor of a call's host time."""

    def close(self) -> None:
        """Destroy everything made by this runtime. Later calls raise ClosedError."""


COMPILE_HEADROOM: Final = 512 << 20  # address space that a CPU driver's compiler is given at least


@runtime_checkable
class HostSequences(Protocol):
    """A runtime that can record into a command sequence which a host program owns and evaluates."""

    def host_tensor(self, tensor: Any) -> Buffer:
        """A tensor of the host as a buffer: bound, never written by the runtime, never freed."""

    def chained_buffer(self, nbytes: int) -> Buffer:
        """SCRATCH that orders the steps of one sequence, whatever its size."""

    def record_into(self, sequence: Any, steps: Sequence[Dispatch]) -> Recording:
        """Record ``steps`` behind what the host's sequence holds. Closing frees the pipelines."""


# --- refusals that both dispatchers make -------------------------------------------------------------------


def check_nbytes(nbytes: int, info: DeviceInfo, limit: int) -> int:
    """``nbytes`` if one buffer can have that size: a positive multiple of 4 up to ``limit``."""
    nbytes = check_int("nbytes", nbytes, 1)
    if nbytes % 4:
        raise ArgumentError(f"nbytes: got {nbytes}, expected a multiple of 4")
    if nbytes > limit:
        raise LimitError(
            f"buffer: {nbytes:,} bytes are needed, {info.name} takes at most {limit:,} in one storage buffer; "
            "use a shorter context or a smaller dtype"
        )
    return nbytes


def check_step(at: int, step: Dispatch, info: DeviceInfo) -> None:
    """Refuse a step whose buffers are not the kernel's bindings, or whose grid the device does not take."""
    decl = step.kernel.decl
    if len(step.buffers) != len(decl.bindings):
        raise ArgumentError(
            f"steps[{at}].buffers: got {len(step.buffers)}, expected the {len(decl.bindings)} of kernel {decl.name}: "
            f"{', '.join(b.name for b in decl.bindings)}"
        )
    for axis, count, most in zip("xyz", step.groups, info.max_workgroups, strict=True):
        if check_int(f"steps[{at}].groups {axis}", count, 1) > most:
            raise LimitError(
                f"steps[{at}].groups: kernel {decl.name} needs {step.groups}, {info.name} takes at most "
                f"{info.max_workgroups}; use fewer splits or rows"
            )


def no_room(nbytes: int, free: int, info: DeviceInfo) -> DeviceMemoryError:
    """The error of an allocation that does not fit."""
    return DeviceMemoryError(
        f"buffer: {nbytes:,} bytes are needed, {info.name} has {free:,} free; close other buffers or programs, or ask "
        "for less"
    )


def no_host_memory(info: DeviceInfo) -> DeviceMemoryError:
    """The error of an allocation of host memory that failed in a call on ``info``."""
    return DeviceMemoryError(f"{info.name}: the process has no host memory left; ask for less, or raise its limit")


def was_lost(info: DeviceInfo) -> DeviceLostError:
    """The error of a call on a device that was lost in an earlier one."""
    return DeviceLostError(f"{info.name} was lost earlier; open a new Device")


def check_compile_room(info: DeviceInfo) -> None:
    """Refuse what makes the driver of a CPU device compile where the process has too little address space for it.

    Such a driver compiles with LLVM, which ends the process where an allocation fails. DeviceMemoryError unless
    RLIMIT_AS leaves COMPILE_HEADROOM beyond what the process has mapped.
    """
    if info.kind != "cpu" or resource is None:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: how much is mapped is not known
        return
    free = limit - pages * resource.getpagesize()
    if free < COMPILE_HEADROOM:
        raise DeviceMemoryError(
            f"{info.name} compiles with LLVM, which needs up to {COMPILE_HEADROOM:,} bytes of address space: the "
            f"process's limit (RLIMIT_AS, {limit:,}) leaves {max(0, free):,}; raise it (ulimit -v)"
        )


def after_close(info: DeviceInfo) -> ClosedError:
    """The error of a call on a closed device."""
    return ClosedError(f"{info.name}: used after close(); open it again with Device.open()")


def after_fork(info: DeviceInfo) -> ForkedProcessError:
    """The error of a call in a process that did not open the device."""
    return ForkedProcessError(f"{info.name}: opened before fork(); open a Device in the child process")


# --- the devices of this machine -----------------------------------------------------------------------------

ASSUMED_COMPUTE_UNITS: Final = 16  # where no query tells; compute_units_source is then "assumed"
API_1_1: Final = 1 << 22 | 1 << 12
API_1_2: Final = 1 << 22 | 2 << 12
API_1_3: Final = 1 << 22 | 3 << 12
QUEUE_COMPUTE: Final = 2  # VK_QUEUE_COMPUTE_BIT
_PREFERENCE: Final = ("discrete", "integrated", "virtual", "cpu", "other")
_KINDS: Final = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}  # VkPhysicalDeviceType
_VENDORS: Final = {
    0x1002: "AMD",
    0x1010: "Imagination",
    0x106B: "Apple",
    0x10DE: "NVIDIA",
    0x13B5: "Arm",
    0x14E4: "Broadcom",
    0x1AE0: "Google",
    0x5143: "Qualcomm",
    0x8086: "Intel",
    0x10005: "Mesa",
}
_INSTALL_LOADER: Final = (
    "install the Vulkan loader (Debian, Ubuntu: libvulkan1; Fedora: vulkan-loader; Arch: vulkan-icd-loader)"
)
_INSTALL_DRIVER: Final = (
    "install the GPU's Vulkan driver (AMD, Intel and the software driver lavapipe: mesa-vulkan-drivers; "
    "NVIDIA: its own driver), and see that VK_ICD_FILENAMES and VK_DRIVER_FILES, where set, name real files"
)
# VkResult to error; the rest is ZincAttnError
_MEMORY_RESULTS: Final = (-1, -2, -5, -10, -12, -1000069000)  # host, device, map, too many, pools
_LOST_RESULT: Final = -4
_NO_DRIVER_RESULTS: Final = (-3, -6, -7, -8, -9)  # initialisation, layer, extension, feature, driver


class Heap(NamedTuple):
    """A memory heap: its size, what VK_EXT_memory_budget says is free (else the size), and where it lies."""

    size: int
    free: int
    device_local: bool


class Vulkan:
    """libvulkan's raw functions (`lib`), its C types (`ffi`), its constants (`c`), and typed errors."""

    def __init__(self) -> None:
        try:
            from vulkan import _vulkan  # the import opens libvulkan
        except ImportError as e:
            raise RuntimeUnavailableError("the Python package `vulkan` is missing: pip install vulkan") from e
        except OSError as e:
            raise NoVulkanError(f"there is no libvulkan on this machine: {_INSTALL_LOADER}") from e
        self.c: Any = _vulkan
        self.ffi: Any = _vulkan.ffi
        self.lib: Any = _vulkan.lib
        # A C struct does not own what its pointer fields point at: keep it as long as the struct lives.
        self._kept: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
        self._pin: Any = None

    def struct(self, name: str, **fields: Any) -> Any:
        """Pointer to a new struct with sType filled in; keeps every cdata among ``fields`` alive."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=[0-9])", "_", name[2:])
        if (kind := getattr(self.c, f"VK_STRUCTURE_TYPE_{words.upper()}", None)) is not None:
            fields["sType"] = kind
        made = self.ffi.new(f"{name}*", fields)
        self._kept[made] = tuple(fields.values())
        return made

    def array(self, ctype: str, values: Sequence[Any]) -> Any:
        """New C array; struct elements are given as pointers from ``struct`` and kept alive."""
        structs = self.ffi.typeof(ctype).kind == "struct"
        made = self.ffi.new(f"{ctype}[]", [v[0] for v in values] if structs else list(values))
        self._kept[made] = tuple(values)
        return made

    def error(self, result: int, what: str, other: type[ZincAttnError] = ZincAttnError) -> ZincAttnError:
        """The typed error of a VkResult below 0; ``other`` where no type is particular to it."""
        names = (n for n, v in vars(self.c).items() if n.startswith("VK_ERROR_") and v == result)
        text = f"{what}: {next(names, f'VkResult {result}')}"
        if result in _MEMORY_RESULTS:
            return DeviceMemoryError(text)
        if result == _LOST_RESULT:
            return DeviceLostError(f"{text}; open a new Device")
        if result in _NO_DRIVER_RESULTS and other is ZincAttnError:
            return NoVulkanError(f"{text}; {_INSTALL_DRIVER}")
        return other(text)

    def check(self, result: int, what: str) -> None:
        if result:
            raise self.error(result, what)

    def listed(self, function: Any, ctype: str, *args: Any) -> list[Any]:
        """All elements of one of Vulkan's 'count, then array' queries."""
        count = self.ffi.new("uint32_t*")
        self.check(function(*args, count, self.ffi.NULL) or 0, f"listing {ctype}")
        items = self.ffi.new(f"{ctype}[]", count[0])
        if count[0]:
            self.check(function(*args, count, items) or 0, f"listing {ctype}")
        made = [items[i] for i in range(count[0])]
        for item in made:  # a struct of the array does not keep the array alive
            if self.ffi.typeof(item).kind == "struct":
                self._kept[item] = (items,)
        return made

    def create_instance(self) -> tuple[Any, int]:
        """(VkInstance, API version asked for: the loader's, at most 1.3). The caller destroys it."""
        version = self.ffi.new("uint32_t*")
        try:
            self.check(self.lib.vkEnumerateInstanceVersion(version), "vkEnumerateInstanceVersion")
        except AttributeError:  # a Vulkan 1.0 loader lacks the function
            version[0] = 1 << 22
        if version[0] < API_1_1:
            raise NoVulkanError(f"the Vulkan loader is older than Vulkan 1.1: {_INSTALL_LOADER}")
        api = min(int(version[0]), API_1_3)
        app = self.struct("VkApplicationInfo", apiVersion=api)
        made = self.ffi.new("VkInstance*")
        info = self.struct("VkInstanceCreateInfo", pApplicationInfo=app)
        self.check(self.lib.vkCreateInstance(info, self.ffi.NULL, made), "vkCreateInstance")
        return made[0], api

    def keep_drivers_loaded(self) -> None:
        """Make one instance that is never destroyed, so that closing the last other one unloads no driver.

        Drivers leave something behind at each unloading: SwiftShader a file descriptor and a thread key, of
        which a process has 1,024.
        """
        if self._pin is None:
            self._pin = self.create_instance()[0]

    def physical_devices(self, instance: Any) -> list[Any]:
        """VkPhysicalDevice handles in the loader's order; NoVulkanError where there is none."""
        found = self.listed(self.lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", instance)
        if not found:
            raise NoVulkanError(f"the Vulkan loader knows no device: {_INSTALL_DRIVER}")
        return found

    def extensions(self, physical: Any) -> set[str]:
        query = self.lib.vkEnumerateDeviceExtensionProperties
        found = self.listed(query, "VkExtensionProperties", physical, self.ffi.NULL)
        return {self.text(e.extensionName) for e in found}

    def text(self, chars: Any) -> str:
        return str(self.ffi.string(chars).decode(errors="replace"))

    def properties(self, physical: Any, *chain: str) -> list[Any]:
        """[VkPhysicalDeviceProperties, then the structs named in ``chain``], filled by one query."""
        made: list[Any] = []
        for name in reversed(chain):
            made.insert(0, self.struct(name, pNext=made[0] if made else self.ffi.NULL))
        top = self.struct("VkPhysicalDeviceProperties2", pNext=made[0] if made else self.ffi.NULL)
        self.lib.vkGetPhysicalDeviceProperties2(physical, top)
        inner = top.properties  # a view: it does not own the memory
        self._kept[inner] = (top,)
        return [inner, *made]

    def compute_family(self, physical: Any) -> tuple[int, int]:
        """(queue family index, timestampValidBits) of the first family with compute; index -1: none has."""
        query = self.lib.vkGetPhysicalDeviceQueueFamilyProperties
        families = self.listed(query, "VkQueueFamilyProperties", physical)
        for index, family in enumerate(families):
            if family.queueFlags & QUEUE_COMPUTE:
                return index, int(family.timestampValidBits)
        return -1, 0

    def heaps(self, physical: Any, budget: bool) -> list[Heap]:
        """Heaps in the device's order; ``budget``: the device has VK_EXT_memory_budget."""
        room = self.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        memory = self.struct("VkPhysicalDeviceMemoryProperties2", pNext=room if budget else self.ffi.NULL)
        self.lib.vkGetPhysicalDeviceMemoryProperties2(physical, memory)
        found = []
        for i in range(memory.memoryProperties.memoryHeapCount):
            heap = memory.memoryProperties.memoryHeaps[i]
            free = room.heapBudget[i] - room.heapUsage[i] if budget else heap.size
            found.append(Heap(int(heap.size), max(0, int(free)), bool(heap.flags & 1)))
        return found


loader = lru_cache(maxsize=1)(Vulkan)


@contextmanager
def _devices() -> Iterator[tuple[Vulkan, int, list[Any]]]:
    vk = loader()
    instance, api = vk.create_instance()
    try:
        yield vk, api, vk.physical_devices(instance)
    finally:
        vk.lib.vkDestroyInstance(instance, vk.ffi.NULL)


def list_devices() -> list[DeviceInfo]:
    """Every Vulkan device, in the loader's order. NoVulkanError without loader, driver or device."""
    with _devices() as (vk, api, found):
        return [device_info(vk, api, physical, index) for index, physical in enumerate(found)]


def memory_budget(index: int) -> tuple[int, int]:
    """(bytes, free bytes) of the largest device-local heap of device ``index``.

    Free is what VK_EXT_memory_budget grants this process now, or the heap's size where the device lacks it.
    """
    with _devices() as (vk, _, found):
        if not 0 <= index < len(found):
            raise DeviceNotFoundError(f"device: got index {index}, there are {len(found)} Vulkan devices")
        heap = _main_heap(vk.heaps(found[index], "VK_EXT_memory_budget" in vk.extensions(found[index])))
        return heap.size, heap.free


def vendor_name(vendor_id: int) -> str:
    """Name of a PCI or Khronos vendor id; the id in hexadecimal where it is not known here."""
    return _VENDORS.get(vendor_id, f"0x{vendor_id:04X}")


def choose(devices: Sequence[DeviceInfo], request: int | str | None = None) -> DeviceInfo:
    """The device that ``request`` names. None: discrete, integrated, virtual, cpu, other; then by index.

    An int or a string of digits is an index; any other string a piece of the name in any case (a whole name
    wins over a piece). DeviceNotFoundError, which lists what exists, unless exactly one matches.
    """
    if not devices:
        raise NoVulkanError(f"there is no Vulkan device: {_INSTALL_DRIVER}")
    if request is None:
        return min(devices, key=lambda d: (_PREFERENCE.index(d.kind), d.index))
    if isinstance(request, bool) or not isinstance(request, int | str):
        raise ArgumentError(f"device: got {shown(request)}, expected None, an index or a piece of a device's name")
    index = parse_digits(request) if isinstance(request, str) else request
    if index is not None:
        found = [d for d in devices if d.index == index]
    else:
        wanted = str(request).strip().lower()
        found = [d for d in devices if d.name.lower() == wanted]
        found = found or [d for d in devices if wanted and wanted in d.name.lower()]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{d.index}: {d.name} ({d.kind})" for d in (found or devices))
    if found:
        raise DeviceNotFoundError(f"device: {shown(request)} matches {len(found)} devices, give an index: {there}")
    raise DeviceNotFoundError(f"device: no Vulkan device matches {shown(request)}; the devices are {there}")


def device_info(vk: Vulkan, api: int, physical: Any, index: int) -> DeviceInfo:
    """The facts of one VkPhysicalDevice of an instance made for version ``api``."""
    extensions = vk.extensions(physical)
    props, ident, wave = vk.properties(physical, "VkPhysicalDeviceIDProperties", "VkPhysicalDeviceSubgroupProperties")
    driver = str(props.driverVersion)
    if min(api, props.apiVersion) >= API_1_2 or "VK_KHR_driver_properties" in extensions:
        text = vk.properties(physical, "VkPhysicalDeviceDriverProperties")[1]
        driver = f"{vk.text(text.driverName)} {vk.text(text.driverInfo)}".strip()
    kind = _KINDS.get(props.deviceType, "other")
    units, source = _compute_units(vk, physical, kind, extensions)
    limits, version = props.limits, props.apiVersion
    _, timestamp_bits = vk.compute_family(physical)
    return DeviceInfo(
        index=index,
        name=vk.text(props.deviceName),
        kind=kind,
        vendor=vendor_name(props.vendorID),
        driver=driver,
        api_version=f"{version >> 22 & 0x7F}.{version >> 12 & 0x3FF}.{version & 0xFFF}",
        uuid=bytes(ident.deviceUUID).hex(),
        compute_units=units,
        compute_units_source=source,
        subgroup_size=int(wave.subgroupSize),
        memory_bytes=_main_heap(vk.heaps(physical, budget=False)).size,
        max_buffer_bytes=int(limits.maxStorageBufferRange),
        max_workgroups=(*(int(n) for n in limits.maxComputeWorkGroupCount),),  # type: ignore[arg-type]
        timestamp_period_ns=float(limits.timestampPeriod) if timestamp_bits else 0.0,
    )


def _main_heap(heaps: Sequence[Heap]) -> Heap:
    return max(heaps, key=lambda h: (h.device_local, h.size))


def _compute_units(vk: Vulkan, physical: Any, kind: str, extensions: set[str]) -> tuple[int, str]:
    """(count, which query gave it); a count of 0 from a driver means that it does not know."""
    units, source = 0, ""
    if "VK_AMD_shader_core_properties2" in extensions:
        source = "VK_AMD_shader_core_properties2"
        amd2 = vk.properties(physical, "VkPhysicalDeviceShaderCoreProperties2AMD")[1]
        units = int(amd2.activeComputeUnitCount)
    if not units and "VK_AMD_shader_core_properties" in extensions:
        source = "VK_AMD_shader_core_properties"
        amd = vk.properties(physical, "VkPhysicalDeviceShaderCorePropertiesAMD")[1]
        arrays = amd.shaderEngineCount * amd.shaderArraysPerEngineCount
        units = int(arrays * amd.computeUnitsPerShaderArray)
    if not units and "VK_NV_shader_sm_builtins" in extensions:
        source = "VK_NV_shader_sm_builtins"
        nv = vk.properties(physical, "VkPhysicalDeviceShaderSMBuiltinsPropertiesNV")[1]
        units = int(nv.shaderSMCount)
    if not units and kind == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        source = "CPU threads of this process" if affinity else "CPU threads"
        units = len(affinity(0)) if affinity else os.cpu_count() or 0
    return (units, source) if units else (ASSUMED_COMPUTE_UNITS, "assumed")
