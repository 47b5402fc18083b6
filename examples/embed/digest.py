"""Print the SHA-256 of the oracle's bits, which ``embed`` writes to RESULTS on every device.

.venv/bin/python examples/embed/digest.py 16/2/256 150 64 4
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zinc_attn as za

LAYERS = 2


class Numbers:
    """The numbers that main.c draws."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self, n: int) -> NDArray[np.uint32]:
        x = np.arange(self.drawn, self.drawn + n, dtype=np.uint32) * np.uint32(0x9E3779B1)
        self.drawn += n
        x = (x ^ x >> np.uint32(15)) * np.uint32(0x85EBCA77)
        return x ^ x >> np.uint32(13)

    def halves(self, *shape: int) -> NDArray[np.float16]:
        x = self.draw(int(np.prod(shape)))
        return ((x & 0x8000) | (0x3000 + (x & 0x0FFF))).astype(np.uint16).view(np.float16).reshape(shape)

    def floats(self, *shape: int) -> NDArray[np.float32]:
        x = self.draw(int(np.prod(shape)))
        return ((x & 0x80000000) | (0x3E000000 + (x & 0x01FFFFFF))).view(np.float32).reshape(shape)


def results(shape: za.AttnShape, prompt: int, chunk: int, tokens: int) -> Iterator[NDArray[np.float32]]:
    """out (q_len, q_heads, head_dim) and lse (q_len, q_heads) of every call, as ``embed`` makes them."""
    numbers, nothing = Numbers(), np.zeros((0, shape.kv_heads, shape.head_dim), np.float16)
    first: list[list[Any]] = [[nothing, nothing] for _ in range(LAYERS)]  # K and V by layer
    steps = [(0, min(chunk, prompt - begin), min(chunk, prompt - begin)) for begin in range(0, prompt, chunk)]
    steps += [(1, 0, 1), *[(0, 1, 1), (1, 1, 1)] * tokens]
    second: list[list[Any]] = []
    for sequence, new, q_len in steps:
        second = second or ([list(layer) for layer in first] if sequence else [])
        for held in second if sequence else first:
            q = numbers.floats(q_len, shape.q_heads, shape.head_dim)
            for i, rows in enumerate(numbers.halves(new, shape.kv_heads, shape.head_dim) for _ in "kv"):
                held[i] = np.concatenate([held[i], rows])
            yield from za.reference.emulate(q, *held)


def digest(text: str, prompt: int, chunk: int, tokens: int) -> str:
    """The SHA-256 for a shape q_heads/kv_heads/head_dim."""
    arrays = results(za.AttnShape.parse(text), prompt, chunk, tokens)
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1], *map(int, sys.argv[2:])))
