"""Rows wider than a cache's dtype: with round_rows they become what the caller would have rounded, to nearest even."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zinc_attn.cache import rows
from zinc_attn.errors import DTypeError, ValueRangeError

NARROW = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def edges(dtype: str) -> Any:
    """float32 values at, halfway between and beside the values of ``dtype``: ties to even go down and up."""
    with np.errstate(invalid="ignore"):
        exact = ALL_BITS.view(NARROW[dtype]).astype(np.float32)
    low = np.sort(exact[np.isfinite(exact) & (np.abs(exact) <= 2.0**60)])
    middle = ((low[1:].astype(np.float64) + low[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(one, to) for one in (low, middle) for to in (np.float32(-np.inf), np.float32(np.inf))]
    return np.concatenate([low, middle, *beside])


def as_float16_bits(x: float) -> int:
    """Nearest even by exact arithmetic: the float16 whose distance is the smallest, of two the even one."""
    finite = ALL_BITS[:0x7C00]
    values = finite.view(np.float16).astype(np.float64)
    at = int(np.searchsorted(values, abs(x)))
    near = [i for i in (at - 1, at) if 0 <= i < len(values)]
    return min(near, key=lambda i: (abs(values[i] - abs(x)), i % 2)) | (0x8000 if x < 0 else 0)


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_are_those_that_the_caller_would_have_rounded(dtype):
    x = edges(dtype)
    x = x[(np.abs(x) < rows._F16_OVERFLOW) & (np.abs(x) <= 2.0**60) & ((np.abs(x) >= 2.0**-39) | (x == 0))].reshape(
        -1, 1, 1
    )
    values, largest = rows.stored_values("k", x, dtype, round_rows=True)
    want = x.astype(NARROW[dtype])
    assert values.dtype == want.dtype and np.array_equal(values.view(np.uint16), want.view(np.uint16))
    assert largest == np.abs(want.astype(np.float32)).max()
    exact, _ = rows.stored_values("k", want, dtype)
    assert np.array_equal(exact.view(np.uint16), want.view(np.uint16))


def test_ties_go_to_even():
    x = np.random.default_rng(0).choice(edges("f16"), 3000)
    x = x[(np.abs(x) < rows._F16_OVERFLOW) & (x != 0)]
    values, _ = rows.stored_values("k", x.reshape(-1, 1, 1), "f16", round_rows=True)
    assert values.view(np.uint16).reshape(-1).tolist() == [as_float16_bits(float(one)) for one in x]


def test_bfloat16_rows_in_an_f16_cache_and_float16_rows_in_a_bf16_cache():
    with np.errstate(invalid="ignore"):
        brain, half = (ALL_BITS.view(NARROW[name]).reshape(-1, 1, 1) for name in ("bf16", "f16"))
        wide, halves = brain.astype(np.float32), half.astype(np.float32)
    brain = brain[(np.abs(wide) < rows._F16_OVERFLOW) & ((np.abs(wide) >= 2.0**-39) | (wide == 0))].reshape(-1, 1, 1)
    half = half[np.isfinite(halves)].reshape(-1, 1, 1)
    for given, dtype in ((brain, "f16"), (half, "bf16")):
        values, _ = rows.stored_values("k", given, dtype, round_rows=True)
        want = given.astype(np.float32).astype(NARROW[dtype])
        assert np.array_equal(values.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [65520.0, 70000.0, 2.0**60])
def test_what_overflows_float16_is_refused_by_name(value, sign):
    x = np.full((3, 2, 64), np.nextafter(np.float32(65520), np.float32(0)))
    assert np.all(rows.stored_values("v", x, "f16", round_rows=True)[0] == 65504)
    x[1, 0, 5] = sign * value
    with pytest.raises(ValueRangeError) as caught:
        rows.stored_values("v", x, "f16", round_rows=True)
    assert str(caught.value) == (
        f"v[1, 0, 5]: got {sign * value:g}, a f16 cache takes magnitudes of at most 65504, the largest float16; use a "
        "bf16 or f32 cache"
    )


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**61])
def test_what_no_cache_takes_is_not_rounded_either(dtype, value):
    x = np.ones((3, 2, 64), np.float32)
    x[2, 1, 63] = value
    with pytest.raises(ValueRangeError, match=r"^k\[2, 1, 63\]: got .*, expected a finite value of at most 2\*\*60$"):
        rows.stored_values("k", x, dtype, round_rows=True)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_no_other_dtype_is_rounded(dtype):
    with pytest.raises(DTypeError, match=r"^k: got dtype float64, a b?f16 cache takes float32, float16 or bfloat16$"):
        rows.stored_values("k", np.ones((1, 1, 8)), dtype, round_rows=True)


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_other_caches_take_the_same_rows_either_way(dtype):
    x = np.random.default_rng(0).standard_normal((3, 2, 64), np.float32)
    assert np.array_equal(*(rows.stored_values("k", x, dtype, rounds)[0] for rounds in (False, True)))
