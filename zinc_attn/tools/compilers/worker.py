"""The child process: it compiles on the device that its environment offers, and prints the driver's figures.

Each line of stdin is a job (path, bindings, constants, whether fused, whether its machine code is wanted in place of
its text), and each line of stdout the answer, or {"refused": why}. It ends soon, so no Vulkan object is destroyed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ...errors import ZincAttnError
from ...files import read_file
from ...limits import WAVE
from ...runtime.devices import COMPUTE_STAGE, MATRIX_FEATURES, fma_features
from ...runtime.loader import Vulkan, loader
from ...runtime.loops import unrolled
from ...runtime.multiply_add import Way, module_for
from ...runtime.vulkan.pipelines import STORAGE_DESCRIPTOR

_EXTENSIONS: Final = ("VK_KHR_pipeline_executable_properties", "VK_EXT_subgroup_size_control")
_CAPTURE: Final = 0x40 | 0x80  # VK_PIPELINE_CREATE_CAPTURE_{STATISTICS,INTERNAL_REPRESENTATIONS}_BIT_KHR
_FULL_SUBGROUPS: Final = 2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT


def main() -> None:
    """Answer every job, or exit with a sentence if the device is not the chip. Arguments: the chip's names."""
    try:
        vk = loader()
        device, ways, facts = _open(vk, sys.argv[1:])
    except ZincAttnError as e:
        sys.exit(str(e))
    for line in sys.stdin:
        try:
            answer = facts | _compile(vk, device, ways, *json.loads(line))
        except ZincAttnError as e:
            answer = {"refused": str(e)}
        print(json.dumps(answer), flush=True)


def _open(vk: Vulkan, names: Sequence[str]) -> tuple[Any, tuple[Way, Way], dict[str, Any]]:
    """A VkDevice of the chip, whose name has one of ``names``, with a queue of its first family; its ways to multiply
    and add, plain and fused; whether it offers matrix units, and Mesa's version."""
    physical = vk.physical_devices(vk.create_instance()[0])[0]
    told = vk.properties(physical)[0]
    chip = vk.text(told.deviceName)
    if not any(name in chip.lower() for name in names):  # a Mesa that ignores the forced family
        sys.exit(f"the driver offers {chip!r}")
    features = vk.struct("VkPhysicalDeviceSubgroupSizeControlFeatures", subgroupSizeControl=1, computeFullSubgroups=1)
    # Mesa 25.0 compiles matrix products without offering them: lanes have the elements that another chip's would have.
    offered = "VK_KHR_cooperative_matrix" in vk.extensions(physical)
    wanted = {"VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR": ("pipelineExecutableInfo",), **MATRIX_FEATURES}
    for struct, fields in wanted.items():
        if offered or fields != ("cooperativeMatrix",):
            features = vk.struct(struct, pNext=features, **dict.fromkeys(fields, 1))
    units = ["VK_KHR_cooperative_matrix"] if offered else []
    fma = ["VK_KHR_shader_fma"] if "VK_KHR_shader_fma" in vk.extensions(physical) else []
    if fma:
        features, more = fma_features(vk, physical), features
        features.pNext = more
    queue = vk.struct("VkDeviceQueueCreateInfo", queueCount=1, pQueuePriorities=vk.array("float", [1.0]))
    names = [vk.ffi.new("char[]", name.encode()) for name in (*_EXTENSIONS, *units, *fma)]
    enabled = {"enabledExtensionCount": len(names), "ppEnabledExtensionNames": vk.array("char*", names)}
    device = _make(vk, physical, "Device", pNext=features, queueCreateInfoCount=1, pQueueCreateInfos=queue, **enabled)
    facts = {"units": offered, "mesa": int(told.driverVersion) >> 22}
    return device, ("fma()", "OpFmaKHR" if fma else "fma()"), facts


def _make(vk: Vulkan, owner: Any, kind: str, **fields: Any) -> Any:
    """A new Vulkan object of this kind."""
    handle = vk.ffi.new(f"Vk{kind}*")
    create = vk.struct(f"Vk{kind}CreateInfo", **fields)
    vk.check(getattr(vk.lib, f"vkCreate{kind}")(owner, create, vk.ffi.NULL, handle), f"vkCreate{kind}")
    return handle[0]


