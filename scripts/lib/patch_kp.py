"""Patches Kompute's sources before scripts/build_kp.sh builds them: patch_kp.py FOLDER.

kp_checked.hpp makes Vulkan's errors C++ exceptions, for which Kompute 0.9.0 is not written; what the dispatcher makes,
a sequence, is mended here. kp_zinc_attn.hpp is a module of the binding, and a friend of three classes. Each patch
replaces a text that must be there exactly once, so that another version of Kompute is refused rather than built half
patched.
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
            '    m.attr("results_are_checked") = true;\n'
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
        # An operation that refuses its evaluation, and a fence that cannot be created, leave nothing to wait for.
        ("    this->mIsRunning = true;\n\n    for (", "    for ("),
        (
            "    this->mFence = this->mDevice->createFence(vk::FenceCreateInfo());\n",
            "    this->mFence = this->mDevice->createFence(vk::FenceCreateInfo());\n    this->mIsRunning = true;\n",
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
