"""Numbers for ``primitives.comp`` and its results: the kernels' float functions, and how cached words are read.

Half of the drawn words are denormal float16. Fusing would change bits; no result depends on denormal float32.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from .constants import EMPTY_M
from .products import Words
from .state import F32, State, ln, merge, pow2, reciprocal, tanh, weight

ROWS: Final = 64


def numbers() -> dict[str, F32]:
    """(ROWS,) float32 for each of ``declarations.NUMBERS``, always the same; word holds two float16."""
    rng = np.random.default_rng(2026)
    score = rng.uniform(-60.0, 60.0, ROWS).astype(np.float32)
    m = np.rint(score) + rng.integers(0, 50, ROWS).astype(np.float32)
    other_m = m + rng.integers(-60, 60, ROWS).astype(np.float32)
    a, b = (rng.standard_normal((2, ROWS)) * np.exp2(rng.integers(-90, 40, (2, ROWS)))).astype(np.float32)
    total = np.exp2(rng.uniform(-1.0, 20.0, ROWS)).astype(np.float32)
    total[0] = 1.0
    halves = rng.integers(0, 0x7C00, (ROWS, 2))
    halves[: ROWS // 2] &= 0x3FF
    halves |= rng.integers(0, 2, (ROWS, 2)) << 15
    word = halves.astype("<u2").view("<u4")[:, 0].astype(np.uint32)
    scale = np.exp2(rng.uniform(-24.0, 15.0, ROWS)).astype(np.float16).astype(np.float32)
    columns = (score, m, other_m, a, b, total, word.view(np.float32), scale)
    names = ("score", "m", "other_m", "a", "b", "l", "word", "scale")
    return dict(zip(names, columns, strict=True))


def results(inputs: dict[str, F32]) -> dict[str, F32]:
    """(ROWS,) float32 for each of ``declarations.RESULTS``."""
    word = inputs["word"].view(np.uint32)
    halves = np.stack([word & 0xFFFF, word >> 16]).astype(np.uint16).view(np.float16).astype(np.float32)
    low, high = np.maximum(halves, np.float32(EMPTY_M))
    product = (word & 0xFF).astype(np.uint8).view(np.int8).astype(np.float32) * inputs["scale"]
    no_values = np.zeros((ROWS, 0), np.float32)
    state, other = (State(inputs[m], inputs[x], no_values) for m, x in (("m", "a"), ("other_m", "b")))
    return {
        "weight": weight(inputs["score"], inputs["m"]),
        "power": pow2(np.rint(inputs["score"]) - inputs["m"]),
        "tanh": tanh(inputs["score"] * np.float32(2.0**-5)),
        "merged": merge(state, other).l,
        "reciprocal": reciprocal(inputs["l"]),
        "lse": ln(inputs["l"], inputs["m"]),
        "low": low,
        "high": high,
        "product": product,
        "fused": product,
    }


def words(number_names: Sequence[str], result_names: Sequence[str]) -> tuple[Words, Words]:
    """The kernel's input words, (ROWS, numbers), and the right output words, (ROWS, results)."""
    inputs = numbers()
    expected = results(inputs)
    tables = ([inputs[name] for name in number_names], [expected[name] for name in result_names])
    asked, answered = (np.stack(columns, axis=1).view(np.uint32) for columns in tables)
    return asked, answered
