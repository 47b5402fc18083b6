"""ARGSORT and TOP_K in a workgroup: the oracle's indices. test_ggml.py has the rows that take several passes."""

import numpy as np
import pytest

from zinc_attn.graph import order
from zinc_attn.graph.declarations import SORT, SORT_OPS, SORT_PIECE
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import POISON, run

EXECUTED = True


def values(rng, shape):
    """Ties, NaN of both signs, both zeros, infinities, and what float arithmetic may take for zero."""
    few = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40, 2, 3], np.float32)
    return np.where(rng.random(shape) < 0.5, rng.choice(few, shape), rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.one_driver("shape3-True", "shape1-False")
@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 700, 2), (1, 5, 1, 60), (2, 1, 3, 1025)))
def test_argsort(any_device, rng, shape, descending):
    """And TOP_K, whose k are the first."""
    whole, n = values(rng, (*shape[:3], shape[3] + 3)), shape[3]
    x = whole[..., :n]  # rows that do not touch
    columns = min(1 << max(n - 1, 1).bit_length(), SORT_PIECE)
    for kept in n, (n + 1) // 2:
        y, sizes = np.full((*shape[:3], kept), POISON, np.uint32), {"count": n, "distance": 0, "mirror": False}
        sizes |= {"keep": columns if kept == n else kept}
        spec = SORT_OPS.index("sort"), int(descending), columns
        (got,) = run(
            *(any_device.runtime, SORT, (whole, np.zeros(1, np.uint32)), (y.reshape(-1),), spec),
            **{"x": tensor(x), "y": tensor(y), **sizes},
        )
        assert np.array_equal(got.reshape(y.shape), order.argsort(x, descending)[..., :kept])
