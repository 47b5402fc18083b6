"""Arithmetics "fused" and "integer" in NumPy: definitions in exact rationals, errors, and what is refused."""

from fractions import Fraction

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.cache.rows import stored, stored_scales
from zinc_attn.canonical import products
from zinc_attn.canonical.constants import FUSED_SCALE
from zinc_attn.canonical.integer import MOST_INTEGER, dots, rounded, rounded_rows, weighted
from zinc_attn.errors import ArgumentError, ShapeError, ValueRangeError

LEAST = Fraction(2) ** -149  # the smallest float32


def nearest(x: Fraction) -> np.float32:
    """The float32 nearest to a rational, of two as near the even one."""
    if x == 0:
        return np.float32(0)
    unit = LEAST
    while abs(x) >= unit * 2**24:
        unit *= 2
    return np.float32(float(round(x / unit) * unit))


def drawn(rng: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    whole = rng.integers(1 << 23, 1 << 24, count) >> rng.integers(0, 20, count)
    return np.ldexp(whole * rng.choice([-1.0, 1.0], count), rng.integers(low, high, count)).astype(np.float32)


CASES = {
    "what a device is asked": lambda rng: products.triples(),
    "any": lambda rng: [drawn(rng, 1000, -40, 20) for _ in range(3)],
    "subnormal sums": lambda rng: [drawn(rng, 1000, low, low + 20) for low in (-92, -92, -170)],
    "zeros": lambda rng: [rng.choice(np.float32([0.0, -0.0, 1.5]), 300) for _ in range(3)],
}


@pytest.mark.parametrize("case", CASES)
def test_one_rounding(rng, case):
    a, b, c = CASES[case](rng)
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    want = [nearest(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in triples]
    got = products.fma(a, b, c)
    assert np.array_equal(got, np.array(want, np.float32)), np.flatnonzero(got != want)[:5]
    if case == "what a device is asked":  # whose sums are not subnormal: the oracle adds those in place
        adder = products.FusedProducts(c.shape)
        adder.add(c, adder.factors(a), adder.factors(b))
        assert np.array_equal(c, got)


def test_tiny_values_lose_no_bit_to_a_driver_that_flushes(rng):
    """Weighted values are scaled by FUSED_SCALE, so that no fused sum is subnormal, and exactly scaled back."""
    q, k = np.zeros((1, 8), np.float32), np.zeros((130, 1, 8), np.float32)
    v = (rng.uniform(1, 2, (130, 1, 8)) * 2.0**-40).astype(np.float32)
    out, _ = za.reference.emulate(q, k, v, arithmetic="fused")
    assert FUSED_SCALE * 2.0**-48 * 2.0**-23 * 2.0**-63 > 2.0**-126
    assert np.allclose(out[0], v[:, 0].astype(np.float64).mean(axis=0), rtol=1e-5, atol=0)


TYPES = "q8_0", "q5_0", "q4_0", "iq4_nl", "q8_0/q4_0"


def whole(x: np.ndarray) -> tuple[list[int], Fraction]:
    """Numbers as integers of 12 bits, ties to even, and their unit, by rationals alone."""
    values = [Fraction(float(number)) for number in x]
    top, unit = max(map(abs, values)), Fraction(1)
    while top and top / unit >= 2048:
        unit *= 2
    while top and top / unit < 1024:
        unit /= 2
    return [round(value / unit) for value in values], unit


def test_the_definition(rng):
    """Scores of a row of three blocks, the last one short, and values of a leaf, in rationals: the same bits."""
    q = rng.standard_normal((1, 72), dtype=np.float32) * np.float32(1e-3)
    keys = rng.integers(-128, 128, (64, 72)).astype(np.float32)
    scales = rng.uniform(-1e-3, 9, (64, 3)).astype(np.float16).astype(np.float32)
    a, unit = whole(q[0])
    for key, scale in zip(keys, scales, strict=True):
        total = np.float32(0)
        for b in range(3):
            n = sum(x * int(k) for x, k in zip(a[32 * b :][:32], key[32 * b :][:32], strict=False))
            total += nearest(Fraction(n) * unit * Fraction(float(scale[b])))
        assert total == dots(q, key[None], scale[None])[0, 0]
    p = np.exp2(-rng.uniform(0, 30, 64)).astype(np.float32)
    p[5] = 0
    result = weighted(p[None, None], keys[None], scales[None])[0, 0]
    for d in (0, 31, 32, 71):
        u, unit = whole(p * scales[:, d // 32])
        assert result[d] == nearest(unit * sum(x * int(v) for x, v in zip(u, keys[:, d], strict=True)))


def test_the_largest_sums_are_exact():
    """All of one sign: 2**23 of a block and 2**24 of a leaf, below which float32 holds every whole number."""
    q, low = np.full((1, 32), 2047.6, np.float32), np.full((1, 32), -MOST_INTEGER, np.float32)
    assert dots(q, low, np.ones((1, 1), np.float32)) == -(2**23)
    values = np.full((1, 64, 1), -MOST_INTEGER, np.float32)
    assert weighted(np.full((1, 1, 64), 2047.9, np.float32), values, np.ones((1, 64, 1), np.float32)) == -(2**24)


def test_rounded_rows_stay_as_they_are(rng):
    q = rng.standard_normal((7, 3, 40), dtype=np.float32) * np.exp2(rng.integers(-39, 60, (7, 3, 1))).astype(np.float32)
    q[2, 1] = 0
    once = rounded_rows(q)
    assert np.array_equal(once, rounded_rows(once)) and not np.any(once[2, 1])
    assert np.abs(rounded(once, -1)[0]).max() <= 2048 and np.any(once != q)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_error_is_that_of_twelve_bits(rng, dtype):
    q = rng.standard_normal((3, 4, 128), dtype=np.float32)
    k, v = rng.standard_normal((2, 1500, 2, 128), dtype=np.float32)
    held = stored(k, v, dtype)
    out, _ = za.reference.emulate(q, *held, arithmetic="integer", **stored_scales(k, v, dtype))
    exact, _ = za.reference.attention(q, *held)
    assert np.linalg.norm(out - exact) < 2.2e-3 * np.linalg.norm(exact)


def test_what_is_refused(rng):
    q, (k, v) = rng.standard_normal((1, 64), dtype=np.float32), rng.standard_normal((2, 9, 1, 64), dtype=np.float32)
    held, scales = stored(k, v, "q8_0"), stored_scales(k, v, "q8_0")
    other_shape = r"k_scales: got shape \(9, 1, 1\), expected \(9, 1, 2\)"
    for change, error, message in (
        ({"v_scales": None}, ArgumentError, "v_scales: got None, expected the scales of the blocks of v's cache"),
        ({"k_scales": scales["k_scales"][:, :, :1]}, ShapeError, other_shape),
        ({"k_scales": scales["k_scales"] / 2}, ValueRangeError, "k: got values that are no integers of at most 128"),
    ):
        with pytest.raises(error, match=message):
            za.reference.emulate(q, *held, arithmetic="integer", **(scales | change))
