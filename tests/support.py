"""Helpers that several test files share."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zinc_attn as za
from zinc_attn.cache import blocks, encoded
from zinc_attn.checks import BFLOAT16
from zinc_attn.decode.arithmetic import check_arithmetic
from zinc_attn.errors import KernelError, NoVulkanError, RuntimeUnavailableError, UnsupportedError
from zinc_attn.kernels.declarations import UNITS
from zinc_attn.kernels.matrix import MatrixFacts
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime.cpu.library import no_compiler
from zinc_attn.runtime.device import SPIRV
from zinc_attn.runtime.protocol import DeviceInfo
from zinc_attn.storage import STORAGE
from zinc_attn.tools.compilers.compiler import compile_programs
from zinc_attn.tools.cost.cards import RDNA4_UNITS

FULL = os.environ.get("ZINC_ATTN_TEST_FULL") == "1"
RUNTIMES = ("kompute", "vulkan")
# (driver, dispatcher): where a test of ``any_device`` runs; one that is not marked ``both_dispatchers`` takes the pairs
# of plain Vulkan alone, and the processor. SwiftShader keeps no compiled code, so it is in the list with Kompute with
# --full only.
SLOW = ("swiftshader", "kompute")
DRIVERS = [
    (driver, runtime)
    for driver in ("default", "swiftshader")
    for runtime in RUNTIMES
    if FULL or (driver, runtime) != SLOW
]
CPU_NATIVE = ("cpu", "cpu")
NATIVE = no_compiler() is None  # whether the processor serves what needs no driver
GFX1201 = ("gfx1201", "interpreted")  # RADV's machine code in tests/gfx1201

GPU = DeviceInfo(
    index=1,
    name="AMD Radeon AI PRO R9700 (RADV GFX1201)",
    kind="discrete",
    vendor="AMD",
    driver="radv Mesa 25.2.0",
    api_version="1.4.305",
    uuid="c0ffee00c0ffee00",
    compute_units=64,
    compute_units_source="VK_AMD_shader_core_properties2",
    subgroup_size=64,
    memory_bytes=32 << 30,
    max_buffer_bytes=(1 << 32) - 4,
    max_workgroups=(65535, 65535, 65535),
    timestamp_period_ns=10.0,
)
CPU = replace(
    GPU,
    index=0,
    name="llvmpipe (LLVM 15.0.6, 256 bits)",
    kind="cpu",
    vendor="Mesa",
    driver="llvmpipe Mesa 25.0.7",
    compute_units=2,
    compute_units_source="CPU threads of this process",
    subgroup_size=8,
    memory_bytes=16 << 30,
    max_buffer_bytes=1 << 27,
    timestamp_period_ns=1.0,
)


def fake_device(facts: MatrixFacts = RDNA4_UNITS, **info: Any) -> Any:
    """A device with the matrix units of ``facts``, as a GPU, for code that asks for them."""
    return SimpleNamespace(info=replace(GPU, matrix=facts, **info), runtime=SimpleNamespace(name="vulkan"))


Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def make_inputs(shape: za.AttnShape, context: int, dtype: str, kind: str = "normal") -> Arrays:
    """q (q_heads, head_dim) float32; k, v (context, kv_heads, head_dim)."""
    rng = np.random.default_rng([shape.q_heads, shape.kv_heads, shape.head_dim, context])
    q = rng.standard_normal((shape.q_heads, shape.head_dim), np.float32)
    k = rng.standard_normal((context, shape.kv_heads, shape.head_dim), np.float32)
    v = rng.standard_normal((context, shape.kv_heads, shape.head_dim), np.float32)
    if kind == "sharp":  # scores of standard deviation 8
        q *= 8
    elif kind == "extreme":  # logits of about +-200, of the second KV head -200 alone
        q[:] = np.sqrt(shape.head_dim) * 200 / shape.head_dim
        k[:] = np.where(rng.random(k.shape[:2]) < 0.5, 1.0, -1.0)[..., None]
        k[:, 1:2] = -1.0
    elif kind == "equal":
        k[:] = k[:1]
    elif kind == "zeros":
        signs = np.where(rng.random(k.shape) < 0.5, np.float32(0.0), np.float32(-0.0))
        k, v = np.where(rng.random(k.shape) < 0.7, signs, k), np.where(rng.random(v.shape) < 0.7, -signs, v)
        q[::2] = -0.0
    elif kind == "subnormal":
        tiny = np.float32(2.0**-24)
        k, v = np.rint(k * 300) * tiny, np.rint(v * 300) * tiny
    elif kind == "cancelling":  # values whose sum falls through the denormals, and below the flush of inputs
        v = np.where(np.arange(context)[:, None, None] % 2 == 0, v, -np.roll(v, 1, axis=0)) * np.float32(2.0**-39)
        k[:] = 0
    stored = np.float16 if dtype == "f16" else np.float32
    return q, k.astype(stored), v.astype(stored)


def row_bytes(x: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    """(tokens, kv_heads, bytes) of values of a storage type: ggml's blocks, or the values, rounded."""
    kind = STORAGE[name]
    if kind.halves:
        return encoded.to_blocks(*blocks.quantize(blocks.in_blocks(x), kind), kind).reshape(*x.shape[:2], -1)
    dtypes = {"f32": np.float32, "f16": np.float16, "bf16": BFLOAT16, "fp8_e4m3": blocks.FP8}
    return np.ascontiguousarray(x.astype(dtypes[name])).view(np.uint8)


