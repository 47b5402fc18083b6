"""Products of matrices: the oracle's bits."""

import numpy as np
import pytest

from zinc_attn.graph import blocks, products
from zinc_attn.graph import declarations as graph
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import run

HALVES = {"q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,)}  # of a block, elsewhere 0


def weights(kind, rows, k, rng):
    """ggml's bytes of random weights: small scales, one of them denormal, one 0, one the largest, one infinite."""
    raw = rng.integers(0, 256, (rows, k // TYPES[kind].values, TYPES[kind].size), np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind in ("q4_1", "q5_1") else (0,)):
        d = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        d.reshape(-1)[:4] = 0, 6e-8, -65504, -0.0
        d[2, -1] = np.inf
        raw[..., at : at + 2] = d[..., None].view(np.uint8)
    if kind == "mxfp4":
        raw[..., 0] = rng.integers(100, 130, raw.shape[:2])
        raw.reshape(-1, 17)[:4, 0] = 0, 1, 2, 255
        raw[1, :, 0] = rng.integers(24, 40, raw.shape[1])  # products with x's scales are about 2**-100
    return raw.reshape(rows, -1)


def activations(columns, k, rng):
    x = rng.standard_normal((columns, k), np.float32)
    x[:, ::97] *= 40
    x[0, :32] = 0
    x[-1, -32:] = np.float32(2.0**-61)
    x[-1, :32] = np.linspace(-3e38, 3e38, 32)
    return x


def same(got, expected):
    """Bits; a NaN is a NaN."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got.view(np.float32)), nan.reshape(-1))
    assert np.array_equal(got[~nan.reshape(-1)], expected[~nan].view(np.uint32))


def product(runtime, kind, raw, x, kernel, groups, spec, added=None):
    """y of quantized weights; groups: rows of w and rows of x of a workgroup."""
    columns, k = x.shape
    blocks_of_x = -(-k // 256) * 8 * columns
    counts = blocks_of_x * 8, blocks_of_x * 2
    q, scales = run(runtime, graph.QUANTIZE, (-(-blocks_of_x // 32), 1, 1), (x,), counts, x=tensor(x))
    y = np.zeros((columns, len(raw)), np.float32)
    given = blocks.pack(kind, raw), q, scales, y if added is None else added
    values = {"w_begin": 0, "w_steps": (0, 0), "repeats": (1, 1), "blocks": k // 32}
    values |= {"y": tensor(y), "added": tensor(y if added is None else added)}
    grid = -(-len(raw) // groups[0]), -(-columns // groups[1]), 1
    (got,) = run(
        runtime,
        kernel,
        grid,
        given,
        (y.size,),
        (graph.WEIGHT_TYPES.index(kind), *spec, int(added is not None)),
        **values,
    )
    return got


@pytest.mark.parametrize("kind", TYPES)
@np.errstate(all="ignore")
def test_vectors(any_device, kind, rng):
    short = TYPES[kind].values == 32  # a last superblock of 96 values, of which a wave that loads ahead takes care
    rows, k, n = 67, 1632 if short else 1536, 3
    raw, x = weights(kind, rows, k, rng), activations(n, k, rng)
    expected = products.multiply(blocks.decode(kind, raw), x)
    spec = n, 32, 0, 16, int(short)
    same(product(any_device.runtime, kind, raw, x, graph.MUL_MAT_VEC, (32, n), spec), expected)
    spec = 32, 32, 4, 4, 64
    same(product(any_device.runtime, kind, raw, x, graph.MUL_MAT, (32, 32), spec), expected)


def strided(x, order):
    """x with its dimensions in memory in the order of `order`, and a gap behind its rows."""
    whole = np.zeros([*(x.shape[i] for i in order[:-1]), x.shape[order[-1]] + 2], x.dtype)
    view = whole[..., :-2]
    view[...] = x.transpose(order)
    return whole, view.transpose(np.argsort(order))


def halves(x, kind):
    """As float32, and as it lies in memory."""
    if kind == "bf16":
        words = x.view(np.uint32) >> 16
        return (words << 16).view(np.float32), words.astype(np.uint16)
    stored = x.astype(np.float16 if kind == "f16" else np.float32)
    return stored.astype(np.float32), stored


@pytest.mark.parametrize(("w_type", "x_type"), (("f32", "f32"), ("f16", "f32"), ("bf16", "f16"), ("f32", "bf16")))
@pytest.mark.parametrize("rows, columns, k, order", ((33, 5, 643, (0, 1, 2, 3)), (16, 1, 40, (2, 0, 1, 3))))
def test_floats(any_device, w_type, x_type, rows, columns, k, order, rng):
    """Broadcast over dimensions 2 and 3, permuted ones, and bits of what is flushed."""
    w = rng.standard_normal((1, 2, rows, k), np.float32)
    x = rng.standard_normal((3, 4, columns, k), np.float32)
    w[..., ::13] = 2.0**-51
    w[..., 0, :2], x[..., 0, :] = (2.0**-50 + 2.0**-62, -(2.0**-50)), 0
    x[..., 0, :2] = 2.0**-50  # a product of 2**-112
    w, stored_w = halves(w, w_type)
    x, stored_x = halves(x, x_type)
    (base_w, view_w), (base_x, view_x) = strided(stored_w, order), strided(stored_x, order)
    added = rng.standard_normal((3, 4, columns, rows), np.float32)
    added[..., 0, 0] = 2.0**-100
    planes = [[products.multiply_floats(w[0, j // 2], x[i, j]) for j in range(4)] for i in range(3)]
    expected = products.add(np.array(planes), added)
    kinds = graph.FLOAT_TYPES.index(w_type), graph.FLOAT_TYPES.index(x_type)
    tensors = {"w": tensor(view_w), "x": tensor(view_x), "added": tensor(added), "y": tensor(added)}
    grid, spec = (-(-rows // 32), -(-columns // 8), 12), (*kinds, 32, 8, 2, 2, 64, 1)
    given = base_w, base_x, added
    (got,) = run(any_device.runtime, graph.MUL_MAT_FLOAT, grid, given, (expected.size,), spec, **tensors)
    same(got, expected)
