"""Products of experts: the oracle's bits, however the columns come to their matrices."""

import numpy as np
import pytest
from device.test_graph_products import activations, weights
from graph_harness import same

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import products
from zinc_attn.graph.elementwise import encoded
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph import device as on_device
from zinc_attn.tools.graph.device import POISON, OnDevice, run
from zinc_attn.tools.graph.model import Matrix
from zinc_attn.tools.graph.oracle import Oracle


def matrices(kind, experts, rows, k, rng):
    shape = experts, rows, k
    raw = weights(kind, (1, *shape), rng) if kind in TYPES else encoded(rng.standard_normal(shape, np.float32), kind)
    return Matrix(kind, np.ascontiguousarray(raw).reshape(experts * rows, -1).view(np.uint8), k, experts)


def routes(tokens, slots, experts, rng):
    """ids (tokens, slots): each token's differ; none takes expert 0, half take 1."""
    ids = np.argsort(rng.random((tokens, experts - 1)), -1)[:, :slots].astype(np.int32) + 1
    ids[::2, 0] = 1
    return ids


def products_are_the_oracles(device, monkeypatch, w, x, ids, added=None):
    """By the kernels for few rows of x, and by tiles or matrix units."""
    expected = Oracle().product(w, x, None, ids)
    expected = expected if added is None else products.add(expected, added)
    for few in (len(x), 0):
        monkeypatch.setattr(on_device, "FEW", few)
        words = OnDevice(device).product(w, x, added, ids).view(np.uint32).reshape(-1)
        assert (words != POISON).all()
        same(words, expected)
    return expected


# The code of experts is one; that of each type is test_graph_products', and check --graph has experts on gfx1201.
@pytest.mark.one_driver("q6_K", default=("q4_0", "q8_0", "mxfp4", "q2_K", "q6_K"))
@pytest.mark.parametrize("kind", TYPES)
@np.errstate(all="ignore")
def test_types(any_device, kind, rng, monkeypatch):
    """48 rows; a short last superblock where there is one; an id after the last expert, and one below 0."""
    k, experts = 512 if TYPES[kind].values == 256 else 320, 4
    w, x = matrices(kind, experts, 48, k, rng), activations((1, 10, k), rng).reshape(5, 2, k)
    ids = routes(5, 2, experts, rng)
    ids[1], ids[2, 1], ids[3, 0] = (2, 2), experts, -1
    expected = products_are_the_oracles(any_device, monkeypatch, w, x, ids)
    assert np.isnan(expected[2, 1]).all() and np.isfinite(expected[1:3, 0]).any()


CASES = (  # tokens, slots, rows of x of a token, experts, and the most in a dispatch
    (1, 8, 1, 32, 32),
    (1, 3, 3, 128, 50),
    (7, 4, 2, 5, 2),
    (600, 2, 1, 3, 3),
)


@pytest.mark.one_driver
@pytest.mark.parametrize("kind", ("q4_K", "bf16"))
@pytest.mark.parametrize(("tokens", "slots", "x_slots", "experts", "most"), CASES)
@np.errstate(all="ignore")
def test_shapes(any_device, kind, tokens, slots, x_slots, experts, most, rng, monkeypatch):
    """With a sum, and where all tokens take one expert, a token even twice."""
    rows, k = (16, 256) if kind in TYPES else (35, 320)
    w, x = matrices(kind, experts, rows, k, rng), rng.standard_normal((tokens, x_slots, k), np.float32)
    monkeypatch.setattr(on_device, "BOUND", w.rows.size // experts * most)
    ids, added = routes(tokens, slots, experts, rng), rng.standard_normal((tokens, slots, rows), np.float32)
    products_are_the_oracles(any_device, monkeypatch, w, x, ids, added)
    products_are_the_oracles(any_device, monkeypatch, w, x, np.full_like(ids, experts - 1))


LISTS = (1, 1, 1, 16), (70, 10, 300, 16), (9, 2, 1024, 1)


@pytest.mark.one_driver
@pytest.mark.parametrize(("tokens", "slots", "experts", "columns"), LISTS)
def test_lists(any_device, tokens, slots, experts, columns, rng):
    """Of ids that are a view, as ARGSORT's first are."""
    whole = rng.integers(-1, experts + 1, (tokens, slots + 3)).astype(np.int32)
    ids = whole[:, :slots]
    tiles = min(ids.size, experts + 1 + ids.size // columns)
    of = {"ids": tensor(ids), "experts": experts, "columns": columns, "tiles": tiles}
    (words,) = run(any_device.runtime, graph.BY_EXPERT, (whole,), (tiles * (columns + 1),), **of)
    same(words, products.by_expert(ids, experts, columns))
    pairs = words[tiles:][words[tiles:] < tokens * slots]
    assert sorted(pairs[: tokens * slots]) == [*range(tokens * slots)]
