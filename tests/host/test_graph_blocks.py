"""Blocks of quantized weights: the values that ggml gives them, and layout R32."""

import numpy as np
import pytest

from zinc_attn.graph import blocks
from zinc_attn.graph.pieces import TYPES

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rows", (1, 33, 67))
@np.errstate(all="ignore")
def test_weights(kind, rows, rng):
    """Random bytes: gguf's values; pieces are a partition of the block, and rows of a group lie side by side."""
    raw = rng.integers(0, 256, (rows, 3 * TYPES[kind].size), np.uint8)
    expected = gguf.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind.upper())).astype(np.float64)
    w = blocks.decode(kind, raw)
    d, m, q = w.d.astype(np.float64), w.m.astype(np.float64), w.q.astype(np.float64)
    if w.scales is not None and w.minima is not None:
        d, m = np.repeat(d, 16, 1) * w.scales, -np.repeat(m, 16, 1) * w.minima
    of_d, of_m = (np.repeat(x, w.q.shape[1] // x.shape[1], 1) for x in (d, m))
    error = np.abs(of_d * q + of_m - expected)
    assert np.all(~np.isfinite(expected) | (error <= 1e-6 * (np.abs(of_d * q) + np.abs(of_m)) + 1e-37))
    packed = blocks.pack(kind, raw)
    assert np.array_equal(blocks.unpack(kind, packed, rows), raw)
    offset, size = TYPES[kind].pieces[0]
    lanes = packed[: min(rows, 32) * size].reshape(-1, size)
    assert np.array_equal(lanes, raw[:32, offset : offset + size])
    assert sorted(byte for begin, n in TYPES[kind].pieces for byte in range(begin, begin + n)) == list(
        range(TYPES[kind].size)
    )
