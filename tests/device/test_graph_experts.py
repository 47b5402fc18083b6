"""Products of experts: the oracle's bits, however the columns come to their matrices."""

import numpy as np
import pytest
from device.test_graph_products import activations, gfx1201, halves, units, weights  # noqa: F401
from graph_harness import quantized_sizes, same

from zinc_attn.graph import blocks, products
from zinc_attn.graph import declarations as graph
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import run

FEW = graph.MUL_MAT_VEC, 0, (1, 64, 0, 2, 1)  # columns of a list's tile; constants
MANY = graph.MUL_MAT, 8, (32, 8, 4, 1, 64)
FEW_FLOATS = graph.MUL_MAT_FLOAT_VEC, 0, (1, 64, 0, 2, 1)
MANY_FLOATS = graph.MUL_MAT_FLOAT, 8, (32, 8, 2, 2, 64)


def listed(runtime, ids, whole, experts, columns):
    """BY_EXPERT's list of ids, a view of `whole`, and its tiles."""
    words = products.by_expert(ids, experts, columns)
    tiles = min(ids.size, experts + 1 + ids.size // columns)
    of = {"ids": tensor(ids), "experts": experts, "columns": columns, "tiles": tiles}
    (made,) = run(runtime, graph.BY_EXPERT, (whole,), (tiles * (columns + 1),), **of)
    same(made, words)
    return made, tiles


def product(runtime, way, first, w, x, ids, whole, y, experts=None, added=None):
    """The words of y (tokens, slots, rows) after a dispatch for each piece of `experts`, (first, count)."""
    kernel, columns, spec = way
    spec = *spec, int(added is not None), 1, *([0] if "ahead" in kernel.decl.spec else [])
    matrices = len(w)
    given_ids = listed(runtime, ids, whole, matrices, columns)[0] if columns else whole
    tensors = {"x_slots": x.shape[1], "ids": tensor(ids), "y": tensor(y)}
    plus = y if added is None else added
    if len(first) == 1:  # a type of quantized weights
        q, scales = run(runtime, graph.QUANTIZE, (x,), quantized_sizes(x))
        tensors |= {"w_begin": 0, "w_steps": (w[0].size // 16, 0), "repeats": (1, 1), "blocks": x.shape[2] // 32}
        packed, operands = np.stack([blocks.pack(graph.WEIGHT_TYPES[first[0]], one) for one in w]), (q, scales)
    else:
        packed, operands = w, (x,)
    words = np.zeros(y.size, np.uint32)  # no NaN, as what is none of the experts has
    for begin, count in experts or ((0, matrices),):
        tensors["experts"] = begin, count, matrices
        given = packed[begin : begin + count], *operands, plus, given_ids
        (words,) = run(runtime, kernel, given, (words,), (*first, *spec), **tensors)
    return words


def routes(tokens, slots, experts, rng):
    """ids (tokens, slots), a view of a larger tensor: each token's differ; none takes expert 0, half take 1."""
    whole = np.zeros((tokens, slots + 3), np.int32)
    ids = whole[:, :slots]
    ids[...] = np.argsort(rng.random((tokens, experts - 1)), -1)[:, :slots] + 1
    ids[::2, 0] = 1
    return whole, ids


def expected_of(kind, w, x, ids):
    """The oracle's y of quantized weights (experts, rows, bytes) or of float32 (experts, rows, k)."""
    of = [blocks.decode(kind, one) for one in w] if kind in TYPES else w
    one = products.multiply if kind in TYPES else products.multiply_floats
    return products.of_experts(lambda expert, rows: one(of[expert], rows), len(w), x, ids, w.shape[1])


def of_type(kind, device):
    """The first constants of products of weights of a type and float32, and the ways, one of them by matrix units."""
    if kind in TYPES:
        by_units = [(kernel, tile[1], tile) for kernel, tile in units(device, kind)]
        return (graph.WEIGHT_TYPES.index(kind),), (FEW, MANY, *by_units)
    return (graph.FLOAT_TYPES.index(kind), graph.FLOAT_TYPES.index("f32")), (FEW_FLOATS, MANY_FLOATS)


# The code of experts is one; that of each type is test_graph_products'.
@pytest.mark.one_driver("q6_K", default=("q4_0", "q8_0", "mxfp4", "q2_K", "q6_K"))
@pytest.mark.parametrize("kind", TYPES)
@np.errstate(all="ignore")
def test_types(any_device, kind, rng):
    """48 rows; a short last superblock where there is one; an id after the last expert, and one below 0."""
    k, experts = 512 if TYPES[kind].values == 256 else 320, 4
    raw, x = weights(kind, (1, experts, 48, k), rng)[0], activations((1, 10, k), rng).reshape(5, 2, k)
    whole, ids = routes(5, 2, experts, rng)
    ids[1], ids[2, 1] = (2, 2), experts
    ids[3, 0] = -1
    expected = expected_of(kind, raw, x, ids)
    first, ways = of_type(kind, any_device)
    for way in ways:
        same(product(any_device.runtime, way, first, raw, x, ids, whole, expected), expected)
    assert np.isnan(expected[2, 1]).all() and np.isfinite(expected[1:3, 0]).any()


@pytest.mark.one_driver("bf16")
@pytest.mark.parametrize("kind", ("f32", "f16", "bf16"))
def test_floats(any_device, kind, rng):
    raw, x = rng.standard_normal((4, 35, 320), np.float32), rng.standard_normal((9, 2, 320), np.float32)
    w, stored = halves(raw, kind)
    whole, ids = routes(9, 2, 4, rng)
    expected = expected_of(kind, w, x, ids)
    first, ways = of_type(kind, any_device)
    for way in ways:
        same(product(any_device.runtime, way, first, stored, x, ids, whole, expected), expected)


CASES = (  # tokens, slots, rows of x of a token, experts, and which of them a dispatch has
    (1, 8, 1, 32, None),
    (1, 3, 3, 128, ((0, 50), (50, 78))),
    (7, 4, 2, 5, ((0, 1), (1, 2), (3, 2))),
    (600, 2, 1, 3, None),
)


@pytest.mark.one_driver
@pytest.mark.parametrize("kind", ("q4_K", "f16"))
@pytest.mark.parametrize(("tokens", "slots", "x_slots", "experts", "pieces"), CASES)
@np.errstate(all="ignore")
def test_shapes(any_device, kind, tokens, slots, x_slots, experts, pieces, rng):
    """With a sum, and where all tokens take one expert, a token even twice."""
    x, (first, ways) = rng.standard_normal((tokens, x_slots, 256), np.float32), of_type(kind, any_device)
    w = stored = weights(kind, (1, experts, 16, 256), rng)[0] if kind in TYPES else None
    if stored is None:
        w, stored = halves(rng.standard_normal((experts, 16, 256), np.float32), kind)
    whole, ids = routes(tokens, slots, experts, rng)
    added = rng.standard_normal((tokens, slots, 16), np.float32)
    for plus in added, None:
        expected = expected_of(kind, w, x, ids)
        expected = expected if plus is None else products.add(expected, plus)
        for way in ways:
            same(product(any_device.runtime, way, first, stored, x, ids, whole, expected, pieces, plus), expected)
        ids[...] = experts - 1


LISTS = (1, 1, 1, 16), (70, 10, 300, 16), (9, 2, 1024, 1)


@pytest.mark.one_driver
@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), LISTS)
def test_lists(any_device, tokens, slots, experts, columns, rng):
    whole = rng.integers(-1, experts + 1, (tokens, slots + 3)).astype(np.int32)
    made, tiles = listed(any_device.runtime, whole[:, :slots], whole, experts, columns)
    pairs = made[tiles:][made[tiles:] < tokens * slots]
    assert sorted(pairs[: tokens * slots]) == [*range(tokens * slots)]


@pytest.mark.parametrize("kind", ("q4_K", "q8_0", "f16"))
@np.errstate(all="ignore")
def test_gfx1201(gfx1201, kind, rng):  # noqa: F811
    """Programs as the card gets them: pieces ahead, waves that share superblocks; experts in two dispatches."""
    w = stored = weights(kind, (1, 3, 48, 512), rng)[0] if kind in TYPES else None
    if stored is None:
        w, stored = halves(rng.standard_normal((3, 48, 512), np.float32), kind)
    x, (whole, ids) = activations((1, 3, 512), rng).reshape(3, 1, 512), routes(3, 2, 3, rng)
    first, ways = of_type(kind, gfx1201)
    expected = expected_of(kind, w, x, ids)
    for way in ways:
        same(product(gfx1201, way, first, stored, x, ids, whole, expected, ((0, 2), (2, 1))), expected)
    assert gfx1201.loads_outside == 0
