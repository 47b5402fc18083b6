"""Products of matrices: the oracle's bits."""

from contextlib import closing

import numpy as np
import pytest
from graph_harness import quantized_sizes, same
from support import needs_radv

from zinc_attn.graph import blocks, elementwise, products
from zinc_attn.graph import declarations as graph
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.records import tensor
from zinc_attn.graph.rows import norm
from zinc_attn.tools.graph.device import NO_EXPERTS, OnDevice, run, units_of
from zinc_attn.tools.graph.model import HALVES, random_matrix
from zinc_attn.tools.graph.oracle import Oracle


def weights(kind, shape, rng):
    """ggml's bytes of random weights (..., rows, k): small scales, one 0, denormal, the largest, infinite."""
    (*lead, k), (values, size) = shape, (TYPES[kind].values, TYPES[kind].size)
    raw = rng.integers(0, 256, (np.prod(lead) * k // values, size), np.uint8)
    for at in HALVES.get(kind, ()):
        d = np.append((0, 6e-8, -65504, -0.0), rng.standard_normal(len(raw)) * 0.01)[: len(raw)].astype(np.float16)
        d[-1] = np.inf
        raw[:, at : at + 2] = d[:, None].view(np.uint8)
    if kind == "mxfp4":
        raw[:, 0] = np.append((0, 1, 2, 255), rng.integers(100, 130, len(raw)))[: len(raw)]
        raw[k // values : 2 * k // values, 0] -= 90  # a row whose products with x's scales are about 2**-100
    return raw.reshape(*lead, k // values * size)


def activations(shape, rng):
    """Blocks of zeros, of what counts as zero, and of the largest numbers; the last of several rows has an infinity."""
    x = rng.standard_normal(shape, np.float32)
    x[..., ::97] *= 40
    x[..., 0, :32] = 0
    x[..., 0, -32:] = np.linspace(-(2.0**-61), 2.0**-61, 32)
    x[0, ..., 0, :32] = np.linspace(-3e38, 3e38, 32)
    if shape[-2] > 1:
        x[..., -1, 7] = -np.inf
    return x


def product(runtime, kind, raw, x, kernel, spec, added=None, up=None, glu="swiglu"):
    """y (i3, i2, columns, rows) of weights (j3, j2, rows, bytes) and x (i3, i2, columns, k); up: weights, too."""
    (*planes, columns, k), rows = x.shape, raw.shape[2]
    words = 2 * x.size // k * -(-k // 256) * 8
    q, scales = run(runtime, graph.QUANTIZE, (x,), (4 * words, words))
    y = np.zeros((*planes, columns, rows), np.float32)
    packed = [blocks.pack(kind, matrix) for matrix in raw.reshape(-1, *raw.shape[2:])]
    step = raw[0, 0].size // 16
    values = {"w_begin": 0, "w_steps": (step, raw.shape[1] * step), "blocks": k // 32, "y": tensor(y)}
    values |= NO_EXPERTS | {"repeats": (planes[1] // raw.shape[1], planes[0] // raw.shape[0])}
    values |= {"added": tensor(y if added is None else np.broadcast_to(added, y.shape))}
    operands = np.concatenate(packed), q, scales, *[y if added is None else added] * 2
    kind_and_spec = graph.WEIGHT_TYPES.index(kind), *spec, int(added is not None), 0
    if kernel is graph.MUL_MAT_VEC:
        kind_and_spec += (0 if up is None else 1 + graph.GLU_OPS.index(glu),)
    size = y.size
    if up is not None:
        more = np.concatenate([blocks.pack(kind, matrix) for matrix in up.reshape(-1, *up.shape[2:])])
        operands, size = (*operands[:3], more, y), sum(quantized_sizes(y))
    (got,) = run(runtime, kernel, operands, (size,), kind_and_spec, **values)
    return got


def expected_of(kind, raw, x):
    """The oracle's y, plane by plane."""
    y = np.zeros((*x.shape[:-1], raw.shape[2]), np.float32)
    for i, j in np.ndindex(x.shape[:2]):
        w = raw[i * raw.shape[0] // x.shape[0], j * raw.shape[1] // x.shape[1]]
        y[i, j] = products.multiply(blocks.decode(kind, w), x[i, j])
    return y


# A wave alone; then four waves, twelve superblocks a round, two ahead.
FEW = graph.MUL_MAT_VEC, (3, 32, 0, 1, 0)
WAVES = graph.MUL_MAT_VEC, (1, 128, 0, 12, 2)
MANY = graph.MUL_MAT, (32, 8, 4, 1, 64)


def units(device, kind):
    """By the device's matrix units, where it has some."""
    tile = units_of(device.info, kind)
    return [(graph.MUL_MAT_UNITS, tile)] if tile else []


@pytest.mark.one_driver("mxfp4", "q4_K", "iq4_nl", "q8_0")
@pytest.mark.parametrize("kind", TYPES)
@np.errstate(all="ignore")
def test_types(any_device, kind, rng):
    """67 rows: groups of 32, 32 and 3; a last superblock that is short where there is one."""
    k = 1536 if TYPES[kind].values == 256 else 1472
    raw, x = weights(kind, (1, 1, 67, k), rng), activations((1, 1, 3, k), rng)
    expected = expected_of(kind, raw, x)
    for way in FEW, MANY, *units(any_device, kind):
        same(product(any_device.runtime, kind, raw, x, *way), expected)


GATED = (*((FEW[0], (n, 32, 0, 1, 0)) for n in (1, 5)), (FEW[0], (5, 64, 0, 2, 1)))


@pytest.mark.of_drivers
@pytest.mark.one_driver("q4_K")
@pytest.mark.parametrize("kind", ("q4_K", "q5_0", "iq4_nl"))
@np.errstate(all="ignore")
def test_gate_and_up(any_device, kind, rng):
    """Two matrices and their GLU, as int8; alone, and by waves that share superblocks; planes that share weights."""
    runtime = any_device.runtime
    (gate, up), x = (weights(kind, (1, 2, 256, 768), rng) for _ in range(2)), activations((2, 4, 5, 768), rng)
    for glu, way in (("swiglu", GATED[0]), ("geglu", GATED[1]), ("swiglu", GATED[2])):
        y = elementwise.glu(glu, expected_of(kind, gate, x), expected_of(kind, up, x))
        alone = np.concatenate(run(runtime, graph.QUANTIZE, (y,), quantized_sizes(y)))
        assert np.array_equal(product(runtime, kind, gate, x, *way, up=up, glu=glu), alone)


@pytest.mark.one_driver
@pytest.mark.parametrize("kind", ("q4_0", "q6_K"))
@np.errstate(all="ignore")
def test_shapes(any_device, kind, rng):
    """Rows and columns around the sizes of groups and tiles, one block and many; planes that share weights; a sum."""
    unit, many = TYPES[kind].values, 14 * 256
    for rows, k, columns, way in (
        *((rows, unit, 3, FEW) for rows in (1, 31, 33)),
        *((32, k, 1, WAVES) for k in (unit, many, many - 256 + unit)),
        *((16, 256, columns, way) for columns in (1, 9, 67) for way in (MANY, *units(any_device, kind))),
        (64, 512, 6, FEW),
    ):
        matrices = 1 if rows % 16 else 2  # which begin at a multiple of 16 bytes
        raw, x = weights(kind, (1, matrices, rows, k), rng), activations((2, 2 * matrices, columns, k), rng)
        expected, bias = expected_of(kind, raw, x), rng.standard_normal((1, 1, 1, rows), np.float32)
        same(product(any_device.runtime, kind, raw, x, *way), expected)
        bias[..., ::2] = 2.0**-101
        same(product(any_device.runtime, kind, raw, x, *way, bias), products.add(expected, bias))


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


@pytest.mark.one_driver("bf16-f16")
@pytest.mark.parametrize(("w_type", "x_type"), (("f32", "f32"), ("f16", "f32"), ("bf16", "f16"), ("f32", "bf16")))
@pytest.mark.parametrize("rows, columns, k, order", ((33, 5, 643, (0, 1, 2, 3)), (35, 2, 576, (2, 0, 1, 3))))
def test_floats(any_device, w_type, x_type, rows, columns, k, order, rng):
    """Broadcast over dimensions 2 and 3, permuted ones, and bits of what is flushed."""
    w = rng.standard_normal((1, 2, rows, k), np.float32)
    x = rng.standard_normal((3, 4, columns, k), np.float32)
    w[..., 1, :] = x[..., -1, :] = 2.0**-51  # flushed, and nothing is added to this row and column
    w[..., 0, :2], x[..., 0, :] = (2.0**-50 + 2.0**-62, -(2.0**-50)), 0
    x[..., 0, :2] = 2.0**-50  # a product of 2**-112
    w, stored_w = halves(w, w_type)
    x, stored_x = halves(x, x_type)
    (base_w, view_w), (base_x, view_x) = strided(stored_w, order), strided(stored_x, order)
    added = rng.standard_normal((3, 4, columns, rows), np.float32)
    added[..., 1] = added[..., -1, :] = 0
    added[..., 0, 0] = 2.0**-100
    planes = [[products.multiply_floats(w[0, j // 2], x[i, j]) for j in range(4)] for i in range(3)]
    expected = products.add(np.array(planes), added)
    kinds = graph.FLOAT_TYPES.index(w_type), graph.FLOAT_TYPES.index(x_type)
    tensors = {"w": tensor(view_w), "x": tensor(view_x), "added": tensor(added), "y": tensor(added), **NO_EXPERTS}
    operands, spec = (base_w, base_x, added, added), (*kinds, 32, 8, 2, 2, 64, 1, 0)
    (got,) = run(any_device.runtime, graph.MUL_MAT_FLOAT, operands, (expected.size,), spec, **tensors)
    same(got, expected)
    if k % 64 == 0:
        spec = *kinds, columns, 32, 0, 1, 1, 1, 0, 0
        (got,) = run(any_device.runtime, graph.MUL_MAT_FLOAT_VEC, operands, (expected.size,), spec, **tensors)
        same(got, expected)


@pytest.mark.of_drivers
@pytest.mark.one_driver("bf16")
@pytest.mark.parametrize(("kind", "size"), (("f32", 32), ("bf16", 256)))
def test_floats_of_a_norm(any_device, kind, size, rng):
    """The product makes the norm of x itself, by one wave and by several."""
    w, stored = halves(rng.standard_normal((35, 576), np.float32), kind)
    eps = int(np.float32(1e-6).view(np.uint32))
    spec = graph.FLOAT_TYPES.index(kind), 0, 1, size, 0, 2, 1, 0, 0, eps
    for x, a in rng.standard_normal((24, 2, 1, 576), np.float32):  # in another order some of the sums have other bits
        expected = products.multiply_floats(w, norm("rms", x, 1e-6, ("mul", a)))
        tensors = {"w": tensor(stored), "x": tensor(x), "added": tensor(a), "y": tensor(expected), **NO_EXPERTS}
        (got,) = run(any_device.runtime, graph.MUL_MAT_FLOAT_VEC, (stored, x, a, a), (expected.size,), spec, **tensors)
        same(got, expected)


@pytest.mark.one_driver
@pytest.mark.parametrize("k", (260, 264))
def test_floats_of_any_k(any_device, k, rng):
    """Few rows of x of a k that the kernel of few rows does not take, or takes without loads ahead."""
    for rows in (1, 2, 3):
        w, x = random_matrix("f32", 33, k, rng), rng.standard_normal((rows, k), np.float32)
        assert np.array_equal(OnDevice(any_device).product(w, x), Oracle().product(w, x))


@pytest.fixture(scope="module")
def gfx1201():
    """RADV's code for the chip, executed."""
    pytest.importorskip("tinygrad", reason="tinygrad 0.14, which has AMD's tables, wants Python 3.11 or later")
    needs_radv()
    from gfx1201.runtime import Gfx1201

    with closing(Gfx1201()) as runtime:
        yield runtime


@pytest.mark.parametrize("kind", TYPES)
@np.errstate(all="ignore")
def test_types_on_gfx1201(gfx1201, kind, rng):
    """Programs as the card gets them: a superblock's pieces ahead, waves that share superblocks, in two rounds. By
    matrix units, where the compiler offers some, tiles that rows and columns do not fill."""
    k = 768 if TYPES[kind].values == 256 else 736
    raw, x = weights(kind, (1, 1, 33, k), rng), activations((1, 1, 2, k), rng)
    expected = expected_of(kind, raw, x)
    few = graph.MUL_MAT_VEC, (2, 64, 1, 3, TYPES[kind].ahead)
    for way in few, (graph.MUL_MAT, (32, 32, 4, 4, 64)):
        same(product(gfx1201, kind, raw, x, *way), expected)
    for kernel, tile in units(gfx1201, kind):
        more, columns = weights(kind, (1, 1, tile[0] + 33, k), rng), activations((1, 1, tile[1] + 35, k), rng)
        same(product(gfx1201, kind, more, columns, kernel, tile), expected_of(kind, more, columns))
    if kind == "q4_K":
        gate, up = weights(kind, (2, 1, 1, 256, k), rng)
        y = elementwise.glu("swiglu", expected_of(kind, gate, x), expected_of(kind, up, x))
        alone = np.concatenate(run(gfx1201, graph.QUANTIZE, (y,), quantized_sizes(y)))
        assert np.array_equal(product(gfx1201, kind, gate, x, *few, up=up), alone)
    assert gfx1201.loads_outside == 0


@np.errstate(all="ignore")
def test_a_norm_and_its_product_on_gfx1201(gfx1201, rng):
    w, x, a = (rng.standard_normal((n, 320), np.float32) for n in (33, 1, 1))
    floats, w = halves(w, "f16")
    expected = products.multiply_floats(floats, norm("rms", x, 1e-6, ("mul", a)))
    tensors = {"w": tensor(w), "x": tensor(x), "added": tensor(a), "y": tensor(expected), **NO_EXPERTS}
    spec = (1, 0, 1, 64, 1, 1, 1, 0, 0, int(np.float32(1e-6).view(np.uint32)))
    (got,) = run(gfx1201, graph.MUL_MAT_FLOAT_VEC, (w, x, a, a), (expected.size,), spec, **tensors)
    same(got, expected)
    assert gfx1201.loads_outside == 0
