"""Refusals of arithmetic with matrix units, and the rule of "matrix-prefill", without a device."""

import json

import pytest
from support import fake_device

from zinc_attn.cache.rows import Largest
from zinc_attn.decode import arithmetic as rules
from zinc_attn.errors import ArgumentError, DTypeError, KernelError, UnsupportedError, ValueRangeError
from zinc_attn.kernels.matrix import NO_MATRICES
from zinc_attn.planning.arithmetic import ARITHMETICS
from zinc_attn.runtime import device as opened
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.cost.cards import RDNA4_UNITS

SHAPE = AttnShape(16, 2, 256)


@pytest.mark.parametrize("arithmetic", ["exact", "Matrix", 3, None, ["matrix"]])
def test_names(arithmetic):
    with pytest.raises(ArgumentError, match="expected one of 'canonical', 'fused', 'matrix', 'matrix-prefill'"):
        rules.check_arithmetic(arithmetic, fake_device(), SHAPE, "f16")


def test_canonical_asks_nothing_of_the_device():
    assert rules.check_arithmetic("canonical", None, SHAPE, "f32") == "canonical"  # type: ignore[arg-type]


@pytest.mark.parametrize("arithmetic", ["matrix", "matrix-prefill"])
def test_refusals(arithmetic, monkeypatch):
    monkeypatch.setattr(rules, "load_spirv", lambda _: b"")  # this package may be built without the kernel
    with pytest.raises(UnsupportedError, match=r"does not offer VK_KHR_cooperative_matrix.*use arithmetic='canonical'"):
        rules.check_arithmetic(arithmetic, fake_device(NO_MATRICES), SHAPE, "f16")
    for dtype in ("f32", "f16/f32", "f32/q8_0"):
        with pytest.raises(DTypeError, match=r"K or V in f32.*round_rows=True rounds float32 rows"):
            rules.check_arithmetic(arithmetic, fake_device(), SHAPE, dtype)
    with pytest.raises(DTypeError, match=r"pass k and v in float16, for example k\.astype"):
        rules.check_arithmetic(arithmetic, fake_device(), SHAPE, "f32", rules.ARRAYS)
    for facts, said in ({"shared_bytes": 8192}, "8,192"), ({"max_invocations": 16}, "65,536"):
        with pytest.raises(UnsupportedError, match=f"do not fit in {said} bytes of the shared"):
            rules.check_arithmetic(arithmetic, fake_device(RDNA4_UNITS._replace(**facts)), SHAPE, "f16")


def test_a_package_without_the_kernel(monkeypatch, tmp_path):
    """A compiler that is too old builds all but this kernel, and the refusal says so."""
    missing = {"missing": {"attend_matrix": "Glslang Version: 11:12.0.0 does not know GL_KHR_cooperative_matrix"}}
    (tmp_path / "build.json").write_text(json.dumps(missing))
    monkeypatch.setattr(opened, "SPIRV", tmp_path)
    with pytest.raises(KernelError, match=r"attend_matrix: the package was built without it: .*a newer glslang$"):
        rules.check_arithmetic("matrix", fake_device(), SHAPE, "f16")


def test_magnitudes_beyond_float16():
    rules.check_half_range("matrix", 65504.0, Largest(65504.0, 65504.0))
    for name, *sizes in ("q", 65505.0, Largest()), ("k", 1.0, Largest(7e4, 1.0)), ("v", 1.0, Largest(1.0, 7e4)):
        with pytest.raises(ValueRangeError, match=f"{name}: got a.* magnitude of .*, expected at most 65504"):
            rules.check_half_range("matrix-prefill", *sizes)


def test_the_canonical_one_is_the_default():
    assert ARITHMETICS[0] == "canonical" and [rules.arithmetic_name(name) for name in ARITHMETICS] == [*ARITHMETICS]
