"""Rows of 16-bit floats: bfloat16 and float16 values keep their bits, and with round_rows wider ones are rounded to
nearest even, as the caller would have rounded them."""

import re

import ml_dtypes
import numpy as np
import pytest

from zinc_attn.cache import rows
from zinc_attn.canonical.constants import MAX_INPUT, MIN_INPUT
from zinc_attn.checks import check_array
from zinc_attn.errors import DTypeError, ValueRangeError
from zinc_attn.shapes import AttnShape

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NARROW = {"f16": np.dtype(np.float16), "bf16": BFLOAT16}
UPPER = np.arange(1 << 16, dtype=np.uint16)  # the bits of every 16-bit value
BRAIN = UPPER.view(BFLOAT16)
VALUES = (UPPER.astype(np.uint32) << 16).view(np.float32)  # those of BRAIN


def widened(x):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32)


def edges(dtype):
    """float32 values at, halfway between and beside the values of ``dtype``: ties to even go down and up."""
    exact = widened(UPPER.view(dtype))
    low = np.sort(exact[np.abs(exact) <= MAX_INPUT])
    middle = ((low[1:].astype(np.float64) + low[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(one, to) for one in (low, middle) for to in (np.float32(-np.inf), np.float32(np.inf))]
    return [low, middle, *beside]


LIMITS = np.float32([np.nan, *(sign * x for x in (65519.99, 65520, 7e4, 2.0**60, 2.0**61, np.inf) for sign in (1, -1))])
GIVEN = [np.concatenate([LIMITS, *edges(np.float16), *edges(BFLOAT16)]), UPPER.view(np.float16), BRAIN]
TOO_LARGE = "got {:g}, expected a finite value of at most 2**60"
NO_HALF = "got {:g}, a f16 cache takes magnitudes of at most 65504, the largest float16; use a bf16 or f32 cache"
NOT_EXACT = (
    "not a bfloat16 value; a bf16 cache takes bfloat16, or float32 or float16 values that bfloat16 holds exactly; a "
    "cache made with round_rows=True rounds float32 and float16"
)


@pytest.mark.parametrize("rounds", (False, True))
@pytest.mark.parametrize("cache", NARROW)
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given.dtype.name)
def test_rows_are_those_that_the_caller_would_have_rounded_or_are_refused(given, cache, rounds):
    """Tiny values become +0, zeros keep their sign, and bfloat16 arrays are taken without a copy."""
    narrow, x = NARROW[cache], widened(given)
    if cache == "f16" and given.dtype != narrow and not rounds:
        message = rf"^k: got dtype {given.dtype}, a f16 cache takes float16; a cache made with round_rows=True rounds"
        with pytest.raises(DTypeError, match=message):
            rows.stored_values("k", given.reshape(-1, 1, 1), cache)
        return
    flushed = np.where((np.abs(x) < MIN_INPUT) & (x != 0), np.float32(0), x)
    with np.errstate(all="ignore"):
        want = flushed.astype(narrow)
    left = np.ones(len(x), np.bool_)
    for text, refused in (
        (TOO_LARGE, ~(np.abs(x) <= MAX_INPUT)),
        (NO_HALF, (np.abs(x) >= 65520) & (cache == "f16")),
        (NOT_EXACT, (widened(want) != flushed) & (not rounds)),
    ):
        found, left = np.flatnonzero(left & refused), left & ~refused
        for at in {*found[: len(LIMITS)], *found[:: len(found) // 100 + 1]}:
            array = np.ones((3, 2, 64), given.dtype)
            array[1, 0, 5] = given[at]
            with pytest.raises(ValueRangeError, match=f"^{re.escape('k[1, 0, 5]: ' + text.format(x[at]))}$"):
                rows.stored_values("k", array, cache, rounds)
    assert np.count_nonzero(left) > 5_000
    taken = given[left].reshape(-1, 1, 1)
    values, largest = rows.stored_values("k", taken, cache, rounds)
    assert values.dtype == narrow and np.array_equal(values.reshape(-1).view(np.uint16), want[left].view(np.uint16))
    assert largest == np.abs(widened(want[left])).max()
    exact = taken[np.abs(widened(taken)) >= MIN_INPUT].reshape(-1, 1, 1)
    assert np.shares_memory(exact, rows.stored_values("k", exact, cache, rounds)[0]) == (given.dtype == narrow)


def test_each_value_has_its_bits_in_the_words_and_comes_back():
    k, v = BRAIN.reshape(-1, 2, 64), BRAIN[::-1].reshape(-1, 2, 64)
    shape = AttnShape(2, 2, 64)
    words = rows.encode(k, v, shape, "bf16")
    bits = np.concatenate([UPPER.reshape(k.shape), UPPER[::-1].reshape(k.shape)], 2)
    assert np.array_equal(words.view(np.uint16), bits)
    for got, given in zip(rows.decode(words, shape, "bf16"), (VALUES, VALUES[::-1]), strict=True):
        assert np.array_equal(got.view(np.uint32).reshape(-1), given.view(np.uint32))


def test_arrays_are_widened_where_the_caller_takes_them():
    taken = check_array("q", BRAIN, ("float32", "float16", "bfloat16"))
    assert taken.dtype == np.float32 and np.array_equal(taken.view(np.uint32), VALUES.view(np.uint32))
    with pytest.raises(DTypeError, match=r"^q: got dtype bfloat16, expected float32 or float64$"):
        check_array("q", BRAIN, ("float32", "float64"))


@pytest.mark.parametrize("dtype", NARROW)
def test_no_other_dtype_is_rounded(dtype):
    with pytest.raises(DTypeError, match=r"^k: got dtype float64, a b?f16 cache takes float32, float16 or bfloat16$"):
        rows.stored_values("k", np.ones((1, 1, 8)), dtype, round_rows=True)


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_other_caches_take_the_same_rows_either_way(dtype):
    x = np.random.default_rng(0).standard_normal((3, 2, 64), np.float32)
    assert np.array_equal(*(rows.stored_values("k", x, dtype, rounds)[0] for rounds in (False, True)))
