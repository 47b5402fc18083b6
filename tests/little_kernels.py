"""Kernels of one line, for tests of the plain Vulkan dispatcher itself, with the buffers that they read and write."""

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinc_attn.kernels.declarations import Binding, KernelDecl
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime.primitives import answers
from zinc_attn.runtime.protocol import Use
from zinc_attn.runtime.vulkan import VulkanKernel, VulkanRuntime

if shutil.which("glslangValidator") is None:
    pytest.skip("glslangValidator is not installed", allow_module_level=True)

HEAD = """#version 450
layout(local_size_x = 32) in;
layout(constant_id = 0) const uint C = 0;
layout(binding = 0) buffer A { uint a[]; };
layout(binding = 1) buffer B { uint b[]; };
"""
SOURCES = {
    "double": "void main() { uint i = gl_GlobalInvocationID.x; b[i] = a[i] * 2 + C; }",
    "reverse": "void main() { uint i = gl_GlobalInvocationID.x; b[i] = a[a.length() - 1 - i] + C; }",
    "spin": """void main() {
        uint i = gl_GlobalInvocationID.x, x = a[i];
        for (uint n = 0; n < C; n++) x = x * 1664525u + (x >> 7);
        b[i] = x;
    }""",
}
WORDS = 1 << 14
GROUPS = (WORDS // 32, 1, 1)


@cache
def compiled(source: str) -> bytes:
    """The SPIR-V of a shader, which may include files of shaders/."""
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder, "one.comp"), Path(folder, "one.spv")
        path.write_text(source)
        options = ["--target-env", "vulkan1.1", f"-I{Path(__file__).parents[1] / 'shaders'}"]
        done = subprocess.run(["glslangValidator", "-V", *options, path, "-o", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return target.read_bytes()


def spirv(name: str) -> bytes:
    return compiled(HEAD + SOURCES[name])


@cache
def best_info() -> Any:
    return machine.choose(machine.list_devices())


def declared(name: str) -> KernelDecl:
    return KernelDecl(name, "", (Binding("a", "read"), Binding("b", "write")), ("C",))


def little(runtime: VulkanRuntime, name: str = "double", c: int = 0) -> VulkanKernel:
    """A kernel of SOURCES, which reads a and writes b, with its constant."""
    return runtime.kernel(declared(name), spirv(name), [c])


def words(seed: int, count: int = WORDS) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def buffers(runtime: VulkanRuntime, *uses: Use) -> list[Any]:
    return [runtime.buffer(4 * WORDS, use) for use in uses]


def works(runtime: VulkanRuntime, c: int = 5) -> None:
    """The runtime computes."""
    data = words(99 + c)
    np.testing.assert_array_equal(answers(runtime, little(runtime, c=c), data, WORDS, GROUPS[0]), data * 2 + c)
