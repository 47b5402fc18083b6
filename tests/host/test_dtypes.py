"""Storage dtypes by every name that a caller may know them by, and rows of 16-bit floats."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.canonical.constants import MAX_INPUT, MIN_INPUT
from zinc_attn.checks import BFLOAT16
from zinc_attn.dtypes import EXPECTED, storage_dtype
from zinc_attn.errors import ArgumentError, DTypeError, ValueRangeError

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


@pytest.mark.parametrize(("dtype", "name"), KNOWN)
def test_a_dtype_by_any_name(dtype, name):
    assert storage_dtype(dtype) == name
    assert za.AttnShape(4, 2, 64).kv_bytes_per_token(dtype) == za.AttnShape(4, 2, 64).kv_bytes_per_token(name)


NONE = ["F16", "", "half", np.float64, np.dtype("int8"), float, None, 2, b"f16", ["f16"]]
NO_PAIRS = ["q4_2", "q8_0/", "f16/f16/f16", (), ("f16", "f8"), "/f16", ("f16", None)]


@pytest.mark.parametrize("dtype", [*NONE, *NO_PAIRS])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ArgumentError, match=f"^dtype: got .*, expected {EXPECTED}$"):
        storage_dtype(dtype)


# --- rows of 16-bit floats: their bits stay, and with round_rows wider ones are rounded to nearest even -------------

NARROW = {"f16": np.dtype(np.float16), "bf16": BFLOAT16}
UPPER = np.arange(1 << 16, dtype=np.uint16)  # the bits of every 16-bit value
BRAIN = UPPER.view(BFLOAT16)


def widened(x):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32)


def edges(dtype):
    """float32 values at, halfway between and beside the values of ``dtype``: ties to even go down and up."""
    exact = widened(UPPER.view(dtype))
    low = np.sort(exact[np.abs(exact) <= MAX_INPUT])
    middle = ((low[1:].astype(np.float64) + low[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(value, to) for value in (low, middle) for to in (np.float32(-np.inf), np.float32(np.inf))]
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
@pytest.mark.parametrize("numbers", GIVEN, ids=lambda numbers: numbers.dtype.name)
def test_rows_are_those_that_the_caller_would_have_rounded_or_are_refused(numbers, cache, rounds):
    """Tiny values become +0, zeros keep their sign, and bfloat16 arrays are taken without a copy."""
    narrow, x = NARROW[cache], widened(numbers)
    if cache == "f16" and numbers.dtype != narrow and not rounds:
        message = rf"^k: got dtype {numbers.dtype}, a f16 cache takes float16; a cache made with round_rows=True rounds"
        with pytest.raises(DTypeError, match=message):
            rows.stored_values("k", numbers.reshape(-1, 1, 1), cache)
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
        indices, left = np.flatnonzero(left & refused), left & ~refused
        for index in {*indices[: len(LIMITS)], *indices[:: len(indices) // 100 + 1]}:
            array = np.ones((3, 2, 64), numbers.dtype)
            array[1, 0, 5] = numbers[index]
            with pytest.raises(ValueRangeError, match=f"^{re.escape('k[1, 0, 5]: ' + text.format(x[index]))}$"):
                rows.stored_values("k", array, cache, rounds)
    assert np.count_nonzero(left) > 5_000
    taken = numbers[left].reshape(-1, 1, 1)
    values, largest = rows.stored_values("k", taken, cache, rounds)
    assert values.dtype == narrow and np.array_equal(values.reshape(-1).view(np.uint16), want[left].view(np.uint16))
    assert largest == np.abs(widened(want[left])).max()
    exact = taken[np.abs(widened(taken)) >= MIN_INPUT].reshape(-1, 1, 1)
    assert np.shares_memory(exact, rows.stored_values("k", exact, cache, rounds)[0]) == (numbers.dtype == narrow)


@pytest.mark.parametrize("dtype", NARROW)
def test_no_other_dtype_is_rounded(dtype):
    with pytest.raises(DTypeError, match=r"^k: got dtype float64, a b?f16 cache takes float32, float16 or bfloat16$"):
        rows.stored_values("k", np.ones((1, 1, 8)), dtype, round_rows=True)
