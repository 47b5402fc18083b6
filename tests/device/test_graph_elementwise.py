"""Operations element by element: the oracle's bits."""

import numpy as np
import pytest
from graph_harness import run

from zinc_attn.graph import declarations, elementwise
from zinc_attn.graph.records import tensor


@pytest.mark.parametrize("op", ("add", "sub", "mul"))
@pytest.mark.parametrize(("shape", "repeated"), (((1, 1, 3, 70), (1, 1, 1, 70)), ((2, 3, 4, 5), (1, 3, 1, 1))))
def test_binary(any_device, op, shape, repeated, rng):
    a, b = rng.standard_normal(shape, np.float32), rng.standard_normal(repeated, np.float32)
    groups = (-(-a.size // 256), 1, 1)
    spec = [declarations.BINARY_OPS.index(op), 0, 0, 0]
    values = {"a": tensor(a), "b": tensor(b), "y": tensor(a)}
    (got,) = run(any_device.runtime, declarations.BINARY, groups, (a, b), (a.size,), spec, **values)
    assert np.array_equal(got, elementwise.binary(op, a, b).reshape(-1).view(np.uint32))
