"""Every bfloat16 value is stored with its own bits, and no value between two of them is stored at all."""

import ml_dtypes
import numpy as np
import pytest

from zinc_attn.cache import rows
from zinc_attn.canonical.constants import MAX_INPUT, MIN_INPUT
from zinc_attn.checks import check_array
from zinc_attn.errors import DTypeError, ValueRangeError
from zinc_attn.shapes import AttnShape

UPPER = np.arange(1 << 16, dtype=np.uint16)  # the bits of every bfloat16 value
VALUES = (UPPER.astype(np.uint32) << 16).view(np.float32)
BRAIN = UPPER.view(ml_dtypes.bfloat16)


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
    for value, bits in zip(VALUES, UPPER, strict=True):
        given = bits.reshape(1, 1, 1).view(ml_dtypes.bfloat16)
        if np.abs(value) <= MAX_INPUT:
            taken, largest = rows.stored_values("k", given, "bf16")
            kept = np.abs(value) >= MIN_INPUT
            assert taken.view(np.uint16) & 0x7FFF == (bits & 0x7FFF if kept else 0) and (largest == np.abs(value))
        else:
            with pytest.raises(ValueRangeError, match=r"^k\[0, 0, 0\]: got .*, expected a finite value of at most 2"):
                rows.stored_values("k", given, "bf16")


@pytest.mark.parametrize("lower", [1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_nothing_is_rounded(lower):
    """Also no tie, which lies halfway between two values."""
    between = (np.float32([1.0, -1.0, 2.0**-30]).view(np.uint32) | np.uint32(lower)).view(np.float32)
    for x in between:
        with pytest.raises(ValueRangeError, match=r"^k\[0, 0, 0\]: not a bfloat16 value"):
            rows.stored_values("k", np.full((1, 1, 1), x, np.float32), "bf16")


def test_arrays_are_widened_where_the_caller_takes_them():
    given = UPPER.view(ml_dtypes.bfloat16)
    taken = check_array("q", given, ("float32", "float16", "bfloat16"))
    assert taken.dtype == np.float32 and np.array_equal(taken.view(np.uint32), VALUES.view(np.uint32))
    with pytest.raises(DTypeError, match=r"^q: got dtype bfloat16, expected float32 or float64$"):
        check_array("q", given, ("float32", "float64"))
