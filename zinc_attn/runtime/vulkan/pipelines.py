"""Compute pipelines: one SPIR-V module with its specialization constants fixed."""

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...checks import check_int
from ...errors import ArgumentError, KernelError, LimitError
from ...kernels.declarations import KernelDecl
from ...kernels.records import Words
from ..compiling import telling
from ..devices import COMPUTE_STAGE
from ..refusals import check_compile_room
from .device import LogicalDevice, Undo, destroy
from .pipeline_cache import PipelineCache

STORAGE_DESCRIPTOR: Final = 7  # VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
_REQUIRE_FULL_SUBGROUPS: Final = 2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
_SPIRV_MAGIC: Final = struct.pack("=I", 0x07230203)  # in this machine's byte order


@dataclass(frozen=True)
class VulkanKernel:
    """A compute pipeline; lives as long as its runtime."""

    decl: KernelDecl
    owner: object  # the runtime's token
    pipeline: Any
    set_layout: Any
    layout: Any  # of the pipeline


class Pipelines:
    """The pipelines of a device, each made once per (declaration, constants, SPIR-V).

    token: marks a kernel as this runtime's, without keeping the runtime alive.
    """

    def __init__(self, device: LogicalDevice, token: object) -> None:
        self._device, self._token = device, token
        self.cache = PipelineCache(device)
        self._kernels: dict[tuple[KernelDecl, tuple[int, ...], bytes], VulkanKernel] = {}
        self._layouts: dict[int, tuple[Any, Any]] = {}

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> VulkanKernel:
        """The pipeline of entry point main. ArgumentError, LimitError, KernelError: refused."""
        values = tuple(check_int(f"spec[{i}]", v, 0, (1 << 32) - 1) for i, v in enumerate(spec))
        if len(values) != len(decl.spec):
            names = ", ".join(decl.spec)
            raise ArgumentError(f"spec of kernel {decl.name}: got {len(values)} values, expected ({names})")
        if len(decl.bindings) > self._device.max_bindings:
            raise LimitError(
                f"kernel {decl.name}: has {len(decl.bindings)} buffers, but {self._device.info.name} takes at most "
                f"{self._device.max_bindings}"
            )
        key = (decl, values, hashlib.sha256(spirv).digest())
        if (known := self._kernels.get(key)) is not None:
            return known
        # drivers do not validate: other bytes would crash them
        if len(spirv) < 20 or len(spirv) % 4 or spirv[:4] != _SPIRV_MAGIC:
            raise KernelError(f"kernel {decl.name}: {len(spirv)} bytes that are no SPIR-V of this byte order")
        check_compile_room(self._device.info)
        set_layout, layout = self._layout(len(decl.bindings))
        pipeline = self._compile(decl, np.frombuffer(spirv, np.uint32), values, layout)
        kernel = self._kernels[key] = VulkanKernel(decl, self._token, pipeline, set_layout, layout)
        self.cache.save()
        return kernel

    def forget(self) -> None:
        """Drop the kernels: their device is closing."""
        self._kernels.clear()

    def _compile(self, decl: KernelDecl, words: Words, values: tuple[int, ...], layout: Any) -> Any:
        device, vk, scratch = self._device, self._device.vk, Undo()
        flags, chain = 0, device.null
        wave = decl.wave(values, device.info.layout.lanes)
        if device.wave32 and local_size_x(words) % wave == 0:
            flags = _REQUIRE_FULL_SUBGROUPS
            chain = vk.struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=wave)
        code = device.ffi.from_buffer("uint32_t[]", words)
        module = vk.struct("VkShaderModuleCreateInfo", codeSize=words.nbytes, pCode=code)
        try:
            stage = vk.struct(
                "VkPipelineShaderStageCreateInfo",
                pNext=chain,
                flags=flags,
                stage=COMPUTE_STAGE,
                module=device.create(scratch, "ShaderModule", module),
                pName=device.ffi.new("char[]", b"main"),
                pSpecializationInfo=vk.specialization(decl.constants(values)),
            )
            create = vk.struct("VkComputePipelineCreateInfo", stage=stage[0], layout=layout)
            pipeline = device.ffi.new("VkPipeline*")
            build = device.lib.vkCreateComputePipelines
            with telling(device.info, decl.name):
                result = build(device.handle, self.cache.handle, 1, create, device.null, pipeline)
            del stage  # alive until here: `create` holds a copy that points at its name and constants
            device.check(result, f"compiling kernel {decl.name}", KernelError)
            device.undo.append(functools.partial(device.lib.vkDestroyPipeline, device.handle, pipeline[0], device.null))
            return pipeline[0]
        finally:
            destroy(scratch)

    def _layout(self, count: int) -> tuple[Any, Any]:
        """(set layout, pipeline layout) of ``count`` storage buffers."""
        if count not in self._layouts:
            device, vk = self._device, self._device.vk
            each = {"descriptorType": STORAGE_DESCRIPTOR, "descriptorCount": 1, "stageFlags": COMPUTE_STAGE}
            bindings = [vk.struct("VkDescriptorSetLayoutBinding", binding=i, **each) for i in range(count)]
            table = vk.array("VkDescriptorSetLayoutBinding", bindings)
            create = vk.struct("VkDescriptorSetLayoutCreateInfo", bindingCount=count, pBindings=table)
            with device.kept() as undo:
                sets = device.create(undo, "DescriptorSetLayout", create)
                layouts = vk.array("VkDescriptorSetLayout", [sets])
                create = vk.struct("VkPipelineLayoutCreateInfo", setLayoutCount=1, pSetLayouts=layouts)
                layout = device.create(undo, "PipelineLayout", create)
            self._layouts[count] = sets, layout
        return self._layouts[count]


def local_size_x(words: Words) -> int:
    """x of the LocalSize execution mode of a SPIR-V module, 1 where a constant gives it."""
    offset = 5
    while offset < len(words):
        length, opcode = int(words[offset]) >> 16, int(words[offset]) & 0xFFFF
        if opcode == 16 and length == 6 and words[offset + 2] == 17:  # OpExecutionMode LocalSize x y z
            return int(words[offset + 3])
        if opcode == 54 or not length:  # OpFunction: execution modes come earlier
            break
        offset += length
    return 1
