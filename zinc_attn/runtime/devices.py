"""The Vulkan devices of this machine: their facts, their memory, and which of them a request names.

Each query makes an instance and destroys it, so that it works after fork(), too. The query for memory, which every
cache makes, uses the instance that this process keeps, if any: a driver reads its files for each new instance.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..canonical.constants import LEAVES_PER_NODE
from ..checks import parse_digits, shown
from ..errors import ArgumentError, DeviceNotFoundError, NoVulkanError
from ..kernels.families import CPU, Layout, layout_of
from ..kernels.matrix import MatrixFacts, best_fragment
from ..kernels.sizes import LEAST_SHARED_BYTES
from ..kernels.tuning import CPU_WAVE
from ..limits import WAVE
from .cpu.device import memory_bytes, threads
from .loader import API_1_2, API_1_3, FLOAT16, FLOAT32, INSTALL_DRIVER, SINT8, SINT32, Heap, Vulkan, loader
from .protocol import DeviceInfo

DOT_EXTENSION: Final = "VK_KHR_shader_integer_dot_product"  # core in Vulkan 1.3
# Structs of device features that kernels with matrix units need, with the features of each.
MATRIX_FEATURES: Final = {
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ("cooperativeMatrix",),
    "VkPhysicalDeviceShaderFloat16Int8Features": ("shaderFloat16", "shaderInt8"),
    "VkPhysicalDeviceVulkanMemoryModelFeatures": ("vulkanMemoryModel",),
}
FMA_FEATURES: Final = 1000579000  # VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FMA_FEATURES_KHR
CPU_SUBGROUP: Final = 8  # on a CPU; with 16, lavapipe of Mesa 26.2 crashes as it compiles matrix products
FAST_LLVM: Final = 22  # of lavapipe: from this version on larger programs compile in seconds
ASSUMED_COMPUTE_UNITS: Final = 16  # where no query tells; compute_units_source is then "assumed"
COMPUTE_STAGE: Final = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
SHUFFLE: Final = 0x10  # VK_SUBGROUP_FEATURE_SHUFFLE_BIT
_PREFERENCE: Final = ("discrete", "integrated", "virtual", "cpu", "other")
_KINDS: Final = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}  # VkPhysicalDeviceType
# The extensions that tell the compute units, best first: the struct of each, and the fields whose product they are.
_UNIT_QUERIES: Final = (
    ("VK_AMD_shader_core_properties2", "VkPhysicalDeviceShaderCoreProperties2AMD", ("activeComputeUnitCount",)),
    (
        "VK_AMD_shader_core_properties",
        "VkPhysicalDeviceShaderCorePropertiesAMD",
        ("shaderEngineCount", "shaderArraysPerEngineCount", "computeUnitsPerShaderArray"),
    ),
    ("VK_NV_shader_sm_builtins", "VkPhysicalDeviceShaderSMBuiltinsPropertiesNV", ("shaderSMCount",)),
)
_VENDORS: Final = {
    0x1002: "AMD", 0x1010: "Imagination", 0x106B: "Apple", 0x10DE: "NVIDIA", 0x13B5: "Arm", 0x14E4: "Broadcom",
    0x1AE0: "Google", 0x5143: "Qualcomm", 0x8086: "Intel", 0x10005: "Mesa",
}  # fmt: skip


@contextmanager
def _devices(instance_kept: bool = False) -> Iterator[tuple[Vulkan, Any, int, list[Any]]]:
    vk = loader()
    if instance_kept and (kept := vk.kept_instance()) is not None:
        yield vk, *kept, vk.physical_devices(kept[0])
        return
    instance, api = vk.create_instance()
    try:
        yield vk, instance, api, vk.physical_devices(instance)
    finally:
        vk.lib.vkDestroyInstance(instance, vk.ffi.NULL)


def list_devices() -> list[DeviceInfo]:
    """Every Vulkan device, in the loader's order. NoVulkanError without loader, driver or device."""
    with _devices() as (vk, instance, api, physicals):
        return [device_info(vk, instance, api, physical, index) for index, physical in enumerate(physicals)]


