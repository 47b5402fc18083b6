"""The constants of the graph's operations, beside those of attention. Changing one changes output bits everywhere.

The shaders get them through the generated ``shaders/graph/contract.glsl``. This module needs the standard library
alone.
"""

from __future__ import annotations

from typing import Final

# Products of matrices
X_BLOCK: Final = 32  # values of x that share a scale
SUPERBLOCK: Final = 256  # products of a row that are summed before they join the row's sum
FLOAT_CHUNK: Final = 8  # products of float weights that are summed before they join the superblock's sum
QUANTIZED_MIN: Final = 2.0**-60  # a block of x whose magnitudes are below counts as zero
QUANTIZED_LARGE: Final = 2.0**64  # one whose magnitudes reach this is multiplied by 2**-64 before it is divided
PRODUCT_MIN: Final = 2.0**-50  # smaller operands of float products count as zero
MXFP4: Final = (0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC)  # ggml's table, 16 int8: twice the values
