"""Patches Kompute's sources before scripts/build_kp.sh builds them: patch_kp.py FOLDER.

kp_checked.hpp makes Vulkan's errors C++ exceptions, for which Kompute 0.9.0 is not written; what the dispatcher makes,
sequences and tensors, is mended here: C++ runs no destructor for what a constructor that throws has made.
kp_zinc_attn.hpp is a module of the binding, and a friend of three classes. Each patch replaces a text that must be
there exactly once, so that another version of Kompute is refused rather than built half patched.
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
    # zinc_attn refuses a kp without this module of its own.
    "python/src/main.cpp": [
        ('#include "utils.hpp"\n', '#include "utils.hpp"\n\n#include "kp_zinc_attn.hpp"\n'),
        (
            '    auto atexit = py::module_::import("atexit");\n',
            '    zinc_attn::bind(m.def_submodule("zinc_attn"));\n\n    auto atexit = py::module_::import("atexit");\n',
        ),
        # kp's import would give the root logger of the program a handler.
        ('    logging.attr("basicConfig")();\n', ""),
    ],
    **{
        f"src/include/kompute/{name}.hpp": [(text, f"{text}    friend struct zinc_attn::Access;\n\n")]
        for name, text in (
            ("Manager", "class Manager\n{\n"),
            ("Sequence", "class Sequence : public std::enable_shared_from_this<Sequence>\n{\n"),
            ("Tensor", "class Tensor\n{\n"),
        )
    },
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
        # What a call left behind in the command buffer is not submitted without its operations, which can refuse that.
        (
            "    this->mIsRunning = true;\n\n    for (",
            "    if (this->mOperations.empty()) {\n"
            '        throw std::runtime_error("Kompute Sequence evalAsync called without operations");\n'
            "    }\n\n    for (",
        ),
        # A refused evaluation, and a failed submission, leave nothing to wait for.
        (
            "    this->mComputeQueue->submit(1, &submitInfo, this->mFence);\n",
            "    try {\n"
            "        this->mComputeQueue->submit(1, &submitInfo, this->mFence);\n"
            "    } catch (...) {\n"
            "        vkDestroyFence(*this->mDevice, this->mFence, nullptr);\n"
            "        throw;\n"
            "    }\n"
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
