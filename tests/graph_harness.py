"""Run one kernel of the graph on a device, with a poisoned result."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zinc_attn.graph.declarations import QUANTIZE, GraphKernel
from zinc_attn.graph.records import params, tensor
from zinc_attn.runtime.device import load_spirv
from zinc_attn.runtime.protocol import Dispatch, Runtime, Use

POISON = 0x7FC0DEAD


def as_words(x: NDArray[Any]) -> NDArray[np.uint32]:
    """The bytes of an array as words, filled up with zeros."""
    raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)]).view(np.uint32)


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
    groups, counts = quantized_sizes(y)
    alone = run(runtime, QUANTIZE, groups, (y,), counts, x=tensor(y))
    assert all(np.array_equal(*both) for both in zip(words[1:], alone, strict=True))


def quantized_sizes(y: NDArray[np.float32]) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """The grid of QUANTIZE, and the words of its results."""
    blocks = -(-y.shape[-1] // 256) * 8 * y[..., 0].size
    return (-(-blocks // 32), 1, 1), (8 * blocks, 2 * blocks)


def run(
    runtime: Runtime,
    kernel: GraphKernel,
    groups: tuple[int, int, int],
    given: Sequence[NDArray[Any]],
    results: Sequence[int | NDArray[np.uint32]],
    spec: Sequence[int] = (),
    **values: Any,
) -> list[NDArray[np.uint32]]:
    """The words of each result. given: what the kernel's read bindings hold, in their order, without the parameters;
    results: of its write bindings, in their order, the words that they begin with, or how many that are POISON."""
    inputs, outputs = iter([params(kernel, **values), *map(as_words, given)]), iter(results)
    with ExitStack() as made:
        buffers, written = [], []
        for binding in kernel.decl.bindings:
            words = next(inputs if binding.access == "read" else outputs)
            words = np.full(words, POISON, np.uint32) if isinstance(words, int) else words
            use = Use.INPUT if binding.access == "read" else Use.OUTPUT
            buffer = made.enter_context(closing(runtime.buffer(max(words.nbytes, 4), use)))
            runtime.write(buffer, words)
            buffers.append(buffer)
            written += [buffer] if binding.access == "write" else []
        made_kernel = runtime.kernel(kernel.decl, load_spirv(kernel.decl), spec)
        recording = made.enter_context(closing(runtime.record([Dispatch(made_kernel, tuple(buffers), groups)])))
        runtime.run(recording)
        return [runtime.read(buffer).copy() for buffer in written]
