"""Limits of shapes and kernels. Needs the standard library alone."""

from typing import Final

MAX_HEAD_DIM: Final = 576
MAX_Q_HEADS: Final = 65535  # grid y of pass 2
WAVE: Final = 32  # invocations of a wave
MAX_HEADS_PER_WORKGROUP: Final = 8
MAX_VALUE_PASSES: Final = 4  # most passes over V; several where registers do not hold all sums of values
K_DIMS: Final = 16  # a device pads K rows with zeros to a multiple of this
V_DIMS: Final = 8  # the same for V rows
MAX_CONTEXT: Final = 1 << 24  # keys; beyond it, float32 no longer counts weights exactly
MAX_PAGE_SIZE: Final = 65536  # tokens
BLOCK: Final = 32  # consecutive head dimensions that share a scale in q8_0, q5_1, q5_0, q4_1, q4_0 and iq4_nl
