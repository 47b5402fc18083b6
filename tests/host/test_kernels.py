"""Kernel declarations against the shaders and the SPIR-V built from them."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zinc_attn import limits, shapes
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels import glsl, questions
from zinc_attn.kernels.dispatches import AttendVariant
from zinc_attn.kernels.families import CPU
from zinc_attn.kernels.sizes import attend_sizes, shared_bytes, value_passes
from zinc_attn.kernels.tuning import SHARED_VECTORS, shared_rows
from zinc_attn.runtime.device import SPIRV
from zinc_attn.storage import STORAGE

ROOT = Path(__file__).parents[2]
CANONICAL = [decl for decl in kernels.MODULES if decl.extension is None]
# results of these may differ between drivers, or fuse what must not be fused
FORBIDDEN = re.compile(
    r"OpFDiv|OpFRem|OpFMod|OpDot|OpMatrixTimes|OpVectorTimesMatrix|"
    r"OpExtInst %\w+ %\w+ "
    r"(Exp|Exp2|Log|Log2|Pow|Sqrt|InverseSqrt|Tanh|Sin|Cos|Ldexp|Length|Normalize|FMix|SmoothStep)\b"
)


def test_the_generated_files_are_those_of_the_declarations():
    for name, text in glsl.generated().items():
        assert (ROOT / "shaders" / name).read_text() == text, name


def test_the_questions_are_the_oracle_s():
    """After a failure run python -m zinc_attn.kernels.questions."""
    assert questions.FILE.read_bytes() == questions.answered()


def test_kernels_needs_only_the_standard_library(tmp_path):
    """The wheel is built in an empty environment: nothing outside the package and the standard library is loaded."""
    code = (
        "import sys, types; sys.modules['zinc_attn'] = p = types.ModuleType('zinc_attn'); p.__path__ = [sys.argv[1]]; "
        "import zinc_attn.kernels.c, zinc_attn.kernels.glsl; "
        "print(*(n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names))"
    )
    command = [sys.executable, "-IS", "-c", code, str(ROOT / "zinc_attn")]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()
    assert "zinc_attn.kernels.declarations" in loaded
    assert [n for n in loaded if n.split(".")[0] != "zinc_attn" and not n.startswith(("_", "distutils"))] == []
    assert not [n for n in loaded if n.startswith("zinc_attn.runtime")]


@pytest.mark.parametrize("decl", CANONICAL, ids=lambda d: d.file)
def test_every_float_operation_is_exact_or_forbidden(decl):
    if (tool := shutil.which("spirv-dis")) is None:
        pytest.skip("spirv-dis is not installed (package spirv-tools)")
    text = subprocess.run([tool, SPIRV / decl.file], check=True, capture_output=True, text=True).stdout
    contracted = set(re.findall(r"OpDecorate (%\w+) NoContraction", text))
    arithmetic = re.findall(r"(%\w+) = Op(?:FAdd|FSub|FMul|VectorTimesScalar|FNegate) ", text)
    assert len(arithmetic) >= {"append": 0, "copy": 0, "round_q": 2}.get(decl.name, 20)
    assert [r for r in arithmetic if r not in contracted] == []
    assert FORBIDDEN.search(text) is None
    # attend asks for the number of its subgroup, and no kernel has an operation of a subgroup
    known = {"Shader", "GroupNonUniform"} if decl is kernels.ATTEND else {"Shader"}
    assert {*re.findall(r"OpCapability (\w+)", text)} == known and "= OpGroupNonUniform" not in text
    # those of storage.glsl give the same bits where a driver does not fuse them: two have exact products, and iq4_nl's
    # three make a number that is rounded to a whole one, far from the middle of two
    fused = 6 if decl is kernels.ATTEND else int(decl in (kernels.PRIMITIVES, kernels.MULTIPLY_ADD))
    assert len(re.findall(r"OpExtInst %\w+ %\w+ Fma ", text)) == fused  # one of them is multiply_add's


def test_value_slices_cover_v():
    sizes = range(1, limits.MAX_HEAD_DIM + 1)
    for v_head_dim, latent in itertools.product(sizes, (False, True)):
        shape = shapes.AttnShape(1, 1, limits.MAX_HEAD_DIM, v_head_dim, latent)
        width, v_dim = shape.value_slice, shape.v_dim
        assert v_dim >= v_head_dim and v_dim % width == v_dim % limits.V_DIMS == 0 and v_dim // width <= limits.WAVE
        assert v_dim - v_head_dim < max(width, limits.V_DIMS)
        assert width == 2 or v_head_dim > limits.WAVE * width // 2
        k_dim = shapes.AttnShape(1, 1, v_head_dim, latent=latent).k_dim
        assert k_dim % limits.K_DIMS == 0 and k_dim >= (v_dim if latent else v_head_dim)


DIMS = (40, 65, 96, 128, 256, 512, 576)
TYPES = (*STORAGE, "q8_0/q4_0", "f16/q5_1")


def shapes_of(dtype):
    """Every pair of sizes of K and V; latent ones where K's and V's types are one."""
    for head_dim, v_head_dim in itertools.product(DIMS, DIMS):
        yield shapes.AttnShape(1, 1, head_dim, v_head_dim)
        if v_head_dim <= head_dim and "/" not in dtype:
            yield shapes.AttnShape(1, 1, head_dim, v_head_dim, latent=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_sizes_fit_the_rows_and_the_lanes(dtype):
    for shape in shapes_of(dtype):
        plain = shapes.AttnShape(1, 1, shape.head_dim, shape.v_head_dim)
        k, v = shapes.row_format(shape, dtype), shapes.row_format(plain, dtype)
        for heads in (1, 2, 5, 8, SHARED_VECTORS):
            n = attend_sizes(shape, heads, dtype)
            assert (n["K_VALUES"], n["K_SCALES"]) == (k.k_values, k.k_scales)
            assert (n["V_VALUES"], n["V_SCALES"]) == (v.v_values, v.v_scales)
            assert n["SLICE"] * n["VALUE_PASSES"] == n["WHOLE_SLICE"] == shape.value_slice
            assert n["VALUE_LANES"] * shape.value_slice == shape.v_dim and n["VALUE_LANES"] <= limits.WAVE
            assert n["SLICE"] * heads <= n["LANE_SUMS"] or heads > shared_rows(shape, 1 << 16)
            assert n["VALUE_PASSES"] == value_passes(shape, heads)
            assert n["LOAD_WORDS"] * n["SLICE_LOADS"] == n["SLICE_WORDS"]
            # a load of several words is aligned to them: where a row of V begins, and within a chunk of K
            assert (n["CHUNK_WORDS"] if shape.latent else n["V_VALUES"]) % n["LOAD_WORDS"] == 0
            assert n["CHUNK_WORDS"] * (shape.k_dim // 8) == n["K_VALUES"]
            for lanes in (8, 16, 32) if n["VALUE_PASSES"] == 1 else (32,):
                fold = attend_sizes(shape, heads, dtype, CPU, lanes)
                assert n["KEYS_AHEAD"] >= fold["KEYS_AHEAD"] >= 2
                # a round of the fold has room, and a lane's dimensions are whole rounds
                assert fold["FOLD_DIMS"] * lanes <= fold["FOLD_ROOM"] and fold["SLICE"] % fold["FOLD_DIMS"] == 0
                last = fold["FOLD_BEGIN"] + 8 * heads * fold["FOLD_DIMS"] * lanes
                assert max(last, 8 * 64 * heads) <= fold["SHARED_FLOATS"]
            assert shared_bytes(shape, heads) == 4 * (n["SHARED_FLOATS"] + 8 * heads * (5 + n["V_BLOCKS"]))


def test_the_table_at_the_head_of_attend_has_the_sizes():
    text = (ROOT / "shaders" / "attend/attend.comp").read_text()
    variant = AttendVariant(shapes.AttnShape(16, 2, 256), "f16", "discrete", 64)
    decl, values = variant.program()
    known = {name.upper(): value for name, value in zip(decl.spec, values, strict=True)}
    known |= attend_sizes(variant.shape, known["VECTORS"], "f16")
    table = {name: int(size) for name, size in re.findall(r"^//     ([A-Z_]+) +(\d+)  ", text, re.MULTILINE)}
    shared = table.keys() & known.keys()
    assert len(table) == 13 and len(shared) == 9
    assert {name: table[name] for name in shared} == {name: known[name] for name in shared}


def test_shaders_are_short():
    generated = {ROOT / "shaders" / name for name in (*glsl.generated(), "graph/contract.glsl")}
    for path in set((ROOT / "shaders").rglob("*.*")) - generated:
        assert len(path.read_text().splitlines()) <= 170, path.name
