"""Operations element by element: the oracle's bits."""

import numpy as np
import pytest
from graph_harness import quantized_sizes, same, same_as_int8

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import elementwise
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import as_words, run

EXECUTED = True

SIZES = (  # zero, denormals, the smallest normal number, about 2**-100, what is 2**127 of those, infinity, NaN
    *(0, 1, 0x7FFFFF, 0x800000, 0x0D7FFFFF, 0x0D800000, 0x4D400000, 0x0D800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    *(0x3F7FFFFF, 0x7F000000),  # a quotient just below overflow
)
EDGES = np.array([*SIZES, *(0x80000000 | size for size in SIZES)], np.uint32)
ROOT = 0xFC114A / 2**23  # whose root needs the last correction
NUMBERS = (ROOT, 0.5, 0.5005, 1, 1.5, 2, 2.5, 3, 6, 9.99, 10, 20.00001, 69.3, 80, 88.72283, 88.72284, 104, 1e4, 1e9)


def drawn(rng, count, turn=0):
    """Numbers of all magnitudes, of the middle ones more, with all edges. turn: so far from an edge to its place."""
    x = rng.standard_normal(count, np.float32) * np.exp2(rng.integers(-10, 9, count)).astype(np.float32)
    x[: count // 8] = rng.integers(0, 1 << 32, count // 8, dtype=np.uint32).view(np.float32)
    edges = np.concatenate([EDGES.view(np.float32), np.float32(NUMBERS), -np.float32(NUMBERS)])
    return np.roll(np.concatenate([edges, x])[:count], turn)


def typed(x, kind):
    """x in a type, and what it is worth there."""
    x = elementwise.encoded(x, kind)
    return x, elementwise.widened(x, kind)


def runs_as(any_device, kernel, operands, wanted, kinds=(), op=None, strided=None, *more, **values):
    """The kernel makes ``wanted`` of ``given``, whose names are those of its bindings."""
    values |= {"y": tensor(wanted)} | (strided or {})
    spec = [] if op is None else [op]
    words = as_words(wanted).size
    spec += [*(graph.FLOAT_TYPES.index(kind) for kind in kinds), *more]
    same(*run(any_device.runtime, kernel, operands, (words,), spec, **values), wanted)


NARROW = [("div", (1, 1, 1, 701), (1, 1, 1, 1), ("bf16", "bf16", "bf16"))]
NARROW += [("mul", (2, 3, 4, 5), (1, 3, 1, 1), ("f16", "f32", "f16"))]
REPEATED = [(op, (1, 1, 4, 1000), (1, 1, 2, 500), ("f32",) * 3) for op in graph.BINARY_OPS]


@pytest.mark.one_driver("div")
@pytest.mark.parametrize(("op", "shape", "of_b", "kinds"), REPEATED + NARROW)
def test_binary(any_device, op, shape, of_b, kinds, rng):
    numbers = [drawn(rng, int(np.prod(one)), index) for index, one in enumerate((shape, of_b))]
    if len(numbers[1]) == 1000:  # every edge with every other
        for x, pairs in zip(numbers, np.meshgrid(EDGES, EDGES), strict=True):
            x[: pairs.size] = pairs.reshape(-1).view(np.float32)
    numbers = [x.reshape(one) for x, one in zip(numbers, (shape, of_b), strict=True)]
    (a, a32), (b, b32) = (typed(x, kind) for x, kind in zip(numbers, kinds, strict=False))
    wanted = elementwise.encoded(elementwise.binary(op, a32, b32), kinds[2])
    runs_as(any_device, graph.BINARY, (a, b), wanted, kinds, graph.BINARY_OPS.index(op))


UNARY_NUMBERS = {"scale": (1.7, -0.3), "clamp": (-1.5, 2.25), "fill": (0.75,), "leaky_relu": (0.1,)}
UNARY_NUMBERS |= {"xielu": (0.8, 0.9, 0.5, -1e-6)}


UNARY = [(op, ("f32", "f32")) for op in graph.UNARY_OPS]
FOLLOWED = {("softplus", "f32"): "mul", ("silu", "f32"): "add"}  # by what, in the same dispatch
UNARY += [("silu", ("f16", "f16")), ("gelu", ("bf16", "bf16")), ("exp", ("f16", "f32"))]


@pytest.mark.one_driver("gelu_erf", "softplus", "sin", "sqrt", "xielu")
@pytest.mark.parametrize(("op", "kinds"), UNARY)
def test_unary(any_device, op, kinds, rng):
    base, base32 = typed(drawn(rng, 3 * 5 * 101, 101 + 7).reshape(3, 5, 101), kinds[0])
    x, x32 = base[:, 1:4, 7:], base32[:, 1:4, 7:]  # a view, in whose first row the edges are
    numbers = UNARY_NUMBERS.get(op, ())
    wanted, then = elementwise.unary(op, x32, *numbers), FOLLOWED.get((op, kinds[1]), "none")
    other = drawn(rng, 94, 3)[None, None]
    wanted = elementwise.encoded(wanted if then == "none" else elementwise.binary(then, wanted, other), kinds[1])
    offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    fields = {"x": tensor(x, offset), **dict(zip("abcd", (*numbers, 0, 0, 0, 0), strict=False))}
    more = graph.FOLLOW_OPS.index(then)
    runs_as(any_device, graph.UNARY, (base, other), wanted, kinds, graph.UNARY_OPS.index(op), fields, more)


@pytest.mark.one_driver("swiglu_oai", "swiglu-f32")
@pytest.mark.parametrize(("op", "kind"), [*((op, "f32") for op in graph.GLU_OPS), ("swiglu", "f16"), ("reglu", "bf16")])
def test_glu(any_device, op, kind, rng):
    numbers = drawn(rng, 3 * 2 * 201).reshape(3, 402)
    numbers[0, 231:261] *= 2.0**40  # gates of NUMBERS: some have a tiny activation
    numbers[1] = np.roll(numbers[0], 201)  # edges in the other half
    x, x32 = typed(numbers, kind)
    wanted = elementwise.encoded(elementwise.glu(op, x32[:, :201], x32[:, 201:], 1.702, 7.0), kind)
    halves = {"a": tensor(x[:, :201]), "b": tensor(x[:, 201:], 201)}
    runs_as(any_device, graph.GLU, (x, x), wanted, (kind,), graph.GLU_OPS.index(op), halves, alpha=1.702, limit=7.0)


def test_glu_as_int8(any_device, rng):
    a, b = (drawn(rng, 2 * 3 * 288, at).reshape(2, 3, 288) for at in (0, 7))
    wanted = elementwise.glu("swiglu", a, b)
    spec, counts = [graph.GLU_OPS.index("swiglu"), 0], (a.size, *quantized_sizes(wanted))
    got = run(any_device.runtime, graph.GLU_QUANTIZED, (a, b), counts, spec, y=tensor(wanted), alpha=1.0, limit=0.0)
    same_as_int8(any_device.runtime, got, wanted)


def test_add_id(any_device, rng):
    a, b = drawn(rng, 7 * 3 * 129).reshape(7, 3, 129), drawn(rng, 8 * 129, 1).reshape(8, 129)
    ids = rng.integers(0, 8, (7, 8), np.int32)
    wanted = elementwise.add_id(a, b, ids[:, :3])
    runs_as(any_device, graph.ADD_ID, (a, b, ids), wanted, strided={"ids": tensor(ids[:, :3])})
