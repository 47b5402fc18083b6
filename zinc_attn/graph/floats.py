"""Float functions of the graph's operations in NumPy, with the bits of ``shaders/graph/numbers.glsl``.

Arguments are flushed numbers, infinities or NaN; results are not flushed yet. Shaders compute quotients, roots and
float16, which NumPy rounds correctly, by integers.
"""

import numpy as np
from numpy.typing import NDArray

from ..canonical import constants as attention
from ..canonical.state import F32, f32, ln, polynomial, weight
from ..canonical.state import tanh as tanh_of_numbers
from . import constants

NAN, INF = f32(np.nan), f32(np.inf)
U64 = NDArray[np.uint64]
quietly = np.errstate(all="ignore")  # for functions through which infinities and NaN pass


@quietly
def exp(x: F32) -> F32:
    """An exact power of two times the polynomial of weight(), by Cody and Waite's reduction."""
    near: F32 = np.where(np.isnan(x), f32(0.0), np.clip(x, f32(constants.EXP_LEAST), f32(constants.EXP_MOST)))
    whole = np.rint(near * f32(attention.LOG2E))
    rest = (near - whole * f32(attention.LN2_HI)) - whole * f32(attention.LN2_LO)
    y = polynomial(rest * f32(attention.LOG2E), attention.EXP2_POLY)
    result = (y.view(np.int32) + (whole.astype(np.int32) << 23)).view(np.float32)
    return np.where(x > f32(constants.EXP_MOST), INF, np.where(np.isnan(x), x, result))


@quietly
def expm1(x: F32) -> F32:
    is_small = np.abs(x) < f32(constants.EXPM1_SMALL)
    near = np.where(is_small, x, f32(0.0))
    small = near + polynomial(near, constants.EXPM1_POLY) * (near * near)
    return np.where(is_small, small, exp(x) - f32(1.0))


@quietly
def log(x: F32) -> F32:
    plain = (x > 0) & (x < INF)
    y = ln(np.where(plain, x, f32(1.0)), np.zeros_like(x))
    return np.where(plain, y, np.where(x == 0, -INF, np.where(x > 0, x, NAN)))


@quietly
def softplus(x: F32) -> F32:
    return np.where(x > f32(constants.SOFTPLUS_LINEAR), x, log(f32(1.0) + exp(x)))


@quietly
def quotient(x: F32 | np.float32, y: F32 | np.float32) -> F32:
    """Correctly rounded."""
    return np.asarray(np.divide(x, y))


@quietly
def root(x: F32) -> F32:
    """Correctly rounded."""
    return np.sqrt(x)


@quietly
def inverse_root(x: F32) -> F32:
    plain = (x > 0) & (x < INF)
    near = np.where(plain, x, f32(1.0))
    half = f32(0.5) * near
    y = (np.uint32(constants.INVERSE_ROOT_SEED) - (near.view(np.uint32) >> 1)).view(np.float32)
    for _ in range(3):
        y = y + y * (f32(0.5) - (half * y) * y)
    return np.where(plain, y, np.where(x == 0, INF, np.where(x > 0, f32(0.0), NAN)))


@quietly
def tanh(x: F32) -> F32:
    return np.where(np.isnan(x), x, tanh_of_numbers(np.where(np.isnan(x), f32(0.0), x)))


@quietly
def erf(x: F32) -> F32:
    size = np.where(np.isnan(x), f32(0.0), np.minimum(np.abs(x), f32(constants.ERF_MOST)))
    small = size + polynomial(size * size, constants.ERF_POLY) * size
    large = f32(1.0) - weight(polynomial(size, constants.ERFC_POLY), np.zeros_like(size))
    result = np.where(size < f32(constants.ERF_SMALL), small, large)
    return np.where(np.isnan(x), x, np.where(x < 0, -result, result))


def _cos_sin(z: F32, quarter: NDArray[np.uint64]) -> tuple[F32, F32]:
    """cos and sin of an angle: z radians, at most an eighth of a turn, plus ``quarter`` quarters of a turn."""
    square = z * z
    sine = z + (polynomial(square, constants.SIN_POLY) * square) * z
    cosine = (f32(1.0) - f32(0.5) * square) + (polynomial(square, constants.COS_POLY) * square) * square
    odd, second = (quarter & np.uint64(1)) == 1, (quarter & np.uint64(2)) == 2
    c, s = np.where(odd, -sine, cosine), np.where(odd, cosine, sine)
    return np.where(second, -c, c), np.where(second, -s, s)


def cos_sin_of_turns(phase: U64) -> tuple[F32, F32]:
    """cos and sin of phase / 2**64 of a turn."""
    quarter = (phase + np.uint64(1 << 61)) >> np.uint64(62)
    rest = phase - (quarter << np.uint64(62))
    negative = rest >> np.uint64(63) == 1
    size = np.where(negative, ~rest + np.uint64(1), rest)
    zeros = np.zeros(size.shape, np.uint64)  # the leading zeros of ``size``
    for width in (32, 16, 8, 4, 2, 1):
        zeros = np.where(size << zeros >> np.uint64(64 - width) == 0, zeros + np.uint64(width), zeros)
    top = size << zeros >> np.uint64(32)
    near = (top >> np.uint64(8)).astype(np.float32) * f32(256.0) + (top & np.uint64(255)).astype(np.float32)
    z = np.ldexp(near, -32 - zeros.astype(np.int32)).astype(np.float32) * f32(constants.TURN)
    return _cos_sin(np.where(negative, -z, z), quarter)


@quietly
def cos_sin(x: F32) -> tuple[F32, F32]:
    """cos and sin of x radians."""
    bits = x.view(np.uint32)
    finite = np.abs(x) < INF
    exponent = np.where(finite, np.maximum((bits >> 23 & 0xFF).astype(np.int64), 126), 126)
    significand = ((bits & 0x7FFFFF) | 0x800000).astype(np.uint64)
    place = exponent - 150 + 32
    table = np.array([*constants.INVERSE_TURN], np.uint64)
    word, shift = place >> 5, (place & 31).astype(np.uint64)
    low_32 = np.uint64(0xFFFFFFFF)
    window = [(table[word + i] << shift | table[word + i + 1] >> (np.uint64(32) - shift)) & low_32 for i in range(3)]
    low = (significand * window[1]) + (significand * window[2] >> np.uint64(32))
    phase = low + (significand * window[0] << np.uint64(32))
    phase = np.where(x < 0, ~phase + np.uint64(1), phase)
    small = np.abs(x) < f32(constants.TURN_SMALL)
    near = _cos_sin(np.where(small, x, f32(0.0)), np.zeros(x.shape, np.uint64))
    far = cos_sin_of_turns(phase)
    c, s = (np.where(small, a, b) for a, b in zip(near, far, strict=True))
    return np.where(finite, c, NAN), np.where(finite, s, NAN)
