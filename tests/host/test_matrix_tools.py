"""Arithmetic with matrix units without a device: who may use it, and what the tools say of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support import GPU, fake_device

from zinc_attn.cache.rows import Largest
from zinc_attn.cli import check as check_command
from zinc_attn.decode import arithmetic as rules
from zinc_attn.errors import ArgumentError, DTypeError, KernelError, UnsupportedError, ValueRangeError
from zinc_attn.kernels.matrix import NO_MATRICES
from zinc_attn.runtime import device as opened
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.check import outcome as judging
from zinc_attn.tools.check import record
from zinc_attn.tools.check.cases import Case
from zinc_attn.tools.check.outcome import Outcome
from zinc_attn.tools.cost.cards import RDNA4_UNITS
from zinc_attn.tools.harness.bits import compare, truth
from zinc_attn.tools.measure import CallSpec

SHAPE, LARGE = AttnShape(4, 2, 64), AttnShape(16, 2, 256)
SMALL = Case(SHAPE, "f16", 130, kind="coarse", rows=20, arithmetic="matrix")


def outcome(case=SMALL, off=0.0):
    """The outcome of a device that gives the oracle's numbers, one of them ``off``."""
    result = judging.oracle_output(case, case.data())
    result.out[3, 1, 5] += off
    return Outcome(case, "a device", result)


@pytest.mark.parametrize("arithmetic", ["Matrix", "exact", None, ["matrix"]])
def test_what_names_no_arithmetic(arithmetic):
    with pytest.raises(ArgumentError) as refused:
        rules.check_arithmetic(arithmetic, fake_device(), "f16", SHAPE)
    names = "'canonical', 'fused', 'integer', 'matrix', 'matrix-prefill'"
    assert str(refused.value) == f"arithmetic: got {arithmetic!r}, expected one of {names}"


@pytest.mark.parametrize("arithmetic", ["matrix", "matrix-prefill"])
def test_who_may_not_use_it(arithmetic, monkeypatch):
    monkeypatch.setattr(rules, "load_spirv", lambda _: b"")  # this package may be built without the kernel
    assert rules.check_arithmetic(arithmetic, fake_device(), "f16", LARGE) == arithmetic
    with pytest.raises(UnsupportedError, match=r"does not offer VK_KHR_cooperative_matrix.*use arithmetic 'canonical'"):
        rules.check_arithmetic(arithmetic, fake_device(NO_MATRICES), "f16", SHAPE)
    for dtype in ("f32", "f16/f32", "f32/q8_0"):
        with pytest.raises(
            DTypeError, match=r"K or V in f32, .* float16 holds; use dtype 'f16'.*round_rows=True rounds"
        ):
            rules.check_arithmetic(arithmetic, fake_device(), dtype, SHAPE)
    for facts, said in ({"shared_bytes": 8192}, "8,192"), ({"max_invocations": 16}, "65,536"):
        with pytest.raises(UnsupportedError, match=f"do not fit in {said} bytes of the shared"):
            rules.check_arithmetic(arithmetic, fake_device(RDNA4_UNITS._replace(**facts)), "f16", LARGE)


def test_a_package_without_the_kernel(monkeypatch, tmp_path):
    """A compiler that is too old builds all but this kernel, and the refusal says so."""
    missing = {"missing": {"attend_matrix": "Glslang Version: 11:12.0.0 does not know GL_KHR_cooperative_matrix"}}
    (tmp_path / "build.json").write_text(json.dumps(missing))
    monkeypatch.setattr(opened, "SPIRV", tmp_path)
    with pytest.raises(KernelError, match=r"attend_matrix: the package was built without it: .*a newer glslang$"):
        rules.check_arithmetic("matrix", fake_device(), "f16", SHAPE)


