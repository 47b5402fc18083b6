"""Loop hints of SPIR-V for a GPU's compiler. The built modules have none: SwiftShader would compile for longer."""

from typing import Final

import numpy as np

HEADER_WORDS: Final = 5
OP_LOOP_MERGE: Final = 246  # merge block, continue target, loop control
CONTROL: Final = 3  # word of the loop control
NO_HINT, UNROLL = 0, 1


def unrolled(spirv: bytes) -> bytes:
    """The module with the hint to unroll on every loop that has none.

    An array that an unrolled loop indexes lies in registers, else in memory. native's za_unrolled does the same.
    """
    words, place = np.frombuffer(spirv, np.uint32).tolist(), HEADER_WORDS
    while place < len(words):
        if words[place] & 0xFFFF == OP_LOOP_MERGE and words[place + CONTROL] == NO_HINT:
            words[place + CONTROL] = UNROLL
        place += words[place] >> 16
    return np.array(words, np.uint32).tobytes()