def _pipeline(
    vk: Vulkan, device: Any, cache: Any, path: str, bindings: int, constants: Sequence[int], way: Way, lanes: int = WAVE
) -> Any:
    """A compute pipeline with required subgroups, as the runtimes have it; RADV keeps its text, or fills the cache."""
    each = {"descriptorType": STORAGE_DESCRIPTOR, "descriptorCount": 1, "stageFlags": COMPUTE_STAGE}
    table = [vk.struct("VkDescriptorSetLayoutBinding", binding=i, **each) for i in range(bindings)]
    table = vk.array("VkDescriptorSetLayoutBinding", table)
    set_layout = _make(vk, device, "DescriptorSetLayout", bindingCount=bindings, pBindings=table)
    sets = vk.array("VkDescriptorSetLayout", [set_layout])
    code = module_for(way, unrolled(read_file(Path(path), "a SPIR-V module")))
    words = vk.ffi.from_buffer("uint32_t[]", code)
    wave = vk.struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=lanes)
    module = _make(vk, device, "ShaderModule", codeSize=len(code), pCode=words)
    special, name = vk.specialization(constants), vk.ffi.new("char[]", b"main")
    program = {"flags": _FULL_SUBGROUPS, "module": module, "pName": name, "pSpecializationInfo": special}
    stage = vk.struct("VkPipelineShaderStageCreateInfo", pNext=wave, stage=COMPUTE_STAGE, **program)
    layout = _make(vk, device, "PipelineLayout", setLayoutCount=1, pSetLayouts=sets)
    flags = 0 if cache else _CAPTURE
    create = vk.struct("VkComputePipelineCreateInfo", flags=flags, stage=stage[0], layout=layout)
    pipeline = vk.ffi.new("VkPipeline*")
    result = vk.lib.vkCreateComputePipelines(device, cache or vk.ffi.NULL, 1, create, vk.ffi.NULL, pipeline)
    vk.check(result, f"compiling {path} with {list(constants)}")
    return pipeline[0]


def _compile(
    vk: Vulkan, device: Any, ways: tuple[Way, Way], path: str, bindings: int, constants: Sequence[int], *how: int
) -> dict[str, Any]:
    """One variant: its wave size, and the driver's statistics with RADV's text, or the data of its pipeline cache."""

    def query(name: str) -> Any:
        name = f"vkGetPipelineExecutable{name}KHR"
        address = vk.lib.vkGetDeviceProcAddr(device, vk.ffi.new("char[]", name.encode()))
        return vk.ffi.cast(f"PFN_{name}", address)

    fused, binary, *lanes = how
    cache = _make(vk, device, "PipelineCache") if binary else None
    pipeline = _pipeline(vk, device, cache, path, bindings, constants, ways[fused], *lanes)
    about = vk.struct("VkPipelineInfoKHR", pipeline=pipeline)
    (stage,) = vk.listed(query("Properties"), "VkPipelineExecutablePropertiesKHR", device, about)
    if binary:
        size, data = vk.ffi.new("size_t*", 1 << 20), vk.ffi.new("char[]", 1 << 20)
        vk.check(vk.lib.vkGetPipelineCacheData(device, cache, size, data), "the machine code")
        return {"wave": int(stage.subgroupSize), "cache": bytes(vk.ffi.buffer(data, size[0])).hex()}
    about = vk.struct("VkPipelineExecutableInfoKHR", pipeline=pipeline)
    numbers = vk.listed(query("Statistics"), "VkPipelineExecutableStatisticKHR", device, about)
    return {
        "wave": int(stage.subgroupSize),
        "statistics": {vk.text(number.name): int(number.value.u64) for number in numbers},
        "isa": _text(vk, device, query("InternalRepresentations"), about),
    }


def _text(vk: Vulkan, device: Any, function: Any, about: Any) -> str:
    """RADV's text of the machine code; empty from other drivers."""
    forms = vk.listed(function, "VkPipelineExecutableInternalRepresentationKHR", device, about)
    texts = {vk.text(form.name): vk.ffi.new("char[]", form.dataSize) for form in forms}
    if "Assembly" not in texts:
        return ""
    for form, text in zip(forms, texts.values(), strict=True):
        form.pData = text
    count = vk.ffi.new("uint32_t*", len(forms))
    vk.check(function(device, about, count, vk.ffi.addressof(forms[0])), "the program's text")
    return vk.text(texts["Assembly"])


if __name__ == "__main__":
    main()
