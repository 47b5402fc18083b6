"""Patches Kompute's sources before scripts/build_kp.sh builds them: patch_kp.py FOLDER.

kp_checked.hpp makes Vulkan's errors C++ exceptions, for which Kompute 0.9.0 is not written: a constructor that throws
leaves its Vulkan objects behind, since C++ runs no destructor for it. kp_pipelines.hpp makes algorithms share their
pipelines. Each patch replaces a text that must be there exactly once, so that another version of Kompute is refused
rather than built half patched.
"""

import sys
from pathlib import Path

PATCHES = {
    # A comma is missing: cmake never sees PYTHON_EXECUTABLE and takes any Python that it finds.
    # The NumPy pin is older than pybind11 2.13, which supports NumPy 2.
    # vulkan.hpp takes a compiler five seconds: a unity build reads it three times in place of twelve.
    "setup.py": [
        ("VERSION_CHECK=ON'\n", "VERSION_CHECK=ON',\n"),
        ('"numpy<2.0.0"', '"numpy"'),
        (
            "        cmake_args = [",
            "        cmake_args = ['-DCMAKE_UNITY_BUILD=ON', '-DCMAKE_UNITY_BUILD_BATCH_SIZE=0',\n" + 22 * " ",
        ),
    ],
    # zinc_attn refuses a kp that does not say that its results are checked; set-up builds one that shares pipelines.
    "python/src/main.cpp": [
        (
            "PYBIND11_MODULE(kp, m)\n{\n",
            "PYBIND11_MODULE(kp, m)\n{\n"
            '    m.attr("results_are_checked") = true;\n'
            '    m.attr("pipelines_are_shared") = true;\n',
        ),
        # kp's import would give the root logger of the program a handler.
        ('    logging.attr("basicConfig")();\n', ""),
    ],
    "src/Manager.cpp": [
        ('#include "kompute/Manager.hpp"\n', '#include "kompute/Manager.hpp"\n#include "kp_pipelines.hpp"\n'),
        (
            '        KP_LOG_INFO("Destroying device");\n',
            '        KP_LOG_INFO("Destroying device");\n        zinc_attn::forget_pipelines(*this->mDevice);\n',
        ),
        (
            "    this->createInstance();\n"
            "    this->createDevice(\n"
            "      familyQueueIndices, physicalDeviceIndex, desiredExtensions);\n",
            "    try {\n"
            "        this->createInstance();\n"
            "        this->createDevice(\n"
            "          familyQueueIndices, physicalDeviceIndex, desiredExtensions);\n"
            "    } catch (...) {\n"
            "        if (this->mDevice && *this->mDevice) {\n"
            "            vkDestroyDevice(*this->mDevice, nullptr);\n"
            "        }\n"
            "        if (this->mInstance && *this->mInstance) {\n"
            "            vkDestroyInstance(*this->mInstance, nullptr);\n"
            "        }\n"
            "        throw;\n"
            "    }\n",
        ),
    ],
    "src/Sequence.cpp": [
        (
            "    this->createCommandPool();\n"
            "    this->createCommandBuffer();\n"
            "    if (totalTimestamps > 0)\n"
            "        this->createTimestampQueryPool(totalTimestamps +\n"
            "                                       1); //+1 for the first one\n",
            "    try {\n"
            "        this->createCommandPool();\n"
            "        this->createCommandBuffer();\n"
            "        if (totalTimestamps > 0)\n"
            "            this->createTimestampQueryPool(totalTimestamps + 1);\n"
            "    } catch (...) {\n"
            "        this->destroy();\n"
            "        throw;\n"
            "    }\n",
        ),
        # A wait that threw leaves the fence; zinc_attn destroys the sequence only once its work has finished.
        (
            "    if (this->mFreeCommandBuffer) {\n",
            "    if (this->mIsRunning) {\n"
            "        vkDestroyFence(*this->mDevice, this->mFence, nullptr);\n"
            "        this->mFence = nullptr;\n"
            "        this->mIsRunning = false;\n"
            "    }\n\n"
            "    if (this->mFreeCommandBuffer) {\n",
        ),
        # While the fence is created nothing runs; a sequence that runs has a fence to wait for.
        (
            "    this->mFence = this->mDevice->createFence(vk::FenceCreateInfo());\n",
            "    this->mIsRunning = false;\n"
            "    this->mFence = this->mDevice->createFence(vk::FenceCreateInfo());\n"
            "    this->mIsRunning = true;\n",
        ),
    ],
    "src/Tensor.cpp": [
        (
            "    this->mTensorType = tensorType;\n\n    this->rebuild(data, elementTotalCount, elementMemorySize);\n",
            "    this->mTensorType = tensorType;\n"
            "    this->mRawData = nullptr;\n\n"
            "    try {\n"
            "        this->rebuild(data, elementTotalCount, elementMemorySize);\n"
            "    } catch (...) {\n"
            "        this->destroy();\n"
            "        throw;\n"
            "    }\n",
        ),
        # Binding can throw after the allocation; freeing a null handle does nothing.
        (
            "    this->mPrimaryMemory = std::make_shared<vk::DeviceMemory>();\n",
            "    this->mPrimaryMemory = std::make_shared<vk::DeviceMemory>();\n    this->mFreePrimaryMemory = true;\n",
        ),
        (
            "        this->mStagingMemory = std::make_shared<vk::DeviceMemory>();\n",
            "        this->mStagingMemory = std::make_shared<vk::DeviceMemory>();\n"
            "        this->mFreeStagingMemory = true;\n",
        ),
        # Only memory that was mapped can be unmapped.
        (
            "    this->mRawData = nullptr;\n    this->mSize = 0;\n",
            "    const bool mapped = this->mRawData != nullptr;\n    this->mRawData = nullptr;\n    this->mSize = 0;\n",
        ),
        (
            "    if (this->tensorType() != Tensor::TensorTypes::eStorage) {\n        this->unmapRawData();\n",
            "    if (mapped) {\n        this->unmapRawData();\n",
        ),
    ],
    # The key is all that a pipeline is made of. Data that vary in size have their length before them.
    "src/Algorithm.cpp": [
        ('#include "kompute/Algorithm.hpp"\n', '#include "kompute/Algorithm.hpp"\n#include "kp_pipelines.hpp"\n'),
        (
            "#ifdef KOMPUTE_CREATE_PIPELINE_RESULT_VALUE\n"
            "    vk::ResultValue<vk::Pipeline> pipelineResult =\n"
            "      this->mDevice->createComputePipeline(*this->mPipelineCache, pipelineInfo);\n"
            "\n"
            "    if (pipelineResult.result != vk::Result::eSuccess) {\n"
            '        throw std::runtime_error("Failed to create pipeline result: " +\n'
            "                                 vk::to_string(pipelineResult.result));\n"
            "    }\n"
            "\n"
            "    vk::Pipeline& pipeline = pipelineResult.value;\n"
            "    this->mPipeline = std::make_shared<vk::Pipeline>(pipeline);\n"
            "    this->mFreePipeline = true;\n"
            "#else\n"
            "    vk::Pipeline pipeline =\n"
            "      this->mDevice->createComputePipeline(*this->mPipelineCache, pipelineInfo)\n"
            "        .value;\n"
            "    this->mPipeline = std::make_shared<vk::Pipeline>(pipeline);\n"
            "    this->mFreePipeline = true;\n"
            "#endif\n",
            "    const size_t sizes[] = { this->mTensors.size(),\n"
            "                             pushConstantRange.size,\n"
            "                             this->mSpecializationConstantsDataTypeMemorySize };\n"
            "    std::string key;\n"
            "    zinc_attn::append(key, sizes, sizeof(sizes));\n"
            "    zinc_attn::append(key, specializationInfo.pData, specializationInfo.dataSize);\n"
            "    zinc_attn::append(key, this->mSpirv.data(), sizeof(uint32_t) * this->mSpirv.size());\n"
            "    bool made = false;\n"
            "    this->mPipeline = std::make_shared<vk::Pipeline>(\n"
            "      zinc_attn::shared_pipeline(*this->mDevice, key, made, [&]() {\n"
            "          const VkComputePipelineCreateInfo& info = pipelineInfo;\n"
            "          VkPipeline pipeline = VK_NULL_HANDLE;\n"
            "          vkCreateComputePipelines(\n"
            "            *this->mDevice, *this->mPipelineCache, 1, &info, nullptr, &pipeline);\n"
            "          return zinc_attn::SharedPipeline{\n"
            "              pipeline, *this->mPipelineLayout, *this->mDescriptorSetLayout\n"
            "          };\n"
            "      }));\n"
            "    // forget_pipelines() destroys it, and the layouts of the algorithm that made it.\n"
            "    this->mFreePipeline = false;\n"
            "    this->mFreePipelineLayout = this->mFreeDescriptorSetLayout = !made;\n",
        ),
    ],
    "src/include/kompute/Algorithm.hpp": [
        (
            "            this->rebuild(tensors,\n"
            "                          spirv,\n"
            "                          workgroup,\n"
            "                          specializationConstants,\n"
            "                          pushConstants);\n",
            "            try {\n"
            "                this->rebuild(tensors,\n"
            "                              spirv,\n"
            "                              workgroup,\n"
            "                              specializationConstants,\n"
            "                              pushConstants);\n"
            "            } catch (...) {\n"
            "                this->destroy();\n"
            "                throw;\n"
            "            }\n",
        ),
    ],
}


def main(folder: Path) -> None:
    for name, patches in PATCHES.items():
        text = (folder / name).read_text()
        for old, new in patches:
            if (count := text.count(old)) != 1:
                raise SystemExit(f"{name}: this text is there {count} times, expected once:\n{old}")
            text = text.replace(old, new)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
