"""What the graph's kernels leave of a poisoned result, held to what it has to be."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zinc_attn.graph.declarations import QUANTIZE
from zinc_attn.runtime.protocol import Runtime
from zinc_attn.tools.graph.device import POISON, run


def same(words: NDArray[np.uint32], wanted: NDArray[Any]) -> None:
    """The words hold these elements (a NaN for a NaN), and behind them what they held before."""
    elements = words.view(wanted.dtype)
    rest = np.full(words.size, POISON, np.uint32).view(wanted.dtype)[wanted.size :]
    assert np.array_equal(elements[wanted.size :].view(np.uint8), rest.view(np.uint8))
    got, wanted = elements[: wanted.size], wanted.reshape(-1)
    both_nan = np.isnan(as_float(got)) & np.isnan(as_float(wanted))
    whole = f"u{wanted.itemsize}"
    different = np.flatnonzero((got.view(whole) != wanted.view(whole)) & ~both_nan)
    assert not different.size, (different[:5], got[different[:5]], wanted[different[:5]], different.size)


def as_float(x: NDArray[Any]) -> NDArray[Any]:
    """uint16 are bf16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def same_as_int8(runtime: Runtime, words: Sequence[NDArray[np.uint32]], y: NDArray[np.float32]) -> None:
    """The words are y, and its int8 blocks and their scales as QUANTIZE makes them of it."""
    same(words[0], y)
    alone = run(runtime, QUANTIZE, (y,), quantized_sizes(y))
    assert all(np.array_equal(*both) for both in zip(words[1:], alone, strict=True))


def quantized_sizes(y: NDArray[np.float32]) -> tuple[int, int]:
    """The words of QUANTIZE's results."""
    blocks = -(-y.shape[-1] // 256) * 8 * y[..., 0].size
    return 8 * blocks, 2 * blocks
