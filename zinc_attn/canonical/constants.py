"""The constants of the canonical reduction. Changing one changes output bits everywhere.

The shaders get these numbers through the generated ``shaders/contract.glsl``; the oracle imports them. This module
needs the standard library alone, so that the shaders can be built in an empty environment.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

KEYS_PER_LEAF: Final = 64  # keys per leaf; leaves lie at absolute multiples of 64
LEAVES_PER_NODE: Final = 8  # leaves per node; nodes lie at absolute multiples of 512 keys
CHUNK: Final = 8  # head dimensions summed on their own before they join the dot product
KEYS_PER_NODE: Final = LEAVES_PER_NODE * KEYS_PER_LEAF
WEIGHT_PARTIALS: Final = 4  # weight sums c0..c3 of a leaf, keys congruent modulo 4
CUTOFF: Final = -48.0  # powers of two below 2**CUTOFF count as zero
FLUSH: Final = 2.0**-100  # smaller magnitudes of l and o become +0 after each merge
FUSED_SCALE: Final = 2.0**32  # of weights in arithmetic "fused", so that no fused sum is denormal
INTEGER_BITS: Final = 10  # arithmetic "integer": numbers become integers of at most 2**(1 + INTEGER_BITS)
EMPTY_M: Final = -1e30  # m of the empty state; its l and o are 0
# 2**x on [-1/2, 1/2], c0..c6
EXP2_POLY: Final = (1.0, 0.6931471825, 0.2402264774, 5.550359935e-2, 9.618505836e-3, 1.339080627e-3, 1.532646274e-4)
RCP_SEED: Final = 0x7EF311C3  # 1/x starts from RCP_SEED - bits(x), then three Newton steps
# ln(1+x) = x - x**2/2 + x**3 * (d0 + d1 x + ... + d7 x**7) on [sqrt(1/2) - 1, sqrt(2) - 1]
LN_POLY: Final = (0.33333316, -0.2500081, 0.20002286, -0.16624554, 0.14181192, -0.13128754, 0.12881649, -0.07859615)
LN2_HI: Final = 0.693359375  # nine significant bits, so that exponent * LN2_HI is exact
LN2_LO: Final = -2.12194440e-4  # the rest of ln 2
SQRT2: Final = 1.41421354  # mantissas above it are halved before ln
LOG2E: Final = 1.4426950408889634  # log2(e)
# softcap: tanh x = x + x**3 * (e0 + e1 x**2 + ... + e4 x**8) below TANH_SMALL (relative error 3.1e-9), else
# (1 - t) / (1 + t) with t = 2**(-2 |x| log2 e); from TANH_MAX on t counts as zero
TANH_POLY: Final = (-0.333332952, 0.133318363, -0.0537755232, 0.0207654489, -0.00585694142)
TANH_SMALL: Final = 0.6  # from here on tanh by a power of two, below by its polynomial
TANH_MAX: Final = 32.0  # larger magnitudes count as this
MIN_INPUT: Final = 2.0**-40  # smaller float32 inputs are flushed to +0 on entry
MAX_INPUT: Final = 2.0**60  # larger inputs are refused
MAX_SCORE: Final = 2.0**96  # see score_bound: scores and all that they are made of stay finite, and far above EMPTY_M

# Terms that are added to scores by query head, after softcap and before masks, in this order: the head's slope times a
# term of the distance, the key's position less the row's, in float32 (in float64 in the reference). A term's magnitude
# is at most the number of keys or rows; score_mod.glsl has it, too. Each name also names an argument, a word of a HEAD
# record, a bit of the constant `biases` of pass 1, and members of za_call and za_room.
BIASES: Final[Mapping[str, Callable[[Any], Any]]] = {"alibi": lambda distance: -abs(distance)}
