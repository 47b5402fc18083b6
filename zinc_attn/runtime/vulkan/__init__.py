"""The plain Vulkan dispatcher: libvulkan's raw functions through the `vulkan` package, nothing compiled.

``runtime`` is the dispatcher that the rest of the package sees. Beneath it, each in its file: ``device`` (instance and
logical device), ``memory`` (which memory a buffer gets), ``pipelines`` and ``pipeline_cache``, ``commands`` (command
buffers, descriptor sets, barriers), ``queue`` (submitting, and what a failed submission leaves), ``handles`` (what is
destroyed, when).
"""

from .handles import VulkanBuffer, VulkanRecording
from .pipelines import VulkanKernel
from .runtime import VulkanRuntime

__all__ = ["VulkanBuffer", "VulkanKernel", "VulkanRecording", "VulkanRuntime"]
