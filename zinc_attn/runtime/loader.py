"""libvulkan through the ``vulkan`` package (cffi): its functions, structs and typed errors."""

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ..errors import DeviceLostError, DeviceMemoryError, NoVulkanError, RuntimeUnavailableError, ZincAttnError
from ..kernels.matrix import MatrixFragment
from .registry import Keeper

API_1_1: Final = 1 << 22 | 1 << 12
API_1_2: Final = 1 << 22 | 2 << 12
API_1_3: Final = 1 << 22 | 3 << 12
FLOAT16, FLOAT32, SINT8, SINT32 = 0, 1, 3, 5  # VkComponentTypeKHR
SCOPE_SUBGROUP: Final = 3
QUEUE_COMPUTE: Final = 2  # VK_QUEUE_COMPUTE_BIT
_INSTALL_LOADER: Final = (
    "install the Vulkan loader (Debian, Ubuntu: libvulkan1; Fedora: vulkan-loader; Arch: vulkan-icd-loader)"
)
INSTALL_DRIVER: Final = (
    "install the GPU's Vulkan driver (AMD, Intel and the software driver lavapipe: mesa-vulkan-drivers; "
    "NVIDIA: its own driver), and see that VK_ICD_FILENAMES and VK_DRIVER_FILES, where set, name real files"
)
# VkResult to error; the rest is ZincAttnError
_MEMORY_RESULTS: Final = (-1, -2, -5, -10, -12, -1000069000)  # host, device, map, too many, pools
_LOST_RESULT: Final = -4
_NO_DRIVER_RESULTS: Final = (-3, -6, -7, -8, -9)  # initialization, layer, extension, feature, driver