@pytest.mark.parametrize(
    ("kind", "asked", "file", "facts", "attends"),
    (
        ("discrete", None, "attend_units.spv", RDNA4_UNITS, True),
        ("discrete", "0", "attend_units.spv", RDNA4_UNITS, False),
        ("cpu", None, "attend_units.spv", RDNA4_UNITS, False),
        ("cpu", "1", "attend_units.spv", RDNA4_UNITS, True),
        ("discrete", "1", "attend_matrix.spv", RDNA4_UNITS, False),
        ("discrete", "1", "attend_units.spv", RDNA4_UNITS._replace(int8=None), False),
        ("discrete", "1", "attend_units.spv", RDNA4_UNITS._replace(shared_bytes=8192), False),
    ),
)
def test_which_units_attend(monkeypatch, tmp_path, kind, asked, file, facts, attends):
    """Integers of many rows, with a kernel that was built, and room: a GPU's units, or those that are asked for."""
    (tmp_path / file).touch()
    monkeypatch.setattr(opened, "SPIRV", tmp_path)
    monkeypatch.setenv("ZINC_ATTN_UNITS", asked or "")
    assert opened.Device.attends_by_units(fake_device(facts, kind=kind), LARGE) == attends


def test_magnitudes_beyond_float16():
    rules.check_half_range("matrix", 65504.0, Largest(65504.0, 65504.0))
    for name, *sizes in ("q", 65505.0, Largest()), ("k", 1.0, Largest(7e4, 1.0)), ("v", 1.0, Largest(1.0, 7e4)):
        with pytest.raises(ValueRangeError, match=f"{name}: got a.* magnitude of .*, expected at most 65504"):
            rules.check_half_range("matrix-prefill", *sizes)


def test_the_oracle_is_within_the_bound_and_a_wrong_number_is_not():
    data = SMALL.data()
    good, bad = outcome(), outcome(off=0.5)
    good.judge(data, {})
    bad.judge(data, {})
    assert good.status == "pass" and good.verified.startswith("bound (") and good.shown == {10: 0, 11: 1}
    assert bad.status == "FAIL" and not bad.verified
    (line,) = [bad.line(fault) for fault in bad.faults]
    assert line.startswith("11 error against float64, in its bound, float64: out[3, 1, 5]: got ")
    assert "1 of 5,120 elements are beyond the bound" in line
    other = outcome(SMALL._replace(arithmetic="canonical"), off=0.5)
    other.judge(data, {})
    assert other.status == "FAIL" and not other.verified and "the NumPy oracle" in other.line(other.faults[0])


def test_a_missing_number_is_beyond_every_bound():
    """A row without keys has an lse of -inf, which is right; the truth of a sample is that of the last heads."""
    blind = SMALL._replace(context=30, mask="blind")
    empty, sample = judging.oracle_output(blind, blind.data()), judging.reference_arguments(blind, blind.data(), 0)
    assert np.all(np.isinf(empty.lse)) and truth(*sample).share(empty) == 0
    want, result = truth(*judging.reference_arguments(SMALL, SMALL.data())), outcome().result
    assert result is not None and want.share(result) < 0.01
    assert truth(*judging.reference_arguments(SMALL, SMALL.data(), 0)).share(result) < 0.01
    result.lse[0, 0] = np.nan
    difference = compare(result, want)
    assert want.share(result) == np.inf and difference is not None and "lse[0, 0]: got nan" in difference.text()


def test_a_record_names_the_driver_and_is_of_no_other():
    source = f"r.json [0], {record.origin(record.maker(fake_device()))}"
    assert GPU.driver in source and record.is_of(source, fake_device())
    assert not record.is_of(source, fake_device(driver="radv Mesa 27"))
    changed = outcome()
    changed.judge(SMALL.data(), {source: {str(SMALL): "0" * 64}, "other": {"another case": "1" * 64}})
    (fault,) = changed.faults
    assert fault.property == 10 and fault.text.endswith("expected 0000000000000000")


def test_a_record_of_another_device_is_refused():
    with pytest.raises(ArgumentError, match="the bits of matrix units are a driver's own"):
        check_command.check_sources("matrix", {"r.json [0], another": {}}, [fake_device()])
    check_command.check_sources("canonical", {"r.json [0], another": {}}, [fake_device()])


def test_few_rows_of_matrix_prefill_have_the_oracles_bits():
    spec = CallSpec(SHAPE, 1, [64], arithmetic="matrix-prefill")
    assert not spec.bounded and not replace(spec, q_len=7).bounded and replace(spec, q_len=8).bounded
    assert replace(spec, arithmetic="matrix").bounded
    with pytest.raises(ArgumentError, match="arithmetic: got 'x', expected one of"):
        replace(spec, arithmetic="x")
