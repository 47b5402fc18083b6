"""Kernel declarations against the shaders and the SPIR-V built from them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from zinc_attn import shapes
from zinc_attn.cache import rows
from zinc_attn.kernels import contract as kernels
from zinc_attn.runtime.device import SPIRV

ROOT = Path(__file__).parents[2]
# results of these may differ between drivers, or fuse what must not be fused
FORBIDDEN = re.compile(
    r"OpFDiv|OpFRem|OpFMod|OpDot|OpMatrixTimes|OpVectorTimesMatrix|"
    r"OpExtInst %\w+ %\w+ "
    r"(Exp|Exp2|Log|Log2|Pow|Sqrt|InverseSqrt|Fma|Tanh|Sin|Cos|Ldexp|Length|Normalize|FMix|SmoothStep)\b"
)


def disassembled(name: str) -> str:
    tool = shutil.which("spirv-dis")
    if tool is None:
        pytest.skip("spirv-dis is not installed (package spirv-tools)")
    return subprocess.run([tool, str(SPIRV / f"{name}.spv")], check=True, capture_output=True, text=True).stdout


def test_contract_glsl_is_generated_from_the_declarations():
    assert (ROOT / "shaders" / "contract.glsl").read_text() == kernels.contract_glsl()


@pytest.mark.parametrize("decl", kernels.MODULES, ids=lambda d: d.name)
def test_every_float_operation_is_exact_or_forbidden(decl):
    text = disassembled(decl.name)
    contracted = set(re.findall(r"OpDecorate (%\w+) NoContraction", text))
    arithmetic = re.findall(r"(%\w+) = Op(?:FAdd|FSub|FMul|VectorTimesScalar|FNegate) ", text)
    assert len(arithmetic) > 20 or decl.name in ("append", "gather", "copy", "read")
    assert [r for r in arithmetic if r not in contracted] == []
    assert FORBIDDEN.search(text) is None


@pytest.mark.parametrize("decl", kernels.MODULES, ids=lambda d: d.name)
def test_interface_of_the_spirv(decl):
    text = disassembled(decl.name)
    assert {int(n) for n in re.findall(r"OpDecorate %\w+ Binding (\d+)", text)} == set(range(len(decl.bindings)))
    assert {int(n) for n in re.findall(r"OpDecorate %\w+ SpecId (\d+)", text)} == set(range(len(decl.spec)))
    assert "OpExecutionMode %main LocalSize 32 1 1" in text
    assert set(re.findall(r"OpCapability (\w+)", text)) == {"Shader"}


@pytest.mark.parametrize("head_dim", shapes.HEAD_DIMS)
def test_value_slices_cover_the_head_dim(head_dim):
    width = kernels.value_slice(head_dim)
    assert head_dim % width == 0 and head_dim // width <= shapes.WAVE


@pytest.mark.parametrize("head_dim", shapes.HEAD_DIMS)
@pytest.mark.parametrize("heads", range(1, kernels.SHARED_HEADS + 1))
def test_the_shader_and_the_model_pass_over_v_alike(head_dim, heads):
    text = (ROOT / "shaders" / "attend.comp").read_text()
    names = {"HEAD_DIM": head_dim, "HEADS": heads, "MAX_ACCUMULATORS": shapes.MAX_ACCUMULATORS, "WAVE": shapes.WAVE}
    for name in ("SLICE_ALL", "LANE_SUMS", "VALUE_PASSES"):
        glsl = re.search(rf"const uint {name} = (.*?);", text)[1].replace("/", "//")
        names[name] = eval(re.sub(r"(\d)u\b", r"\1", glsl).replace("?", "and").replace(":", "or"), {}, names)
    assert names["SLICE_ALL"] == kernels.value_slice(head_dim)
    assert names["VALUE_PASSES"] == kernels.value_passes(head_dim, heads)


def test_shaders_are_short():
    for path in (ROOT / "shaders").iterdir():
        assert len(path.read_text().splitlines()) <= 170, path.name


@pytest.mark.parametrize("dtype", (np.float16, np.float32))
@pytest.mark.parametrize("tokens", (1, 64, 130))
def test_layout_of_k_and_v(rng, dtype, tokens):
    k = rng.standard_normal((tokens, 3, 80)).astype(dtype)
    packed = rows.pack_k(k).view(dtype).reshape(3, rows.tiles(tokens), 10, 64, 8)
    values = rows.pack_v(k).view(dtype).reshape(3, rows.tiles(tokens) * 64, 80)
    for t in range(tokens):
        assert np.array_equal(packed[:, t // 64, :, t % 64].reshape(3, 80), k[t])
        assert np.array_equal(values[:, t], k[t])
    assert not values[:, tokens:].any()