def differing(got: NDArray[Any], want: NDArray[Any]) -> str:
    """Empty where the bits are equal, else the first differing element."""
    a, b = got.reshape(-1).view(np.uint32), want.reshape(-1).view(np.uint32)
    places = np.flatnonzero(a != b)
    return (
        ""
        if places.size == 0
        else f"{places.size} differ, first at {places[0]}: got {a[places[0]]:#x}, expected {b[places[0]]:#x}"
    )


def same(got: Iterable[Any], want: Iterable[Any], what: object = None) -> None:
    """Assert that arrays have the bits of others, for example out and lse."""
    for result, right in zip(got, want, strict=True):
        difference = differing(np.ascontiguousarray(result), np.ascontiguousarray(right))
        assert not difference, (what, difference)


def open_device(driver: str, runtime: str) -> za.Device:
    """The machine's best device ("default"), SwiftShader or gfx1201, on a dispatcher; skips where it cannot be had."""
    if driver == "gfx1201":
        needs_radv()
        if shutil.which("cc") is None:
            pytest.skip("cc is not installed")
        pytest.importorskip("tinygrad", reason="tinygrad 0.14, which has AMD's tables, wants Python 3.11 or later")
        from gfx1201.runtime import Gfx1201

        return za.Device(Gfx1201())
    if (driver, runtime) == CPU_NATIVE:
        if not NATIVE:
            pytest.skip(str(no_compiler()))
        return za.Device.open("cpu")
    if runtime == "kompute" and importlib.util.find_spec("kp") is None:
        pytest.skip("kp is not installed: scripts/run builds it")
    if driver == "swiftshader":
        if not os.environ.get("ZINC_ATTN_SWIFTSHADER_ICD"):
            pytest.skip("SwiftShader is not here: run scripts/test on Debian, or set ZINC_ATTN_SWIFTSHADER_ICD")
        return za.Device.open("SwiftShader", runtime=runtime)
    others = [d for d in za.list_devices() if "SwiftShader" not in d.name and not d.native]
    if not others:
        pytest.skip("SwiftShader is the only Vulkan device")
    best = machine.choose(others, os.environ.get("ZINC_ATTN_DEVICE"))
    return za.Device.open(best.index, runtime=runtime)


def system_drivers() -> dict[str, str]:
    """The environment of a program that takes the first device of a kind, without SwiftShader, which may be it."""
    return {name: value for name, value in os.environ.items() if name != "VK_ADD_DRIVER_FILES"}


def raising(error: type[BaseException]) -> Callable[..., Any]:
    """A function that takes anything."""

    def raises(*_: Any) -> Any:
        raise error("injected")

    return raises


def needs_matrix_units(device: za.Device) -> None:
    """Skip where the device, the dispatcher or the package has none."""
    try:
        check_arithmetic("matrix", device, "f16")
    except (UnsupportedError, RuntimeUnavailableError, KernelError) as error:
        pytest.skip(str(error))


def needs_radv() -> None:
    """Skip where nothing can be compiled for gfx1201."""
    try:
        compile_programs([])
    except NoVulkanError as error:
        pytest.skip(str(error))


def instructions(spirv: bytes) -> list[list[int]]:
    """[opcode, operands …] of every instruction."""
    words, index, decoded = np.frombuffer(spirv, np.uint32).tolist(), 5, []
    while index < len(words):
        length = words[index] >> 16
        decoded.append([words[index] & 0xFFFF, *words[index + 1 : index + length]])
        index += length
    return decoded


def has_int8_units(info: DeviceInfo) -> bool:
    """Whether matrix units can attend arithmetic "integer": the device's, in a package built with their kernel."""
    return info.matrix.int8 is not None and (SPIRV / UNITS.file).exists()
