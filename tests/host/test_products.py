"""A float32 product and a sum rounded once, against exact rationals, and what a device is asked of it."""

from fractions import Fraction

import numpy as np
import pytest
from support import instructions

import zinc_attn as za
from zinc_attn.canonical import products
from zinc_attn.canonical.constants import FUSED_SCALE
from zinc_attn.kernels import declarations as kernels
from zinc_attn.runtime.device import load_spirv
from zinc_attn.runtime.multiply_add import module_for

LEAST = Fraction(2) ** -149  # the smallest float32


def rounded(x: Fraction) -> np.float32:
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
    want = [rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in triples]
    got = products.fma(a, b, c)
    assert np.array_equal(got, np.array(want, np.float32)), np.flatnonzero(got != want)[:5]


def test_the_question_tells_ways_apart():
    """Neither two roundings, nor float64's and float32's, nor parts that are added to nearest give all sums."""
    a, b, c = products.triples()
    want = products.fma(a, b, c)
    exact = a.astype(np.float64) * b
    product, twice = a * b, (exact + c).astype(np.float32)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    to_nearest = total + (lost + (exact - product).astype(np.float32))
    for got in (product + c, twice, to_nearest):
        assert 100 < np.count_nonzero(got != want) < products.TRIPLES
    least = np.abs(np.concatenate([want[want != 0], exact.astype(np.float32)])).min()
    assert least * 2.0**-23 >= 2.0**-149 and np.isfinite(want).all()


@pytest.mark.parametrize("decl", [kernels.MULTIPLY_ADD, kernels.ATTEND], ids=lambda decl: decl.name)
def test_the_module_with_the_operation(decl):
    """fma() of GLSL.std.450 becomes OpFmaKHR with the same operands, behind its capability and its extension."""
    before, after = (instructions(x) for x in (load_spirv(decl), module_for("OpFmaKHR", load_spirv(decl))))
    assert module_for("fma()", load_spirv(decl)) == load_spirv(decl)
    replaced = [words for words in before if words[0] == 12 and words[4] == 50]
    fused = [words for words in after if words[0] == 4427]
    assert fused and [[12, words[1], words[2], before_set(before), 50, *words[3:]] for words in fused] == replaced
    known = set(map(tuple, before))
    declared = [words for words in after if tuple(words) not in known and words[0] != 4427]
    assert declared == [[17, 6030], [10, *np.frombuffer(b"SPV_KHR_fma\0", np.uint32).tolist()]]
    order = [words[0] for words in after]
    assert max(i for i, opcode in enumerate(order) if opcode == 17) < order.index(10) < order.index(11)


def before_set(module: list[list[int]]) -> int:
    """The id of GLSL.std.450."""
    return next(words[1] for words in module if words[0] == 11)


def test_tiny_values_lose_no_bit_to_a_driver_that_flushes(rng):
    """Weighted values are scaled by FUSED_SCALE, so that no fused sum is subnormal, and exactly scaled back."""
    q, k = np.zeros((1, 8), np.float32), np.zeros((130, 1, 8), np.float32)
    v = (rng.uniform(1, 2, (130, 1, 8)) * 2.0**-40).astype(np.float32)
    out, _ = za.reference.emulate(q, k, v, arithmetic="fused")
    assert FUSED_SCALE * 2.0**-48 * 2.0**-23 * 2.0**-63 > 2.0**-126
    assert np.allclose(out[0], v[:, 0].astype(np.float64).mean(axis=0), rtol=1e-5, atol=0)
