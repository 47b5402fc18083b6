"""Norms, sums and SOFT_MAX of rows: the oracle's bits."""

import numpy as np
import pytest
from graph_harness import quantized_sizes, same, same_as_int8

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import rows
from zinc_attn.graph.records import tensor
from zinc_attn.kernels import declarations
from zinc_attn.tools.graph.device import NO_TURNS, run

EXECUTED = True

NONE = (0, (0,) * 4, (0,) * 4)  # a tensor that is not used
OF_ROW = {"eps": 1e-6, "scales": (0, 0), "joined": 1}  # parameters of a norm


def drawn(rng, shape, edges=()):
    """Rows of several magnitudes; the first row begins with the edges."""
    x = rng.standard_normal(shape, np.float32)
    x *= np.exp2(np.linspace(-60, 40, x[..., 0].size)).astype(np.float32).reshape(*shape[:-1], 1)
    x.reshape(-1)[: len(edges)] = edges
    return x


EDGES = ((), (1e-40, 1e-30, -0.0, 1e-38), (np.inf, 1), (np.nan, 1), (3e38, 3e38), (0.0,) * 70)


@pytest.mark.one_driver("-norm", "1025-then2-rms")
@pytest.mark.parametrize("op", graph.NORM_OPS)
@pytest.mark.parametrize(
    ("columns", "then"), [(70, ("mul", "add")), (1, ("scale", "none")), (1025, ("add", "mul")), (70000, ("none",) * 2)]
)
def test_norm(any_device, op, columns, then, rng):
    for edges in EDGES if columns == 70 else EDGES[:1]:
        x = drawn(rng, (2, 3, columns), edges)
        a, b, scale = drawn(rng, (1, 1, columns)), drawn(rng, (1, 3, columns)), 0.3
        half = a[..., :35] if columns == 70 else a  # whose columns repeat
        others = [scale if one == "scale" else other for one, other in zip(then, (half, b), strict=True)]
        follow = [pair for pair in zip(then, others, strict=True) if pair[0] != "none"]
        wanted = rows.norm(op, x, 1e-6, *follow)
        values = {"a": tensor(half), "y": tensor(wanted), **OF_ROW, "factor": 1.0 / columns, "scales": (scale, scale)}
        spec = [graph.NORM_OPS.index(op), *map(graph.FOLLOW_OPS.index, then), 0]
        same(*run(any_device.runtime, graph.NORM, (x, a, b, x, x), (x.size,), spec, **values, **NO_TURNS), wanted)


@pytest.mark.parametrize(("columns", "joined"), [(32, 1), (2336, 1), (128, 2)])
def test_norm_as_int8(any_device, columns, joined, rng):
    """joined: so many rows are one of the product's."""
    for edges in EDGES[::2]:
        x, weights = drawn(rng, (2, 3 + joined, columns), edges[:32]), drawn(rng, (1, 1, columns))
        wanted = rows.norm("rms", x, 1e-6, ("mul", weights))
        values = {"y": tensor(wanted), **OF_ROW, "factor": 1.0 / columns, "joined": joined}
        spec, given = [graph.NORM_OPS.index("rms"), graph.FOLLOW_OPS.index("mul"), 0], (x, weights, weights)
        wanted = wanted.reshape(-1, joined * columns)
        counts = (x.size, *quantized_sizes(wanted))
        got = run(any_device.runtime, graph.NORM_QUANTIZED, given, counts, spec, **values)
        same_as_int8(any_device.runtime, got, wanted)


@pytest.mark.one_driver("1e-06")
@pytest.mark.parametrize("eps", (0.0, 1e-6))
def test_norm_of_zeros_and_of_a_transposed_tensor(any_device, eps, rng):
    base = drawn(rng, (3, 70, 4))
    base[0], base[1] = 0, 2.0**-50 * rng.standard_normal((70, 4))  # whose squares are about 2**-100
    base[2, :, 0], base[2, 0, 0] = 0, 2.0**-99  # a mean that is flushed
    x = base.swapaxes(1, 2)
    for op in graph.NORM_OPS:
        wanted = np.ascontiguousarray(rows.norm(op, x, eps))
        values = {"x": tensor(x), "a": NONE, "b": NONE, "y": tensor(wanted), **OF_ROW, "eps": eps, "factor": 1 / 70}
        spec = [graph.NORM_OPS.index(op), 0, 0, 0]
        same(*run(any_device.runtime, graph.NORM, (base,) * 5, (x.size,), spec, **values, **NO_TURNS), wanted)


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 257), (1, 1, 70000), (2, 250, 2)])
def test_sums(any_device, shape, rng, monkeypatch):
    """Also of more rows than a grid has along x, here 99."""
    monkeypatch.setattr(declarations, "GRID_SIDE", 99)
    base = drawn(rng, (*shape[:-1], 2, shape[-1]))
    x = base[..., 0, :]  # a view: every second row
    n = shape[-1]
    for wanted, terms, factor in (
        (rows.sum_rows(x), n, 1.0),
        (rows.sum_rows(x, 1.0 / n), n, 1.0 / n),
        (rows.sum_rows(x.reshape(1, -1)), x.size, 1.0),
    ):
        values = {"x": tensor(x), "y": tensor(wanted), "terms": terms, "factor": factor}
        same(*run(any_device.runtime, graph.SUM_ROWS, (base,), (wanted.size,), **values), wanted)


MASKED = [  # shape of x, of the mask, its type, whether with sinks, max_bias
    ((1, 1, 3, 70), None, "none", 0, 0),
    ((2, 3, 2, 17), (1, 1, 2, 17), "f16", 1, 8.0),
    ((2, 6, 2, 17), (2, 3, 2, 17), "f32", 0, 8.0),
    ((1, 2, 1, 70000), (1, 1, 1, 70000), "f16", 1, 0),
]


@pytest.mark.one_driver("f16")
@pytest.mark.parametrize(("shape", "of_mask", "kind", "has_sinks", "max_bias"), MASKED)
def test_soft_max(any_device, shape, of_mask, kind, has_sinks, max_bias, rng):
    x = 5 * rng.standard_normal(shape, np.float32)
    if shape[-1] == 17:  # rows with a NaN, infinities and the largest numbers, and with a key alone
        x[0, 0, 0, :3], x[0, 0, 1, 1] = (np.nan, 1, 2), np.inf
        x[1, 0, 0, :], x[1, 0, 1, :3] = -np.inf, (-3e38, 1e-40, -0.0)
    mask = np.zeros(4, np.float32) if of_mask is None else rng.standard_normal(of_mask, np.float32)
    mask = mask.astype(np.float16 if kind == "f16" else np.float32)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    sinks = rng.standard_normal(shape[1], np.float32)
    sinks[1:2] = np.nan if shape[1] == 3 else 9
    alibi = rows.slopes(max_bias, shape[1])
    wanted = rows.soft_max(x, 0.7, None if kind == "none" else mask, sinks if has_sinks else None, **alibi)
    values = {"y": tensor(wanted), "sinks": 0, "scale": 0.7, **alibi}
    spec = [graph.MASK_TYPES.index(kind), has_sinks]
    same(*run(any_device.runtime, graph.SOFT_MAX, (x, mask, sinks), (x.size,), spec, **values), wanted)
