"""Rows of 16-bit floats: bfloat16 and float16 values keep their bits, and with round_rows wider ones are rounded to
nearest even, as the caller would have rounded them."""

import ml_dtypes
import numpy as np
import pytest

from zinc_attn.cache import rows
from zinc_attn.canonical.constants import MAX_INPUT, MIN_INPUT
from zinc_attn.checks import check_array
from zinc_attn.errors import DTypeError, ValueRangeError
from zinc_attn.shapes import AttnShape

NARROW = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UPPER = np.arange(1 << 16, dtype=np.uint16)  # the bits of every 16-bit value
BRAIN = UPPER.view(ml_dtypes.bfloat16)
VALUES = (UPPER.astype(np.uint32) << 16).view(np.float32)  # those of BRAIN


def test_each_value_has_its_bits_in_the_words_and_comes_back():
    k, v = BRAIN.reshape(-1, 2, 64), BRAIN[::-1].reshape(-1, 2, 64)
    shape = AttnShape(2, 2, 64)
    words = rows.encode(k, v, shape, "bf16")
    assert np.array_equal(
        words.view(np.uint16), np.concatenate([UPPER.reshape(k.shape), UPPER[::-1].reshape(k.shape)], 2)
    )
    for got, given in zip(rows.decode(words, shape, "bf16"), (VALUES, VALUES[::-1]), strict=True):
        assert np.array_equal(got.view(np.uint32).reshape(-1), given.view(np.uint32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_values_are_taken_as_they_are(dtype):
    """And bfloat16 arrays without a copy."""
    magnitudes = np.abs(VALUES)
    normal = BRAIN[(magnitudes >= MIN_INPUT) & (magnitudes <= MAX_INPUT)]
    assert len(normal) == 2 * (100 * 128 + 1)  # 128 in each octave from 2**-40 to 2**60, of both signs
    given = normal.astype(dtype).reshape(-1, 1, 1)
    taken, largest = rows.stored_values("k", given, "bf16")
    assert taken.dtype == BRAIN.dtype and largest == MAX_INPUT
    assert np.array_equal(taken.reshape(-1).view(np.uint16), normal.view(np.uint16))
    assert np.shares_memory(taken, given) == (dtype is ml_dtypes.bfloat16)


def test_tiny_values_are_flushed_and_large_ones_refused():
    sizes = np.abs(VALUES)
    taken, largest = rows.stored_values("k", BRAIN[sizes <= MAX_INPUT].reshape(-1, 1, 1), "bf16")
    want = np.where(sizes >= MIN_INPUT, UPPER, 0)[sizes <= MAX_INPUT]
    assert np.array_equal(taken.reshape(-1).view(np.uint16) & 0x7FFF, want & 0x7FFF) and largest == MAX_INPUT
    for value in BRAIN[~(sizes <= MAX_INPUT)][::97]:
        with pytest.raises(ValueRangeError, match=r"^k\[0, 0, 0\]: got .*, expected a finite value of at most 2"):
            rows.stored_values("k", np.full((1, 1, 1), value), "bf16")


@pytest.mark.parametrize("lower", [1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_nothing_is_rounded(lower):
    """Also no tie, which lies halfway between two values."""
    between = (np.float32([1.0, -1.0, 2.0**-30]).view(np.uint32) | np.uint32(lower)).view(np.float32)
    for x in between:
        with pytest.raises(ValueRangeError, match=r"^k\[0, 0, 0\]: not a bfloat16 value"):
            rows.stored_values("k", np.full((1, 1, 1), x, np.float32), "bf16")


def test_arrays_are_widened_where_the_caller_takes_them():
    taken = check_array("q", BRAIN, ("float32", "float16", "bfloat16"))
    assert taken.dtype == np.float32 and np.array_equal(taken.view(np.uint32), VALUES.view(np.uint32))
    with pytest.raises(DTypeError, match=r"^q: got dtype bfloat16, expected float32 or float64$"):
        check_array("q", BRAIN, ("float32", "float64"))


# --- wider rows --------------------------------------------------------------------------------------------


def edges(dtype):
    """float32 values at, halfway between and beside the values of ``dtype``: ties to even go down and up."""
    with np.errstate(invalid="ignore"):
        exact = UPPER.view(NARROW[dtype]).astype(np.float32)
    low = np.sort(exact[np.isfinite(exact) & (np.abs(exact) <= 2.0**60)])
    middle = ((low[1:].astype(np.float64) + low[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(one, to) for one in (low, middle) for to in (np.float32(-np.inf), np.float32(np.inf))]
    return np.concatenate([low, middle, *beside])


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


def test_bfloat16_rows_in_an_f16_cache_and_float16_rows_in_a_bf16_cache():
    with np.errstate(invalid="ignore"):
        brain, half = (UPPER.view(NARROW[name]).reshape(-1, 1, 1) for name in ("bf16", "f16"))
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
