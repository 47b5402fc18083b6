"""The constants of the graph's operations, beside those of attention. Changing one changes output bits everywhere.

The shaders get them through the generated ``shaders/graph/contract.glsl``: a number by its name; a polynomial
c0 + c1 x + c2 x**2 + ... as a macro that evaluates it by Horner's rule. This module needs the standard library alone.
"""

from typing import Final

# Products of matrices
X_BLOCK: Final = 32  # values of x that share a scale
SUPERBLOCK: Final = 256  # products of a row that are summed before they join the row's sum
FLOAT_CHUNK: Final = 8  # products of float weights that are summed before they join the superblock's sum
QUANTIZED_MIN: Final = 2.0**-60  # a block of x whose magnitudes are below counts as zero
QUANTIZED_LARGE: Final = 2.0**64  # a block of x with such magnitudes is multiplied by 2**-64 before it is divided
PRODUCT_MIN: Final = 2.0**-50  # smaller operands of float products count as zero
MXFP4: Final = (0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC)  # ggml's table, 16 int8: twice the values
# Float functions and sums of rows
EXP_LEAST: Final = -80.0  # exp of less counts as of this, which is flushed
EXP_MOST: Final = 88.72283  # the largest float32 whose exp is finite
EXPM1_SMALL: Final = 0.36  # below this magnitude exp(x) - 1 = x + x**2 * (c0 + c1 x + ...)
EXPM1_POLY: Final = (0.49999997, 0.166665256, 0.041667413, 0.00836895127, 0.0013876179)
INVERSE_ROOT_SEED: Final = 0x5F375A86  # 1 / sqrt(x) starts from this minus half of x's bits; three Newton steps follow
ERF_SMALL: Final = 0.9  # below this magnitude erf x = x + x * (c0 + c1 x**2 + ...), else 1 - 2**(d0 + d1 |x| + ...)
ERF_MOST: Final = 4.0  # larger magnitudes count as this
ERF_POLY: Final = (0.128379151, -0.376124978, 0.112818435, -0.0267673451, 0.00499402639, -0.000599441642)
ERFC_POLY: Final = (
    *(-0.000240120848, -1.62706757, -0.918962061, -0.15020448, 0.0321941562, -0.00442259898),
    0.000285974209,
)
# On an eighth of a turn: sin z = z + z**3 * (c0 + c1 z**2 + ...), cos z = 1 - z**2 / 2 + z**4 * (d0 + d1 z**2 + ...)
SIN_POLY: Final = (-0.166666552, 0.00833218824, -0.000195180823)
COS_POLY: Final = (0.0416666456, -0.00138873106, 2.4432542e-05)
TURN: Final = 6.283185307179586
TURN_SMALL: Final = 0.5  # smaller angles in radians are not reduced
# 1 / TURN: 32 zeros, then its bits after the binary point
INVERSE_TURN: Final = (0x0, 0x28BE60DB, 0x9391054A, 0x7F09D5F4, 0x7D4D3770, 0x36D8A566, 0x4F10E410, 0x7F9458EA)
GELU_A: Final = 0.044715
GELU_B: Final = 0.7978845608028654  # sqrt(2 / pi)
GELU_LEAST: Final = -10.0  # gelu of less counts as of this
GELU_QUICK: Final = -1.702
SQRT_HALF: Final = 0.7071067811865476
SOFTPLUS_LINEAR: Final = 20.0  # softplus x = x above this
SUM_LANES: Final = 256  # partial sums of a row: element j joins sum j mod SUM_LANES, and then halves of them are added
# Recurrent layers: sums of products need no flush between where their factors have these least magnitudes
STATE_LANES: Final = 8  # partial sums of a row of a state: element i joins sum i / 4 mod STATE_LANES, then halves
STATE_MIN: Final = 2.0**-40  # smaller elements of states, k, q, B and C count as 0
DECAY_MIN: Final = 2.0**-20  # smaller decays do
FACTOR_MIN: Final = 2.0**-60  # and smaller corrections of a delta net, and x * dt of a scan