def memory_budget(info: DeviceInfo) -> tuple[int, int]:
    """(bytes, free bytes) of the largest device-local heap of a device, or of the host's memory.

    Free is what VK_EXT_memory_budget grants this process now, or the heap's size where the device lacks it.
    """
    if info.native:
        return memory_bytes()
    index = info.index
    with _devices(instance_kept=True) as (vk, _, _, physicals):
        if not 0 <= index < len(physicals):
            raise DeviceNotFoundError(f"device: got index {index}, there are {len(physicals)} Vulkan devices")
        heap = _main_heap(vk.heaps(physicals[index], "VK_EXT_memory_budget" in vk.extensions(physicals[index])))
        return heap.size, heap.free


def vendor_name(vendor_id: int) -> str:
    """Name of a PCI or Khronos vendor id; the id in hexadecimal where it is not known here."""
    return _VENDORS.get(vendor_id, f"0x{vendor_id:04X}")


def choose(devices: Sequence[DeviceInfo], request: int | str | None = None) -> DeviceInfo:
    """The device that ``request`` names.

    None: discrete, integrated, virtual, cpu, other, then by index; native code of the processor comes last. An int or a
    string of digits is an index; any other string a piece of the name in any case (a whole name wins over a piece).
    DeviceNotFoundError, which lists the devices, unless exactly one matches.
    """
    if not devices:
        raise NoVulkanError(f"there is no Vulkan device: {INSTALL_DRIVER}")
    if request is None:
        return min(devices, key=lambda d: (d.native, _PREFERENCE.index(d.kind), d.index))
    if isinstance(request, bool) or not isinstance(request, int | str):
        raise ArgumentError(f"device: got {shown(request)}, expected None, an index or a piece of a device's name")
    index = parse_digits(request) if isinstance(request, str) else request
    if index is not None:
        matches = [d for d in devices if d.index == index]
    else:
        wanted = str(request).strip().lower()
        matches = [d for d in devices if d.name.lower() == wanted]
        matches = matches or [d for d in devices if wanted and wanted in d.name.lower()]
    if len(matches) == 1:
        return matches[0]
    there = ", ".join(f"{d.index}: {d.name} ({d.kind})" for d in (matches or devices))
    if matches:
        raise DeviceNotFoundError(f"device: {shown(request)} matches {len(matches)} devices, give an index: {there}")
    raise DeviceNotFoundError(f"device: no Vulkan device matches {shown(request)}; the devices are {there}")


def device_info(vk: Vulkan, instance: Any, api: int, physical: Any, index: int) -> DeviceInfo:
    """The facts of one VkPhysicalDevice of an instance that was made for version ``api``."""
    extensions = vk.extensions(physical)
    props, ident, wave, sizes = vk.properties(
        physical,
        "VkPhysicalDeviceIDProperties",
        "VkPhysicalDeviceSubgroupProperties",
        "VkPhysicalDeviceMaintenance3Properties",
    )
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
        max_buffer_bytes=int(min(limits.maxStorageBufferRange, sizes.maxMemoryAllocationSize)),
        max_workgroups=(*(int(n) for n in limits.maxComputeWorkGroupCount),),  # type: ignore[arg-type]
        timestamp_period_ns=float(limits.timestampPeriod) if timestamp_bits else 0.0,
        shared_memory_bytes=int(limits.maxComputeSharedMemorySize),
        layout=_layout(vk, physical, props, kind, extensions, min(api, version)),
        refusal=_refusal(limits),
        fma_operation="VK_KHR_shader_fma" in extensions and bool(fma_features(vk, physical).multiviewGeometryShader),
        integer_dots=min(api, version) >= API_1_3 or DOT_EXTENSION in extensions,
        matrix=_matrix_facts(vk, instance, physical, extensions, min(api, version)),
    )


def _refusal(limits: Any) -> str | None:
    """The device's limit that a workgroup of pass 1, eight waves with a leaf each, exceeds; None if it fits."""
    invocations = LEAVES_PER_NODE * WAVE
    for name, got, least in (
        ("maxComputeWorkGroupInvocations", limits.maxComputeWorkGroupInvocations, invocations),
        ("maxComputeWorkGroupSize[0]", limits.maxComputeWorkGroupSize[0], invocations),
        ("maxComputeSharedMemorySize", limits.maxComputeSharedMemorySize, LEAST_SHARED_BYTES),
    ):
        if got < least:
            return f"{name} is {got}, expected {least} or more"
    return None


