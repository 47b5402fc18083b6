"""The facts of a Vulkan device, on which plans and kernels depend; ``runtime.devices`` finds them out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..limits import MAX_CONTEXT, WAVE
from .families import RDNA, Layout
from .matrix import NO_MATRICES, MatrixFacts


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
    compute_units_source: str  # the query that gave compute_units, or "assumed"
    subgroup_size: int
    memory_bytes: int  # largest device-local heap
    max_buffer_bytes: int  # of one storage buffer: maxStorageBufferRange, or maxMemoryAllocationSize where that is less
    max_workgroups: tuple[int, int, int]
    timestamp_period_ns: float  # 0 where the compute queue has no timestamps
    refusal: str | None = None  # why the kernels do not run on it
    native: bool = False  # whether the kernels are native code of the host, without Vulkan
    shared_memory_bytes: int = 1 << 16  # the most that a workgroup can have
    layout: Layout = RDNA  # how pass 1 lies in its registers
    wave_subgroups: bool = True  # whether kernels get subgroups of a wave's size
    fma_operation: bool = False  # whether VK_KHR_shader_fma offers a float32 fused multiply-add
    integer_dots: bool = True  # whether kernels may use integer dot products; products of quantized weights need them
    matrix: MatrixFacts = NO_MATRICES  # matrix units; by default there are none

    @property
    def max_items(self) -> int:
        """Work items of a dispatch of pass 1, which are the y of its grid."""
        return self.max_workgroups[1]

    @property
    def split_units(self) -> int:
        """Compute units as the split rule counts them. On a CPU device they are so many that every node is a split: its
        driver's code takes twice as long where a workgroup walks over nodes."""
        return MAX_CONTEXT if self.kind == "cpu" else self.compute_units

    def with_own_subgroups(self) -> DeviceInfo:
        """The facts for a runtime that cannot ask for subgroups of a wave's size: kernels get the device's own."""
        if self.kind == "cpu":
            return self
        return replace(self, wave_subgroups=False, matrix=self.matrix if self.subgroup_size == WAVE else NO_MATRICES)
