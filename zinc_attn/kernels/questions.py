"""The question to a device before its first kernel, and the right answers, for hosts that have no oracle.

``questions.bin`` holds little-endian uint32 words: rows of ``NUMBERS``, rows of ``RESULTS``, the triples of the kernel
multiply_add and their sums. A test compares it with the oracle, and ``python -m zinc_attn.kernels.questions`` writes it
anew. Reading needs the standard library alone, as building the C library does.
"""

from __future__ import annotations

import array
import sys
from pathlib import Path
from typing import Final

from .declarations import NUMBER_WORDS, NUMBERS, QUESTION_ROWS, RESULT_WORDS, RESULTS, TRIPLES

FILE: Final = Path(__file__).with_name("questions.bin")


def questions() -> tuple[array.array[int], ...]:
    """The words of numbers (QUESTION_ROWS, NUMBERS), results (QUESTION_ROWS, RESULTS), triples and sums."""
    words = array.array("I", FILE.read_bytes())
    if sys.byteorder == "big":
        words.byteswap()
    parts, offset = [], 0
    for size in (QUESTION_ROWS * NUMBER_WORDS, QUESTION_ROWS * RESULT_WORDS, 3 * TRIPLES, TRIPLES):
        parts.append(words[offset : offset + size])
        offset += size
    return tuple(parts)


def answered() -> bytes:
    """The words of ``questions.bin`` by the oracle, which needs NumPy."""
    from ..canonical import primitives, products

    parts = (*primitives.words(NUMBERS, RESULTS), *products.triple_words())
    return b"".join(part.astype("<u4").tobytes() for part in parts)


if __name__ == "__main__":
    FILE.write_bytes(answered())
