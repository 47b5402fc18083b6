"""q as attention reads it: rows of another length, in another order, small magnitudes as zeros."""

import numpy as np
import pytest

from zinc_attn.canonical.state import as_input
from zinc_attn.graph.declarations import FIT
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import run


@pytest.mark.parametrize(("dims", "filled"), ((40, 48), (64, 64), (5, 3)))
def test_fit(any_device, dims, filled, rng):
    x = rng.standard_normal((2, 3, 7, dims), np.float32) * np.exp2(rng.integers(-120, 40, dims)).astype(np.float32)
    x[0, 0, 0, :3] = -0.0, 2.0**-40, np.nan
    permuted = x.transpose(0, 2, 1, 3)
    want = np.zeros((*permuted.shape[:3], filled), np.float32)
    want[..., :dims] = as_input(permuted)[..., :filled]
    values = {"x": tensor(permuted), "y": tensor(want), "least": 2.0**-40}
    (got,) = run(any_device.runtime, FIT, (x,), (want.size,), **values)
    assert np.array_equal(got, want.reshape(-1).view(np.uint32))
