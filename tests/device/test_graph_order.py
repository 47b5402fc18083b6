"""ARGSORT and TOP_K: the oracle's indices, in one workgroup and by several passes."""

import numpy as np
import pytest

from zinc_attn.graph import order
from zinc_attn.graph.declarations import SORT, SORT_OPS, SORT_PIECE
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import POISON, run

EXECUTED = True


class Sorter:
    """Passes over rows of x (z, y, x, columns), which lies as given."""

    def __init__(self, device, x, descending):
        self.runtime, self.x, self.descending = device.runtime, x, int(descending)
        self.memory = x if x.base is None else x.base

    def pass_(self, op, y, count, ids=None, columns=SORT_PIECE, keep=SORT_PIECE, distance=0, mirror=False):
        """y (z, y, x, places) behind a pass; ids: candidates of sort_ids."""
        ids = np.zeros((1, 1, 1, 1), np.uint32) if ids is None else ids
        (got,) = run(
            self.runtime,
            SORT,
            (self.memory, ids),
            (y.reshape(-1),),
            (SORT_OPS.index(op), self.descending, columns),
            x=tensor(self.x),
            y=tensor(y),
            count=count,
            keep=keep,
            distance=distance,
            mirror=mirror,
        )
        return got.reshape(y.shape)

    def poisoned(self, columns):
        return np.full((*self.x.shape[:3], columns), POISON, np.uint32)

    def argsort(self):
        n = self.x.shape[-1]
        columns = min(1 << max(n - 1, 1).bit_length(), SORT_PIECE)
        y = self.pass_("sort", self.poisoned(n), n, columns=columns, keep=columns)
        half = SORT_PIECE
        while half < n:
            distance = half
            while distance >= SORT_PIECE:
                y = self.pass_("exchange", y, n, distance=distance, mirror=distance == half)
                distance //= 2
            y = self.pass_("merge", y, n)
            half *= 2
        return y

    def top_k(self, k):
        y, count = None, self.x.shape[-1]
        while y is None or count > k:
            pieces = -(-count // SORT_PIECE)
            left = (pieces - 1) * k + min(k, count - (pieces - 1) * SORT_PIECE)
            op = "sort" if y is None else "sort_ids"
            y = self.pass_(op, self.poisoned(left), count, y, keep=k)
            if count <= SORT_PIECE:
                break
            count = left
        return y


def values(rng, shape):
    """Ties, NaN of both signs, both zeros, infinities, and what float arithmetic may take for zero."""
    few = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40, 2, 3], np.float32)
    return np.where(rng.random(shape) < 0.5, rng.choice(few, shape), rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.one_driver("shape4-True", "shape1-False")
@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 700, 2), (1, 5, 1, 60), (2, 1, 3, 1025), (1, 1, 2, 9001)))
def test_argsort(any_device, rng, shape, descending):
    x = values(rng, (*shape[:3], shape[3] + 3))[..., : shape[3]]  # rows that do not touch
    assert np.array_equal(Sorter(any_device, x, descending).argsort(), order.argsort(x, descending))


@pytest.mark.one_driver
def test_argsort_of_many_columns(any_device, rng):
    x = values(rng, (1, 1, 1, 70_000))
    assert np.array_equal(Sorter(any_device, x, False).argsort(), order.argsort(x, False))


@pytest.mark.one_driver("40")
@pytest.mark.parametrize(("shape", "k"), (((1, 2, 3, 70), 8), ((1, 1, 2, 5000), 1000), ((1, 1, 3, 70_000), 40)))
def test_top_k(any_device, rng, shape, k):
    x = values(rng, shape)
    assert np.array_equal(Sorter(any_device, x, True).top_k(k), order.top_k(x, k))
