"""Sums of products: each product is rounded before it joins its sum; in "fused" one rounding does both.

NumPy has no float32 fused multiply-add. The product of two float32 numbers is exact in float64; its sum with a third
rounds to 53 bits, and then to 24. The result is the exact sum rounded once, except where the first rounding moved the
sum to the middle of two float32 numbers. There the first rounding is to odd (Boldo, Melquiond 2008).
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .constants import FUSED_SCALE
from .state import F32, F64, f32

Words = NDArray[np.uint32]
TRIPLES: Final = 2048
_BELOW: Final = np.int64((1 << 29) - 1)  # the bits of a float64 that a float32 has no place for
_HALF: Final = np.int64(1 << 28)  # these bits, halfway between two float32 numbers


class Products:
    """Adds products to float32 sums of a shape. scale: the weights' factor while they are multiplied."""

    scale = f32(1.0)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._product = np.empty(shape, np.float32)

    def factors(self, x: F32) -> NDArray[Any]:
        """x as ``add`` takes it."""
        return x

    def add(self, sums: F32, a: NDArray[Any], b: NDArray[Any]) -> None:
        np.multiply(a, b, out=self._product)
        sums += self._product


class FusedProducts(Products):
    """Adds each product with one rounding. No sum may be subnormal, which the weights' scale prevents."""

    scale = f32(FUSED_SCALE)

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._exact, self._total = np.empty(shape), np.empty(shape)
        self._below, self._half = np.empty(shape, np.int64), np.empty(shape, np.bool_)

    def factors(self, x: F32) -> NDArray[Any]:
        return x.astype(np.float64)

    def add(self, sums: F32, a: NDArray[Any], b: NDArray[Any]) -> None:
        np.multiply(a, b, out=self._exact)
        np.add(self._exact, sums, out=self._total)
        np.bitwise_and(self._total.view(np.int64), _BELOW, out=self._below)
        half = np.equal(self._below, _HALF, out=self._half)
        addend = sums[half] if half.any() else None
        np.copyto(sums, self._total, casting="same_kind")
        if addend is not None:
            sums[half] = _rounded_once(self._exact[half], addend.astype(np.float64))


def fma(a: Any, b: Any, c: Any) -> F32:
    """a * b + c of float32 numbers, rounded once, subnormal results included."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    product, addend = np.broadcast_arrays(product, np.asarray(c, np.float64))
    return np.asarray(_rounded_once(product, addend))


def _rounded_once(x: F64, y: F64) -> F32:
    """x + y, rounded to float32 at once."""
    total = np.asarray(x + y)
    y_part = total - x
    lost = (x - (total - y_part)) + (y - y_part)  # what the sum lost, exactly (Knuth)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    once: F64 = np.where((lost != 0) & even, odd, total)
    return once.astype(np.float32)


def triple_words() -> tuple[Words, Words]:
    """The input words of the kernel multiply_add, a, b and c of a lane's two triples, and the right output words."""
    a, b, c = (x.reshape(-1, 2) for x in triples())
    operands, sums = np.stack([a, b, c], axis=1), fma(a, b, c)
    return operands.view(np.uint32).reshape(-1), sums.view(np.uint32).reshape(-1)


def triples() -> tuple[F32, F32, F32]:
    """(TRIPLES,) numbers a, b, c, always the same, whose a * b + c shows at which steps a driver rounds.

    Their magnitudes are those of sums of attention: no exact sum has a bit below 2**-126. The index modulo 8 is a
    triple's kind. 0: c cancels the product's first 24 bits; 1: all of these but the last. 2, 5 to 7: c has any bits.
    3: the product lies halfway between two float32 numbers, and c is far below it. 4: c lies halfway, and the product
    is half a unit of c but for its last bits.
    """
    rng = np.random.default_rng(2027)
    kind = np.arange(TRIPLES) % 8

    def drawn(low: int, high: int, digits: int = 24) -> F32:
        odd = rng.integers(1 << (digits - 1), 1 << digits, TRIPLES) | 1
        return np.asarray(
            np.ldexp(odd * rng.choice([-1.0, 1.0], TRIPLES), rng.integers(low, high, TRIPLES)), np.float32
        )

    offset = np.where(kind == 4, rng.integers(1, 4, TRIPLES) * 2.0**-23, 0)  # (1 + x) (1 - x) = 1 - x**2
    a = np.where(kind == 3, drawn(-20, 30, 12), np.where(kind == 4, 1 + offset, drawn(-63, 20))).astype(np.float32)
    b = np.where(kind == 3, drawn(-20, 30, 13), np.where(kind == 4, 1 - offset, drawn(-63, 20))).astype(np.float32)
    product, any_bits = a.astype(np.float64) * b, drawn(-23, -22)
    scaled, above = product * any_bits, np.nextafter(product.astype(np.float32), np.float32(np.inf))
    by_kind = (
        -product, -above, scaled, np.abs(product) * any_bits * 2.0**-55,
        drawn(1, 2), scaled * 2.0**12, any_bits, scaled * 2.0**-24,
    )  # fmt: skip
    return a, b, np.choose(kind, by_kind).astype(np.float32)
