"""Products of matrices, with the bits of shaders/graph/mul_mat*.comp.

Quantized weights meet activations in int8: a block of 32 of x has one scale, so that the dot product of a block is an
integer, exact in any order. Float operations join the blocks: ascending in a superblock of 256, and the superblocks
ascending in the row. Where float32 holds an integer here, it is below 2**24.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32, f32, flush, reciprocal
from .blocks import Weights
from .constants import FLOAT_CHUNK, PRODUCT_MIN, QUANTIZED_LARGE, QUANTIZED_MIN, SUPERBLOCK, X_BLOCK


class Quantized(NamedTuple):
    """Rows of x: q (rows, k) int8, d (rows, k / 32), and sums of q over 16 values (rows, k / 16)."""

    q: NDArray[np.int8]
    d: F32
    sums: NDArray[np.int32]


def quantize(x: F32) -> Quantized:
    """x (rows, k) in blocks of 32: q = round(x / d), d = the largest magnitude / 127."""
    rows, blocks = len(x), np.ascontiguousarray(x).reshape(len(x), -1, X_BLOCK)
    most = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1).view(np.float32)
    zero, finite = most < f32(QUANTIZED_MIN), most < np.inf  # False for NaN, too
    usual = finite & ~zero
    unit = np.where(most >= f32(QUANTIZED_LARGE), f32(1 / QUANTIZED_LARGE), f32(1.0))
    d = np.where(usual, most, f32(1.0)) * f32(1 / 127)
    inverse = reciprocal(d * unit)
    scaled = np.where(usual[..., None], blocks, f32(0.0)) * unit[..., None] * inverse[..., None]
    q = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    sums = q.reshape(rows, -1, 16).sum(-1, dtype=np.int32)
    return Quantized(q.reshape(rows, -1), np.where(usual, d, np.where(zero, f32(0.0), f32(np.nan))), sums)


def _chain(terms: Iterable[F32]) -> F32:
    """The sum of the terms, ascending, from 0."""
    total = np.zeros((), np.float32)
    for term in terms:
        total = np.asarray(total + term)
    return total


def _chains(terms: F32, length: int) -> F32:
    """Sums of ``length`` terms each along axis 0; a short last one is filled up with zeros, which changes no bit."""
    missing = np.zeros((-len(terms) % length, *terms.shape[1:]), np.float32)
    whole = np.concatenate([terms, missing])
    return _chain(whole.reshape(-1, length, *terms.shape[1:]).swapaxes(0, 1))


def _dots(x: NDArray[np.int8], w: NDArray[np.int8], length: int) -> F32:
    """(k / length, columns, rows): dot products of pieces of the rows of x and w."""
    x_pieces, w_pieces = (part.reshape(len(part), -1, length).swapaxes(0, 1).astype(np.float32) for part in (x, w))
    dots: F32 = np.matmul(x_pieces, w_pieces.swapaxes(1, 2))
    return dots


def multiply(w: Weights, x: F32) -> F32:
    """y (columns, rows) = x (columns, k) times quantized weights (rows, k)."""
    q, d, sums = quantize(x)
    dx, w_scales, w_minima = d.T[..., None], w.d.T[:, None], w.m.T[:, None]
    if w.scales is None or w.minima is None:
        block_sums = sums.reshape(*d.shape, 2).sum(-1).T[..., None].astype(np.float32)
        terms = [flush(w_scales * dx) * _dots(q, w.q, X_BLOCK), (w_minima * dx) * block_sums]
        both = np.stack(terms, 1).reshape(-1, len(x), len(w.q))
        return flush(_chain(_chains(both, 2 * SUPERBLOCK // X_BLOCK)))
    scaled = _dots(q, w.q, 16) * w.scales.T[:, None].astype(np.float32)
    lowest = sums.T[..., None].astype(np.float32) * w.minima.T[:, None].astype(np.float32)
    a, c = (_chains(dx * (x[::2] + x[1::2]), SUPERBLOCK // X_BLOCK) for x in (scaled, lowest))
    return flush(_chain(flush(w_scales * a) - flush(w_minima * c)))


def multiply_floats(w: F32, x: F32) -> F32:
    """y (columns, rows) = x (columns, k) times weights (rows, k)."""
    a, b = (np.where(np.abs(part) < f32(PRODUCT_MIN), f32(0.0), part).T for part in (x, w))
    chunks = _chains(a[:, :, None] * b[:, None], FLOAT_CHUNK)
    return flush(_chain(_chains(chunks, SUPERBLOCK // FLOAT_CHUNK)))


def of_experts(product: Callable[[int, F32], F32], experts: int, x: F32, ids: NDArray[np.int32], rows: int) -> F32:
    """y (tokens, slots, rows): x (tokens, slots or fewer, k) times the matrices that ids (tokens, slots) names.

    product(expert, rows of x). Slot s has row s mod the slots of x; the y of a slot without an expert is NaN.
    """
    y = np.full((*ids.shape, rows), np.nan, np.float32)
    for expert in np.unique(ids[(ids >= 0) & (ids < experts)]):
        token, slot = np.nonzero(ids == expert)
        y[token, slot] = product(int(expert), x[token, slot % x.shape[1]])
    return y


def by_expert(ids: NDArray[np.int32], experts: int, columns: int) -> NDArray[np.int32]:
    """BY_EXPERT's list: the expert of each tile, then the pairs of each, slot + slots * token; -1: none."""
    pair_experts = np.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
    tiles = min(pair_experts.size, experts + 1 + pair_experts.size // columns)
    taken, pairs = [], []
    for expert in range(experts + 1):
        members = np.flatnonzero(pair_experts == expert)
        taken += [expert] * -(-members.size // columns)
        pairs += [*members, *[-1] * (-members.size % columns)]
    return np.array([*taken, *[-1] * (tiles - len(taken)), *pairs], np.int32)


def add(y: F32, added: F32) -> F32:
    """The sum at the end of a product, rounded as an addition of its own."""
    return flush(y + flush(added))
