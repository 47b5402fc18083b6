"""Kernel declarations against the shaders and the SPIR-V built from them."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zinc_attn import limits, shapes
from zinc_attn.cache import rows
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels import glsl
from zinc_attn.kernels.sizes import attend_sizes, keys_ahead, value_passes, value_slice
from zinc_attn.kernels.tuning import SHARED_HEADS
from zinc_attn.runtime.device import SPIRV

ROOT = Path(__file__).parents[2]
# results of these may differ between drivers, or fuse what must not be fused
FORBIDDEN = re.compile(
    r"OpFDiv|OpFRem|OpFMod|OpDot|OpMatrixTimes|OpVectorTimesMatrix|"
    r"OpExtInst %\w+ %\w+ "
    r"(Exp|Exp2|Log|Log2|Pow|Sqrt|InverseSqrt|Fma|Tanh|Sin|Cos|Ldexp|Length|Normalize|FMix|SmoothStep)\b"
)


def disassembled(file: str) -> str:
    tool = shutil.which("spirv-dis")
    if tool is None:
        pytest.skip("spirv-dis is not installed (package spirv-tools)")
    return subprocess.run([tool, str(SPIRV / file)], check=True, capture_output=True, text=True).stdout


def test_the_generated_files_are_those_of_the_declarations():
    for name, text in glsl.generated().items():
        assert (ROOT / "shaders" / name).read_text() == text, name


def test_kernels_of_one_module_differ_in_fixed_constants_only():
    assert len({d.name for d in kernels.KERNELS}) == len(kernels.KERNELS)
    for decl in kernels.KERNELS:
        module = next(m for m in kernels.MODULES if m.file == decl.file)
        assert (decl.source, decl.defines, decl.constant_names) == (
            module.source,
            module.defines,
            module.constant_names,
        )
        assert [b.name for b in decl.bindings] == [b.name for b in module.bindings]
    values = [(d.file, d.constants(())) for d in kernels.KERNELS]
    assert len(set(values)) == len(values)


def test_kernels_needs_only_the_standard_library(tmp_path):
    """The wheel is built in an empty environment: nothing outside the package and the standard library is loaded."""
    code = (
        "import sys, types; sys.modules['zinc_attn'] = p = types.ModuleType('zinc_attn'); p.__path__ = [sys.argv[1]]; "
        "import zinc_attn.kernels.glsl, zinc_attn.kernels.tuning; "
        "print(*(n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    command = [sys.executable, "-I", "-c", code, str(ROOT / "zinc_attn")]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()
    assert "zinc_attn.kernels.declarations" in loaded
    assert [n for n in loaded if n.split(".")[0] != "zinc_attn" and not n.startswith(("_", "distutils"))] == []
    assert not [n for n in loaded if n.startswith("zinc_attn.runtime")]


@pytest.mark.parametrize("decl", kernels.MODULES, ids=lambda d: d.file)
def test_every_float_operation_is_exact_or_forbidden(decl):
    text = disassembled(decl.file)
    contracted = set(re.findall(r"OpDecorate (%\w+) NoContraction", text))
    arithmetic = re.findall(r"(%\w+) = Op(?:FAdd|FSub|FMul|VectorTimesScalar|FNegate) ", text)
    assert len(arithmetic) > 20 or decl.name in ("append", "copy", "read")
    assert [r for r in arithmetic if r not in contracted] == []
    assert FORBIDDEN.search(text) is None


@pytest.mark.parametrize("decl", kernels.MODULES, ids=lambda d: d.file)
def test_interface_of_the_spirv(decl):
    text = disassembled(decl.file)
    assert {int(n) for n in re.findall(r"OpDecorate %\w+ Binding (\d+)", text)} == set(range(len(decl.bindings)))
    assert {int(n) for n in re.findall(r"OpDecorate %\w+ SpecId (\d+)", text)} == set(range(len(decl.constant_names)))
    assert "OpExecutionMode %main LocalSize 32 1 1" in text
    assert set(re.findall(r"OpCapability (\w+)", text)) == {"Shader"}


@pytest.mark.parametrize("head_dim", limits.HEAD_DIMS)
def test_value_slices_cover_the_head_dim(head_dim):
    width = value_slice(head_dim)
    assert head_dim % width == 0 and head_dim // width <= limits.WAVE


LEVELS = (("||",), ("==",), ("<=", ">"), ("+",), ("*", "/"))  # GLSL's precedence, loosest first; all bind to the left
OPERATIONS = {"||": operator.or_, "==": operator.eq, "<=": operator.le, ">": operator.gt}
OPERATIONS |= {"+": operator.add, "*": operator.mul, "/": operator.floordiv}


def evaluated_glsl(text: str, known: dict[str, int]) -> dict[str, int]:
    """The uint constants of a GLSL file, read as GLSL reads them and not by way of Python."""
    found = dict(known)
    for name, expression in re.findall(r"const uint (\w+) = (.*);", text):
        tokens = re.findall(r"\w+|\|\||==|<=|[>+*/?:()]", expression)
        found[name] = int(conditional(tokens, found))
        assert not tokens, expression
    return found


def conditional(tokens: list[str], known: dict[str, int]) -> int:
    """``test ? a : b`` or less, from the front of ``tokens``, which loses it."""
    test = binary(tokens, known, 0)
    if not tokens or tokens[0] != "?":
        return test
    tokens.pop(0)
    chosen = conditional(tokens, known)
    assert tokens.pop(0) == ":"
    other = conditional(tokens, known)
    return chosen if test else other


def binary(tokens: list[str], known: dict[str, int], level: int) -> int:
    """Operators of this level and tighter ones."""
    if level == len(LEVELS):
        return operand(tokens, known)
    left = binary(tokens, known, level + 1)
    while tokens and tokens[0] in LEVELS[level]:
        operation = OPERATIONS[tokens.pop(0)]
        left = operation(left, binary(tokens, known, level + 1))
    return left


def operand(tokens: list[str], known: dict[str, int]) -> int:
    token = tokens.pop(0)
    if token == "(":
        inside = conditional(tokens, known)
        assert tokens.pop(0) == ")"
        return inside
    return known[token] if token in known else int(token.removesuffix("u"), 0)


@pytest.mark.parametrize("dtype", kernels.STORAGE)
@pytest.mark.parametrize("build", kernels.BUILDS)
@pytest.mark.parametrize("head_dim", limits.HEAD_DIMS)
def test_shader_and_host_evaluate_the_shared_formulas_alike(head_dim, build, dtype):
    if dtype == "q8_0" and head_dim % limits.Q8_BLOCK:
        return
    text = (ROOT / "shaders" / "attend_sizes.glsl").read_text()
    contract = evaluated_glsl((ROOT / "shaders" / "contract.glsl").read_text(), {})
    for heads in range(1, SHARED_HEADS + 1):
        for ahead in (1, 2, 4):
            inputs = dict(HEAD_DIM=head_dim, HEADS=heads, CHUNKS_AHEAD=ahead, LOOP=int(build == "loop"))
            known = {**contract, **inputs, "STORAGE": contract[f"STORAGE_{dtype.upper()}"]}
            shader, host = evaluated_glsl(text, known), attend_sizes(head_dim, heads, ahead, dtype, build)
            assert {name: shader[name] for name in host} == host
            assert host["ROW_VALUES"] == shapes.value_words(head_dim, dtype)
            assert host["SCALES"] == shapes.scale_words(head_dim, dtype)
            assert host["SLICE"] * host["VALUE_PASSES"] == value_slice(head_dim)
            assert host["VALUE_PASSES"] == value_passes(head_dim, heads)
    assert keys_ahead("discrete", head_dim, 1, build, dtype) >= keys_ahead("cpu", head_dim, 1, build, dtype)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("A // (B // C)", "A / (B / C)"),
        ("A // B * C", "A / B * C"),
        ("(A + 63) // 64", "(A + 63u) / 64u"),
        ("1 if A > 2 or B == 1 else 2 if C <= 3 else 4", "A > 2u || B == 1u ? 1u : (C <= 3u ? 2u : 4u)"),
        ("2 if (A if B == 1 else C) else 3", "(B == 1u ? A : C) ? 2u : 3u"),
    ],
)
def test_formulas_as_glsl(expression, text):
    assert glsl.to_glsl(expression) == text


def test_formulas_that_glsl_does_not_have():
    with pytest.raises(
        ValueError, match=r"got 'A - 1', expected uints, names, conditionals and the operators \|\|, =="
    ):
        glsl.to_glsl("A - 1")


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
