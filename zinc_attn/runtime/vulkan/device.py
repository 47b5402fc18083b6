"""A Vulkan instance and a logical device with one compute queue, and functions that make and destroy its objects."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ...errors import DeviceLostError, DeviceNotFoundError, NoVulkanError, ZincAttnError
from ...kernels.matrix import NO_MATRICES
from ..devices import DOT_EXTENSION, MATRIX_FEATURES, asks_for_waves, device_info, fma_features, matrix_needs
from ..loader import API_1_1, API_1_3, loader
from ..protocol import DeviceInfo

Undo = list[Callable[[], object]]  # calls that destroy the parts of an object, from last to first


def destroy(undo: Undo) -> None:
    """Destroy the parts of an object, the youngest first."""
    while undo:
        undo.pop()()


class HostDevice(NamedTuple):
    """The handles of a device that a host program opened. is_open: whether the program still has it."""

    instance: int
    physical: int
    device: int
    queue: int
    family: int
    is_open: Callable[[], bool]


class LogicalDevice:
    """The open device. ``lost``: a call reported that it is lost, and no further call is made.

    host: a host program's device, which the program closes, and which has only the features that the program enabled.
    Errors at opening: NoVulkanError, DeviceNotFoundError (the devices changed since they were listed),
    DeviceMemoryError, DeviceLostError. The objects made by then are in ``undo``, for the caller to destroy.
    """

    def __init__(self, info: DeviceInfo, undo: Undo, host: HostDevice | None = None) -> None:
        self.info, self.undo, self.host = info, undo, host
        self.vk = loader()
        self.ffi, self.lib, self.null = self.vk.ffi, self.vk.lib, self.vk.ffi.NULL
        self.lost = False
        self.vk.keep_drivers_loaded()
        if host is None:
            self.instance, api = self.vk.create_instance()
            undo.append(functools.partial(self.lib.vkDestroyInstance, self.instance, self.null))
            self.physical = self._find(api)
        else:
            api = API_1_1  # the host's version is unknown
            kinds = ("VkInstance", "VkPhysicalDevice", "VkDevice", "VkQueue")
            handles = (self.ffi.cast(*pair) for pair in zip(kinds, host[:4], strict=True))
            self.instance, self.physical, self.handle, self.queue = handles
        (self.properties,) = self.vk.properties(self.physical)
        if self.properties.apiVersion < API_1_1:
            raise NoVulkanError(f"{info.name} offers Vulkan 1.0, this package needs 1.1: update its driver")
        self.max_bindings = int(self.properties.limits.maxPerStageDescriptorStorageBuffers)
        self.family, self.timestamp_bits = self.vk.compute_family(self.physical, None if host is None else host.family)
        if self.family < 0:
            raise NoVulkanError(f"{info.name} has no compute queue; choose another device")
        extensions = self.vk.extensions(self.physical)
        self.has_budget = "VK_EXT_memory_budget" in extensions
        self.wave32 = False
        if host is None:
            self._open(min(api, self.properties.apiVersion), extensions)
        else:
            self.info = replace(info.with_own_subgroups(), matrix=NO_MATRICES, fma_operation=False, integer_dots=False)

    def is_gone(self) -> bool:
        """Whether a host program has destroyed it, and all its objects."""
        return self.host is not None and not self.host.is_open()

    def _open(self, api: int, extensions: set[str]) -> None:
        """Make the device with all that kernels can use of Vulkan version ``api``."""
        features, enable = self.null, list[str]()
        alive = []  # structs that an assignment to pNext does not keep
        if asks_for_waves(self.vk, self.physical, extensions, api):
            (features,) = self.vk.features(self.physical, "VkPhysicalDeviceSubgroupSizeControlFeatures")
            enable = [] if api >= API_1_3 else ["VK_EXT_subgroup_size_control"]
            self.wave32 = bool(features.subgroupSizeControl and features.computeFullSubgroups)
        if not self.wave32:
            self.info = self.info.with_own_subgroups()
        if self.info.matrix.fragment is not None or self.info.matrix.int8 is not None:
            enable += sorted(matrix_needs(api))
            for struct, names in MATRIX_FEATURES.items():
                features = self.vk.struct(struct, pNext=features, **dict.fromkeys(names, 1))
        if self.info.integer_dots:
            enable += [] if api >= API_1_3 else [DOT_EXTENSION]
            dot = self.vk.features(self.physical, "VkPhysicalDeviceShaderIntegerDotProductFeatures")[0]
            alive.append(features)
            dot.pNext, features = features, dot
        if self.info.fma_operation:
            enable.append("VK_KHR_shader_fma")
            fma = fma_features(self.vk, self.physical)
            alive.append(features)
            fma.pNext, features = features, fma
        self.handle = self._create_device(features, [self.ffi.new("char[]", name.encode()) for name in enable])
        self.undo.append(functools.partial(self.lib.vkDestroyDevice, self.handle, self.null))
        queue = self.ffi.new("VkQueue*")
        self.lib.vkGetDeviceQueue(self.handle, self.family, 0, queue)
        self.queue = queue[0]

    def _find(self, api: int) -> Any:
        """The VkPhysicalDevice that ``info`` describes."""
        devices, index = self.vk.physical_devices(self.instance), self.info.index
        there = devices[index : index + 1]
        if not there or device_info(self.vk, self.instance, api, there[0], index).uuid != self.info.uuid:
            raise DeviceNotFoundError(f"device {index}: {self.info.name} is not there any more; list again")
        return there[0]

    def _create_device(self, features: Any, enable: list[Any]) -> Any:
        queues = self.vk.struct(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=self.family,
            queueCount=1,
            pQueuePriorities=self.vk.array("float", [1.0]),
        )
        create = self.vk.struct(
            "VkDeviceCreateInfo",
            pNext=features,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(enable),
            ppEnabledExtensionNames=self.vk.array("char*", enable),
        )
        opened = self.ffi.new("VkDevice*")
        self.check(self.lib.vkCreateDevice(self.physical, create, self.null, opened), "vkCreateDevice")
        return opened[0]

    def check(self, result: int, what: str, other: type[ZincAttnError] = ZincAttnError) -> None:
        """Raise the typed error of a VkResult that is no success; ``other`` where no type is particular to it."""
        if result:
            error = self.vk.error(result, f"{what} on {self.info.name}", other)
            self.lost = self.lost or isinstance(error, DeviceLostError)
            raise error

    def create(self, undo: Undo, kind: str, info: Any) -> Any:
        """vkCreate<kind>(info); its vkDestroy goes to ``undo``."""
        handle = self.ffi.new(f"Vk{kind}*")
        result = getattr(self.lib, f"vkCreate{kind}")(self.handle, info, self.null, handle)
        self.check(result, f"vkCreate{kind}")
        undo.append(functools.partial(getattr(self.lib, f"vkDestroy{kind}"), self.handle, handle[0], self.null))
        return handle[0]

    def entry(self, name: str) -> Any:
        """The driver's own function ``name``, past the loader's dispatch."""
        address = self.lib.vkGetDeviceProcAddr(self.handle, self.ffi.new("char[]", name.encode()))
        return self.ffi.cast(f"PFN_{name}", address)

    @contextmanager
    def kept(self) -> Iterator[Undo]:
        """The undo list of an object that lives as long as the device; undone if making it fails."""
        undo: Undo = []
        try:
            yield undo
        except BaseException:
            destroy(undo)
            raise
        self.undo.extend(undo)
