"""Kernels as native code of the host, without Vulkan."""

from .device import NAME as NAME
from .device import cpu_info as cpu_info
from .runtime import CpuRuntime as CpuRuntime
