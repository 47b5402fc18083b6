"""The plain Vulkan dispatcher: libvulkan's raw functions through the `vulkan` package, nothing compiled.

``runtime`` is the dispatcher that the rest of the package sees. It uses ``device`` (instance and logical device),
``memory`` (which memory a buffer gets), ``pipelines`` and ``pipeline_cache``, ``commands`` (command buffers, descriptor
sets, barriers), ``queue`` (submissions, also failed ones) and ``handles`` (when objects are destroyed).
"""

from .handles import VulkanBuffer, VulkanRecording
from .pipelines import VulkanKernel
from .runtime import VulkanRuntime

__all__ = ["VulkanBuffer", "VulkanKernel", "VulkanRecording", "VulkanRuntime"]
