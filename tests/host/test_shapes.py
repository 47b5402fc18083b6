"""Storage dtypes by every name that a caller may know them by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.dtypes import EXPECTED, storage_dtype
from zinc_attn.errors import ArgumentError
from zinc_attn.tools.check import Case
from zinc_attn.tools.cost import find_card, predict
from zinc_attn.tools.export.describe import manifest
from zinc_attn.tools.measure import CallSpec

KNOWN: list[tuple[Any, str]] = [
    *((name, name) for name in ("f32", "f16", "bf16", "q8_0")),
    *zip(("float32", "float16", "bfloat16"), ("f32", "f16", "bf16"), strict=True),
    *zip((np.float32, np.float16, ml_dtypes.bfloat16), ("f32", "f16", "bf16"), strict=True),
    *((name, name) for name in ("q8_0/q4_0", "bf16/iq4_nl")),
    (("q8_0", "q4_0"), "q8_0/q4_0"),
    (["float16", np.float32], "f16/f32"),
    ("f16/f16", "f16"),
    ("float8_e4m3fn", "fp8_e4m3"),
    *((np.dtype(t), name) for t, name in ((np.float32, "f32"), (">f2", "f16"), (ml_dtypes.bfloat16, "bf16"))),
]


@pytest.mark.parametrize(("given", "name"), KNOWN)
def test_a_dtype_by_any_name(given, name):
    assert storage_dtype(given) == name
    assert za.AttnShape(4, 2, 64).kv_bytes_per_token(given) == za.AttnShape(4, 2, 64).kv_bytes_per_token(name)


def test_the_dtypes_of_torch():
    torch = pytest.importorskip("torch")
    assert [storage_dtype(t) for t in (torch.float32, torch.float16, torch.bfloat16)] == ["f32", "f16", "bf16"]
    with pytest.raises(ArgumentError, match=rf"^dtype: got torch\.float64, expected {EXPECTED}$"):
        storage_dtype(torch.float64)


def test_the_tools_take_the_same_names():
    shape, card = za.AttnShape(9, 3, 64), find_card("R9700")
    plan = za.plan_splits(1000, shape)
    assert CallSpec(shape, 1, [100], dtype="bfloat16").dtype == "bf16"
    assert Case.parse("9/3/64 float16 65") == Case.parse("9/3/64 f16 65")
    assert predict(plan, card, "float16") == predict(plan, card, "f16")
    assert manifest([shape], dtype="float16") == manifest([shape], dtype="f16")


NONE = ["F16", "", "half", np.float64, np.dtype("int8"), float, None, 2, b"f16", ["f16"]]
NO_PAIRS = ["q4_2", "q8_0/", "f16/f16/f16", (), ("f16", "f8"), "/f16", ("f16", None)]


@pytest.mark.parametrize("given", [*NONE, *NO_PAIRS])
def test_other_dtypes_are_refused(given):
    with pytest.raises(ArgumentError, match=f"^dtype: got .*, expected {EXPECTED}$"):
        storage_dtype(given)
