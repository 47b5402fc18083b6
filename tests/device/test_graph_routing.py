"""Routers and sums of experts: the bits of the oracles' operations one after another."""

import numpy as np
import pytest
from graph_harness import quantized_sizes, same, same_as_int8

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import routing
from zinc_attn.graph import rows as of_rows
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import POISON, run

EXECUTED = True
FEW = np.array([0.0, -0.0, 1, 1, -1, 1e-40, -3e-38, np.inf, -np.inf, np.nan, 90, -90], np.float32)  # ties, too


def logits(rng, rows, experts):
    """The last rows have numbers of FEW, and nothing but one number."""
    x = 3 * rng.standard_normal((rows, experts), np.float32)
    x[rows // 2 :] = np.where(rng.random(x[rows // 2 :].shape) < 0.6, rng.choice(FEW, x[rows // 2 :].shape), 0.5)
    if rows > 2:
        x[-1], x[-2] = -np.inf, 2.0
    return x


@pytest.mark.one_driver("soft_max", "sigmoid-5-600-10")
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 128, 8), (9, 7, 7), (5, 600, 10), (3, 1, 1), (4, 257, 256)])
@pytest.mark.parametrize("gate", graph.GATE_OPS)
def test_route(any_device, rng, gate, rows, experts, k):
    x = logits(rng, rows, experts)
    bias = rng.standard_normal((1, experts), np.float32)
    base = np.zeros((rows, experts + 3), np.float32)  # rows that do not touch
    base[:, :experts] = x
    for norm, clamp, biased, scale in (
        ("none", (0, 0), False, None),
        ("sum", (6.103515625e-5, np.inf), False, None),
        ("sum", (0.2, 0.6), True, (2.5, 0.0)),
        ("soft_max", (0, 0), True, (1.5, 0.25)),
    ):
        ids, weights = routing.route(x, k, gate, bias if biased else None, norm, clamp, scale)
        values = {"x": tensor(base[:, :experts]), "bias": tensor(np.broadcast_to(bias, x.shape))}
        values |= {"ids": tensor(ids), "y": tensor(weights)}
        values |= dict(zip(("least", "most", "factor", "added"), (*clamp, *(scale or (0.0, 0.0))), strict=True))
        spec = graph.GATE_OPS.index(gate), int(biased), graph.ROUTE_NORM_OPS.index(norm), int(scale is not None)
        got = run(any_device.runtime, graph.ROUTE, (base, bias), (x.size, weights.size), spec, **values)
        result = got[0].view(np.int32)[: x.size].reshape(x.shape)  # ids are the first k of ARGSORT's rows
        assert np.array_equal(result[:, :k], ids)
        assert (result[:, k:].view(np.uint32) == POISON).all()
        same(got[1], weights)


@pytest.mark.one_driver("70-4", "2-300")
@pytest.mark.parametrize(
    ("rows", "experts", "elements", "added"), [(1, 8, 96, 2), (3, 1, 1, 1), (70, 4, 33, 0), (2, 300, 288, 1)]
)
def test_sum_experts(any_device, rng, rows, experts, elements, added):
    """Alone, and as what a norm makes first."""
    x = rng.standard_normal((rows, experts, elements), np.float32)
    weights = rng.standard_normal((rows, experts, 1), np.float32)
    x[0, 0, :1], weights[-1, -1], x.reshape(-1)[-1:] = np.inf, 1e-31, 3e-3  # a product that is flushed
    plus, more = rng.standard_normal((2, rows, elements), np.float32)
    wanted, runtime = routing.sum_experts(x, weights, *(plus, more)[:added]), any_device.runtime
    operands = x, weights, plus, more
    same(*run(runtime, graph.SUM_EXPERTS, operands, (wanted.size,), [added], added=(0, 0), y=tensor(wanted)), wanted)
    if elements % 32:
        return
    of_row = rng.standard_normal((1, elements), np.float32)
    normed = of_rows.norm("rms", wanted, 1e-6, ("mul", of_row))
    values = {"x": tensor(wanted), "b": tensor(of_row), "y": tensor(normed), "added": (0, 0)}
    values |= {"eps": 1e-6, "factor": 1.0 / elements, "scales": (0, 0), "joined": 1}
    operands, counts = (of_row, more, x, weights, plus), (wanted.size, wanted.size, *quantized_sizes(normed))
    total, *int8 = run(runtime, graph.NORM_SUMMED, operands, counts, [0, 1, 0, added], **values)
    same(total, wanted)
    same_as_int8(runtime, int8, normed)
