"""merge_state and merge_states on normalized states."""

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.errors import DTypeError, ShapeError


def split_states(rng, parts):
    q = rng.standard_normal((4, 64), np.float32)
    k, v = (rng.standard_normal((90, 2, 64), np.float32) for _ in range(2))
    pieces = [za.reference.attention(q, k[r], v[r]) for r in np.array_split(np.arange(90), parts)]
    return za.reference.attention(q, k, v), pieces


@pytest.mark.parametrize("parts", (1, 2, 5, 90, 95))
def test_states_of_any_partition_merge_to_the_whole(rng, parts):
    (out, lse), pieces = split_states(rng, parts)
    v, s = (np.stack(one)[None] for one in zip(*pieces, strict=True))
    found = [za.merge_states(v, s), *([za.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])] if parts == 2 else [])]
    for got_v, got_s in found:
        assert got_v.dtype == got_s.dtype == np.float32
        assert np.allclose(got_v[0], out, rtol=1e-6, atol=1e-7) and np.allclose(got_s[0], lse, rtol=1e-6)


def test_empty_states_change_nothing(rng):
    _, ((va, sa), _) = split_states(rng, 2)
    va, sa = va.astype(np.float32), sa.astype(np.float32)
    zero, minus = np.zeros_like(va), np.full_like(sa, -np.inf)
    for v, s in (
        za.merge_state(va[None], sa[None], zero[None], minus[None]),
        za.merge_state(zero[None], minus[None], va[None], sa[None]),
    ):
        assert np.array_equal(v[0], va) and np.allclose(s[0], sa, rtol=1e-7)
    v, s = za.merge_state(zero[None], minus[None], zero[None], minus[None])
    assert not v.any() and np.all(np.isneginf(s))


def test_extreme_lse_do_not_overflow():
    v = np.stack([np.ones((1, 8)), 3 * np.ones((1, 8))])[None]
    got, s = za.merge_states(v, np.array([[[1e4], [-1e4]]]))
    assert np.array_equal(got, np.ones((1, 1, 8), np.float32)) and s == 1e4


REFUSED = [  # shapes of v and s, or of v_a, s_a, v_b and s_b
    ([(1, 2, 3), (1, 2, 3)], ShapeError, "v: got shape (1, 2, 3), expected (seq, n, heads, head_dim)"),
    ([(1, 2, 3, 4), (1, 2, 4)], ShapeError, "s: got shape (1, 2, 4), expected v's first three axes (1, 2, 3)"),
    ([(1, 0, 3, 4), (1, 0, 3)], ShapeError, "v: got shape (1, 0, 3, 4), expected at least one state (axis n)"),
    ([(1, 2, 8), (1, 2), (1, 3, 8), (1, 2)], ShapeError, "v_b: got shape (1, 3, 8), expected v_a's (1, 2, 8)"),
]


@pytest.mark.parametrize(("shapes", "error", "message"), REFUSED)
def test_refusals(shapes, error, message):
    call = za.merge_states if len(shapes) == 2 else za.merge_state
    with pytest.raises(error) as caught:
        call(*map(np.zeros, shapes))
    assert str(caught.value) == message


def test_integers_are_refused():
    with pytest.raises(DTypeError, match=r"^v: got dtype int64, expected float16, float32, float64 or bfloat16$"):
        za.merge_states(np.zeros((1, 2, 3, 4), int), np.zeros((1, 2, 3)))
