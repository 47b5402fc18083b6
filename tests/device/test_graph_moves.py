"""Operations that move: the oracle's bits, in every layout, and no bit beside them."""

from typing import Any

import numpy as np
import pytest
from graph_harness import same

from zinc_attn.canonical.state import as_input
from zinc_attn.graph import blocks, moves
from zinc_attn.graph.declarations import FIT, GET_WEIGHTS, MOVE, MOVE_OPS, MOVE_TYPES, TO_BLOCKS, WEIGHT_TYPES
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.records import tensor
from zinc_attn.storage import STORAGE
from zinc_attn.tools.graph.device import POISON, run

EXECUTED = True
LAYOUTS: dict[str, dict[str, Any]] = {  # of an array in memory
    "plain": {},
    "odd": {"begin": 3, "gap": 1},
    "permuted": {"order": (1, 3, 0, 2), "begin": 1},
    "inner": {"order": (2, 0, 1, 3), "gap": 2},
}
FLOATS = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.9, 65520, -7e4, 1e-7, -6e-8, 2.0**-25, 3e-39, 2e9, -2e9, 3e9], np.float32
)


class Memory:
    """An array in poisoned memory. order: its axes as they lie there, the outermost first; gap: elements behind each
    row, plane ...; inner: halves of a block, which are elements then."""

    def __init__(self, shape, dtype, order=(0, 1, 2, 3), begin=0, gap=0, inner=1):
        steps, size = [0] * 4, inner
        for axis in reversed(order):
            steps[axis] = size
            size = size * shape[axis] + gap
        item = np.dtype(dtype).itemsize
        self.begin, self.words = begin, np.full(-(-(begin + size + 1) * item // 4), POISON, np.uint32)
        shape, steps = (*shape, inner), (*(step * item for step in steps), item)
        self.values = np.lib.stride_tricks.as_strided(self.words.view(dtype)[begin:], shape, steps)

    @property
    def tensor(self):
        return tensor(self.values[..., 0], self.begin)

    @classmethod
    def of(cls, x, kind, layout):
        """Memory that holds x; kind: its type."""
        blocked = kind in STORAGE and STORAGE[kind].halves
        made = cls(x.shape[:4], np.uint16 if blocked else x.dtype, inner=x.shape[4] // 2 if blocked else 1, **layout)
        made.values[...] = x.view(np.uint16) if blocked else x[..., None]
        return made


def numbers(rng, shape, kind):
    """An array of a type, edges among its elements."""
    if kind in ("i32", "i16", "i8"):
        info = np.iinfo(moves.DTYPES[kind])
        return rng.integers(info.min, info.max + 1, shape).astype(moves.DTYPES[kind])
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)).astype(np.float32)
    if kind not in moves.DTYPES:
        return moves.to_block_type(x, kind)
    x.reshape(-1)[: FLOATS.size] = FLOATS[: x.size]
    return moves.convert(x, kind)


def moved(device, op, source, target, x, y_shape, layouts, expected, ids=None, shift=(0, 0, 0, 0)):
    """Move x into poisoned memory of y_shape, in blocks where y has some. expected: y, or a function that writes it."""
    blocked, from_blocks = target not in moves.DTYPES, source not in moves.DTYPES
    dtype, inner = (np.uint16, STORAGE[target].row_bytes(32) // 2) if blocked else (moves.DTYPES[target], 1)
    memory, out = Memory.of(x, source, LAYOUTS[layouts[0]]), Memory(y_shape, dtype, inner=inner, **LAYOUTS[layouts[1]])
    ids = np.zeros((1, 1, 1), np.int32) if ids is None else ids
    named, (offset, (count, *n), steps) = Memory.of(ids[None], "", {"gap": 2}), memory.tensor
    values = {"x": (offset, (32 * count, *n) if from_blocks else (count, *n), steps), "y": out.tensor}
    values |= {"ids": named.tensor, "id_words": ids.itemsize // 4}
    values |= {} if blocked else {"shift": np.array(shift, np.int64).astype(np.uint32)}
    spec = MOVE_OPS.index(op), MOVE_TYPES.index(source), MOVE_TYPES.index(target)
    kernel, operands = TO_BLOCKS if blocked else MOVE, (memory.words, named.words)
    (got,) = run(device.runtime, kernel, operands, (out.words.copy(),), spec, **values)
    if callable(expected):
        expected(out.values if blocked else out.values[..., 0])
    else:
        out.values[...] = expected.reshape(out.values.shape)
    same(got, out.words.view(np.uint32 if blocked else dtype))


MOVED = [  # source, target, x's shape, y's, layouts of both
    ("f32", "f32", (3, 5, 7, 2), (5, 1, 6, 7), ("inner", "odd")),
    ("f32", "f32", (1, 2, 6, 5), (1, 3, 4, 5), ("inner", "odd")),
    ("f32", "f16", (2, 3, 4, 33), (2, 3, 4, 33), ("permuted", "odd")),
    ("f32", "bf16", (2, 3, 4, 33), (2, 3, 4, 33), ("odd", "permuted")),
    ("f16", "f32", (2, 3, 4, 33), (2, 3, 4, 33), ("odd", "plain")),
    ("bf16", "f32", (2, 3, 4, 33), (2, 3, 4, 33), ("odd", "plain")),
    ("f16", "f16", (1, 2, 3, 70), (1, 2, 70, 3), ("plain", "inner")),
    ("i8", "i8", (1, 2, 3, 7), (1, 2, 3, 7), ("odd", "odd")),
    ("f32", "i32", (1, 1, 3, 70), (1, 1, 3, 70), ("plain", "plain")),
    ("i32", "bf16", (1, 1, 3, 70), (1, 1, 3, 70), ("plain", "plain")),
    ("f16", "bf16", (1, 1, 1, 70001), (1, 1, 70001, 1), ("odd", "odd")),
    ("q8_0", "f32", (2, 3, 2, 96), (2, 3, 2, 96), ("odd", "odd")),
    ("q5_1", "f16", (2, 3, 2, 96), (2, 3, 1, 192), ("inner", "plain")),
    *((kind, "f32", (1, 2, 3, 64), (1, 2, 3, 64), ("odd", "plain")) for kind in ("q4_0", "q4_1", "q5_0", "iq4_nl")),
]


@pytest.mark.one_driver("q5_1", "i32")
@pytest.mark.parametrize(("source", "target", "shape", "y_shape", "layouts"), MOVED)
def test_copies_convert_and_take_another_shape(any_device, rng, source, target, shape, y_shape, layouts):
    x = numbers(rng, shape, source)
    values = x if source in moves.DTYPES else moves.from_block_type(x, source)
    values = values if source == target else moves.convert(values, target)
    moved(any_device, "linear", source, target, x, y_shape, layouts, values)


@pytest.mark.one_driver
@pytest.mark.parametrize("target", ("f32", "f16", "i8"))
@pytest.mark.parametrize("layouts", (("odd", "odd"), ("permuted", "inner")))
def test_what_repeats_and_what_is_padded(any_device, rng, target, layouts):
    x = numbers(rng, (2, 1, 3, 5), target)
    for op, shape, shift, y in (
        ("wrap", (4, 3, 3, 10), (0, 0, 0, 0), moves.repeat(x, (4, 3, 3, 10), (0, 0, 0, 0))),
        ("wrap", (2, 1, 7, 9), (4, 2, 0, 1), moves.repeat(x, (2, 1, 7, 9), (1, 0, 2, 4))),
        ("pad", (3, 2, 5, 9), (-3, -2, 0, -1), moves.pad(x, (3, 2, 5, 9), (1, 0, 2, 3))),
    ):
        moved(any_device, op, target, target, x, shape, layouts, y, shift=shift)


@pytest.mark.one_driver("q5_0")
@pytest.mark.parametrize("source", ("f32", "i32", "f16", "bf16", "q5_0"))
def test_rows_that_indices_name(any_device, rng, source):
    x = numbers(rng, (3, 2, 9, 64 if source == "q5_0" else 33), source)
    ids = rng.integers(0, 9, (3, 2, 5)).astype(np.int32)
    ids[0, 0, :2] = 9, -1
    target = "i32" if source == "i32" else "f32"
    values = x if source in moves.DTYPES else moves.from_block_type(x, source)
    y = moves.get_rows(values, ids)
    y = y if source == target else moves.convert(y, target)
    y.view(np.uint8)[(ids < 0) | (ids > 8)] = 0xFF
    moved(any_device, "get_rows", source, target, x, y.shape, ("odd", "plain"), y, ids)


SET = [
    ("f32", "f32", np.int64, 33, ("odd", "odd")),
    ("f32", "f16", np.int64, 33, ("plain", "plain")),
    ("f32", "bf16", np.int32, 31, ("odd", "odd")),
    ("f16", "f16", np.int32, 1, ("plain", "plain")),
]


def names(rng, rows, dtype):
    """Indices (2, 1, 5) of rows, those of a plane apart, and two that name none."""
    ids = np.stack([rng.permutation(rows)[:5] for _ in range(2)])[:, None].astype(dtype)
    ids[0, 0, 1] = rows if dtype == np.int32 else ids[0, 0, 1] + 2**32
    ids[1, 0, 0] = -1
    return ids


@pytest.mark.one_driver("f32-f16")
@pytest.mark.parametrize(("source", "target", "dtype", "columns", "layouts"), SET)
def test_rows_go_where_indices_say(any_device, rng, source, target, dtype, columns, layouts):
    x, ids = numbers(rng, (4, 3, 5, columns), source), names(rng, 11, dtype)
    values = x if source == target else moves.convert(x, target)
    moved(
        *(any_device, "set_rows", source, target, x, (4, 3, 11, columns), layouts),
        lambda y: moves.set_rows(y, values, ids),
        ids,
    )


BLOCKS = [
    ("f32", "q8_0", "set_rows", "odd", "odd"),
    ("f32", "q4_0", "set_rows", "plain", "plain"),
    ("f32", "q4_1", "linear", "inner", "odd"),
    ("f32", "q5_0", "set_rows", "odd", "odd"),
    ("f32", "q5_1", "set_rows", "plain", "odd"),
    ("f32", "iq4_nl", "set_rows", "plain", "odd"),
    ("f16", "q4_0", "linear", "permuted", "odd"),
    ("bf16", "q8_0", "linear", "plain", "plain"),
]


@pytest.mark.one_driver("iq4_nl", "bf16")
@pytest.mark.parametrize(("source", "target", "op", "of_x", "of_y"), BLOCKS)
def test_blocks_have_the_codecs_bytes(any_device, rng, source, target, op, of_x, of_y):
    scale = 2.0 ** rng.integers(-30, 10, (4, 3, 5, 3)).repeat(32, axis=-1)
    x = (rng.standard_normal((4, 3, 5, 96)) * scale).astype(np.float32)
    most = np.float32(STORAGE[target].most)
    x[0, 0, :, 0] = [most, 0, np.nextafter(most, np.float32(np.inf)), np.nan, -np.inf]  # SET_ROWS leaves out the second
    x[0, 1, 0], x[0, 2, 0], x[0, 2, 2, 1] = -0.0, 2.0**-41 * np.sign(x[0, 2, 0]), 3e-39
    x = moves.convert(x, source)
    raw, ids = moves.to_block_type(x, target), names(rng, 11, np.int64)
    y_shape = (4, 3, 11, 3) if op == "set_rows" else (3, 4, 3, 5)
    halves = raw.view(np.uint16)
    expected = (lambda y: moves.set_rows(y, halves, ids)) if op == "set_rows" else halves
    moved(any_device, op, source, target, x, y_shape, (of_x, of_y), expected, ids)


@pytest.mark.one_driver
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@np.errstate(all="ignore")
def test_rows_of_weights(any_device, rng, kind):
    """Random bytes in layout R32, in matrices that begin anywhere, of a view that leaves out the first two rows."""
    rows, begin, size = 37, 1 if kind == "mxfp4" else 6, TYPES[kind].size
    raw = rng.integers(0, 256, (2, rows, 512 // TYPES[kind].values * size), np.uint8)
    packed = [np.zeros(begin, np.uint8), *(blocks.pack(kind, matrix) for matrix in raw)]
    ids = rng.integers(0, rows - 2, (1, 2, 5)).astype(np.int32)
    ids[0, 0, 0], ids[0, 1, 1:3] = rows - 3, (rows - 2, -1)
    y = np.zeros((1, 2, 5, 512), np.float32)
    values = {"y": tensor(y), "offset": begin, "steps": (raw[0].size, 0), "rows": rows, "first": 2}
    operands, spec = (np.concatenate(packed), ids), (WEIGHT_TYPES.index(kind),)
    (got,) = run(any_device.runtime, GET_WEIGHTS, operands, (y.size,), spec, **values)
    wanted = np.stack([moves.from_weights(matrix[2:], kind) for matrix in raw])
    same(got, moves.get_rows(wanted[None], ids))


@pytest.mark.parametrize(("dims", "filled"), ((40, 48), (64, 64), (5, 3)))
def test_q_as_attention_reads_it(any_device, dims, filled, rng):
    """Rows of another length, in another order, with zeros for small magnitudes."""
    x = rng.standard_normal((2, 3, 7, dims), np.float32) * np.exp2(rng.integers(-120, 40, dims)).astype(np.float32)
    x[0, 0, 0, :3] = -0.0, 2.0**-40, np.nan
    permuted = x.transpose(0, 2, 1, 3)
    want = np.zeros((*permuted.shape[:3], filled), np.float32)
    want[..., :dims] = as_input(permuted)[..., :filled]
    values = {"x": tensor(permuted), "y": tensor(want), "least": 2.0**-40}
    (got,) = run(any_device.runtime, FIT, (x,), (want.size,), **values)
    assert np.array_equal(got, want.reshape(-1).view(np.uint32))