class Heap(NamedTuple):
    """A memory heap: its bytes, free bytes by VK_EXT_memory_budget (else all), and whether it is the device's."""

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
        self._keeper = Keeper()
        self._pin: tuple[Any, int, int] | None = None  # an instance, its API version and the process that made it

    def struct(self, name: str, **fields: Any) -> Any:
        """Pointer to a new struct with sType filled in; keeps every cdata among ``fields`` alive."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name[2:])
        for spelled in (words, re.sub(r"(?<=[a-z])(?=[0-9])", "_", words)):  # FLOAT16_INT8, PROPERTIES_2
            if (kind := getattr(self.c, f"VK_STRUCTURE_TYPE_{spelled.upper()}", None)) is not None:
                fields["sType"] = kind
        pointer = self.ffi.new(f"{name}*", fields)
        self._keeper.keep(pointer, *fields.values())
        return pointer

    def array(self, ctype: str, values: Sequence[Any]) -> Any:
        """New C array; struct elements are given as pointers from ``struct`` and kept alive."""
        structs = self.ffi.typeof(ctype).kind == "struct"
        table = self.ffi.new(f"{ctype}[]", [v[0] for v in values] if structs else list(values))
        self._keeper.keep(table, *values)
        return table

    def specialization(self, values: Sequence[int]) -> Any:
        """VkSpecializationInfo: the constant of id i is values[i], a uint32. It keeps its tables alive."""
        entries = [
            self.struct("VkSpecializationMapEntry", constantID=i, offset=4 * i, size=4) for i in range(len(values))
        ]
        return self.struct(
            "VkSpecializationInfo",
            mapEntryCount=len(values),
            pMapEntries=self.array("VkSpecializationMapEntry", entries),
            dataSize=4 * len(values),
            pData=self.array("uint32_t", values),
        )

    def error(self, result: int, what: str, other: type[ZincAttnError] = ZincAttnError) -> ZincAttnError:
        """The typed error of a VkResult below 0; ``other`` where no type is particular to it."""
        names = (n for n, v in vars(self.c).items() if n.startswith("VK_ERROR_") and v == result)
        text = f"{what}: {next(names, f'VkResult {result}')}"
        if result in _MEMORY_RESULTS:
            return DeviceMemoryError(text)
        if result == _LOST_RESULT:
            return DeviceLostError(f"{text}; open a new Device")
        if result in _NO_DRIVER_RESULTS and other is ZincAttnError:
            return NoVulkanError(f"{text}; {INSTALL_DRIVER}")
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
        values = [items[i] for i in range(count[0])]
        for item in values:  # a struct of the array does not keep the array alive
            if self.ffi.typeof(item).kind == "struct":
                self._keeper.keep(item, items)
        return values

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
        handle = self.ffi.new("VkInstance*")
        info = self.struct("VkInstanceCreateInfo", pApplicationInfo=app)
        self.check(self.lib.vkCreateInstance(info, self.ffi.NULL, handle), "vkCreateInstance")
        return handle[0], api

    def keep_drivers_loaded(self) -> None:
        """Make one instance that is never destroyed, so that closing the last other one unloads no driver.

        Unloading a driver leaks: SwiftShader leaves a file descriptor and one of the process's 1,024 thread keys.
        """
        if self._pin is None:
            self._pin = (*self.create_instance(), os.getpid())

    def kept_instance(self) -> tuple[Any, int] | None:
        """The instance of ``keep_drivers_loaded`` and its API version; None where this process has made none."""
        return self._pin[:2] if self._pin is not None and self._pin[2] == os.getpid() else None

    def physical_devices(self, instance: Any) -> list[Any]:
        """VkPhysicalDevice handles in the loader's order; NoVulkanError where there is none."""
        devices = self.listed(self.lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", instance)
        if not devices:
            raise NoVulkanError(f"the Vulkan loader knows no device: {INSTALL_DRIVER}")
        return devices

    def extensions(self, physical: Any) -> set[str]:
        query = self.lib.vkEnumerateDeviceExtensionProperties
        properties = self.listed(query, "VkExtensionProperties", physical, self.ffi.NULL)
        return {self.text(e.extensionName) for e in properties}

    def text(self, chars: Any) -> str:
        return str(self.ffi.string(chars).decode(errors="replace"))

    def _chained(self, names: Sequence[str]) -> list[Any]:
        """Empty structs of these names, each of which points to the next."""
        structs: list[Any] = []
        for name in reversed(names):
            structs.insert(0, self.struct(name, pNext=structs[0] if structs else self.ffi.NULL))
        return structs

    def properties(self, physical: Any, *chain: str) -> list[Any]:
        """[VkPhysicalDeviceProperties, then the structs named in ``chain``], filled by one query."""
        structs = self._chained(chain)
        top = self.struct("VkPhysicalDeviceProperties2", pNext=structs[0] if structs else self.ffi.NULL)
        self.lib.vkGetPhysicalDeviceProperties2(physical, top)
        inner = top.properties  # a view: it does not own the memory
        self._keeper.keep(inner, top)
        return [inner, *structs]

    def features(self, physical: Any, *chain: str) -> list[Any]:
        """The feature structs named in ``chain``, filled by one query; each points to the next."""
        structs = self._chained(chain)
        self.lib.vkGetPhysicalDeviceFeatures2(physical, self.struct("VkPhysicalDeviceFeatures2", pNext=structs[0]))
        return structs

    def matrix_fragments(self, instance: Any, physical: Any, factor: int, total: int) -> list[MatrixFragment]:
        """The shapes of products with sums, of these VkComponentTypeKHR, of a device that has matrix units."""
        name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
        address = self.lib.vkGetInstanceProcAddr(instance, self.ffi.new("char[]", name.encode()))
        if address == self.ffi.NULL:
            return []
        query, count = self.ffi.cast(f"PFN_{name}", address), self.ffi.new("uint32_t*")
        if query(physical, count, self.ffi.NULL):
            return []
        items = self.ffi.new("VkCooperativeMatrixPropertiesKHR[]", count[0])
        for i in range(count[0]):
            items[i].sType = self.c.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
        if query(physical, count, items):
            return []
        want = (factor, factor, total, total, 0, SCOPE_SUBGROUP)  # saturating sums are not exact
        return [
            MatrixFragment(item.MSize, item.NSize, item.KSize)
            for item in items
            if (item.AType, item.BType, item.CType, item.ResultType, item.saturatingAccumulation, item.scope) == want
        ]

    def compute_family(self, physical: Any, wanted: int | None = None) -> tuple[int, int]:
        """(index, timestampValidBits) of the first queue family with compute, or of family ``wanted``; else (-1, 0)."""
        query = self.lib.vkGetPhysicalDeviceQueueFamilyProperties
        families = self.listed(query, "VkQueueFamilyProperties", physical)
        for index, family in enumerate(families):
            if family.queueFlags & QUEUE_COMPUTE if wanted is None else index == wanted:
                return index, int(family.timestampValidBits)
        return -1, 0

    def heaps(self, physical: Any, budget: bool) -> list[Heap]:
        """Heaps in the device's order; ``budget``: the device has VK_EXT_memory_budget."""
        room = self.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        memory = self.struct("VkPhysicalDeviceMemoryProperties2", pNext=room if budget else self.ffi.NULL)
        self.lib.vkGetPhysicalDeviceMemoryProperties2(physical, memory)
        heaps = []
        for i in range(memory.memoryProperties.memoryHeapCount):
            heap = memory.memoryProperties.memoryHeaps[i]
            free = room.heapBudget[i] - room.heapUsage[i] if budget else heap.size
            heaps.append(Heap(int(heap.size), max(0, int(free)), bool(heap.flags & 1)))
        return heaps


loader = lru_cache(maxsize=1)(Vulkan)