def _layout(vk: Vulkan, physical: Any, props: Any, kind: str, extensions: set[str], api: int) -> Layout:
    """How pass 1 lies in the device's registers. CPU devices get CPU_WAVE lanes, whose programs are larger, where LLVM
    compiles these in seconds and not in half a minute."""
    if kind == "cpu":
        llvm = re.search(r"LLVM (\d+)", vk.text(props.deviceName))
        return CPU._replace(lanes=CPU_WAVE) if llvm is not None and int(llvm[1]) >= FAST_LLVM else CPU
    least = WAVE
    if asks_for_waves(vk, physical, extensions, api):
        least = vk.properties(physical, "VkPhysicalDeviceSubgroupSizeControlProperties")[1].minSubgroupSize
    return layout_of(kind, props.vendorID, props.driverVersion >> 22, least)


def asks_for_waves(vk: Vulkan, physical: Any, extensions: set[str], api: int) -> bool:
    """Whether plain Vulkan can ask for subgroups of a wave's size."""
    if api < API_1_3 and "VK_EXT_subgroup_size_control" not in extensions:
        return False
    sizes = vk.properties(physical, "VkPhysicalDeviceSubgroupSizeControlProperties")[1]
    asked = sizes.minSubgroupSize <= WAVE <= sizes.maxSubgroupSize
    return bool(asked and sizes.requiredSubgroupSizeStages & COMPUTE_STAGE)


def fma_features(vk: Vulkan, physical: Any) -> Any:
    """VkPhysicalDeviceShaderFmaFeaturesKHR, which the package ``vulkan`` does not know, in a struct of the same layout.

    Its three features are those of float16, float32 (multiviewGeometryShader) and float64.
    """
    features = vk.struct("VkPhysicalDeviceMultiviewFeatures")
    features.sType = FMA_FEATURES
    vk.lib.vkGetPhysicalDeviceFeatures2(physical, vk.struct("VkPhysicalDeviceFeatures2", pNext=features))
    return features


def matrix_needs(api: int) -> set[str]:
    """The extensions to enable for matrix units on a device of Vulkan version ``api``."""
    older = set() if api >= API_1_2 else {"VK_KHR_shader_float16_int8", "VK_KHR_vulkan_memory_model"}
    return {"VK_KHR_cooperative_matrix"} | older


def _matrix_facts(vk: Vulkan, instance: Any, physical: Any, extensions: set[str], api: int) -> MatrixFacts:
    """The facts for kernels with matrix units: the fragments of the device that suit them, and two limits."""
    props, wave = vk.properties(physical, "VkPhysicalDeviceSubgroupProperties")
    limits, fragment, int8 = props.limits, None, None
    waves = wave.subgroupSize == WAVE or asks_for_waves(vk, physical, extensions, api)
    waves = waves or (wave.subgroupSize <= CPU_SUBGROUP and _KINDS.get(props.deviceType) == "cpu")
    if waves and wave.supportedOperations & SHUFFLE and not matrix_needs(api) - extensions:
        features = vk.features(physical, *MATRIX_FEATURES)
        offered = zip(features, MATRIX_FEATURES.values(), strict=True)
        if all(getattr(feature, name) for feature, names in offered for name in names):
            fragment = best_fragment(vk.matrix_fragments(instance, physical, FLOAT16, FLOAT32))
            int8 = best_fragment(vk.matrix_fragments(instance, physical, SINT8, SINT32))
    invocations = min(int(limits.maxComputeWorkGroupInvocations), int(limits.maxComputeWorkGroupSize[0]))
    return MatrixFacts(fragment, int(limits.maxComputeSharedMemorySize), invocations, int8)


def _main_heap(heaps: Sequence[Heap]) -> Heap:
    """The largest device-local heap; an empty one where a device says that it has no memory."""
    return max(heaps, key=lambda h: (h.device_local, h.size), default=Heap(0, 0, False))


def _compute_units(vk: Vulkan, physical: Any, kind: str, extensions: set[str]) -> tuple[int, str]:
    """(count, its source). A driver that does not know the count reports 0."""
    for extension, struct, factors in _UNIT_QUERIES:
        if extension in extensions:
            told = vk.properties(physical, struct)[1]
            if units := math.prod(int(getattr(told, name)) for name in factors):
                return units, extension
    if kind == "cpu":
        return threads(), "CPU threads of this process" if hasattr(os, "sched_getaffinity") else "CPU threads"
    return ASSUMED_COMPUTE_UNITS, "assumed"
