"""The oracles: float64 attention against the formula, float32 emulation against float64, and states that merge."""

import time

import numpy as np
import pytest
from support import FULL, make_inputs, same

import zinc_attn as za
from zinc_attn import AttnShape
from zinc_attn import reference as ref
from zinc_attn.errors import DTypeError, ShapeError, ValueRangeError
from zinc_attn.planning.arithmetic import EXACT

SHAPES = "16/2/256 32/4/128 64/8/64 9/3/64 8/2/80 7/1/112 10/2/192 5/1/512"  # test_grid.py has the others
CONTEXTS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000)
SPREAD = {"normal": (1.0, 1e-6), "sharp": (8.0, 4e-6)}  # of scores, and what the error of out is then bounded by
LONG = 4096  # tokens, for shapes of one or two KV heads, and with --full for all


def inputs(text, tokens, kind="normal", dtype="f16"):
    return make_inputs(AttnShape.parse(text), tokens, dtype, kind)


def check_accuracy(shape, tokens, kind):
    """Relative L2 of out; lse within 3e-7 of max(4 spread, |lse|): a dot product's rounding grows with its terms.

    Returns the seconds that emulate took, with --full in arithmetic fused.
    """
    (spread, bound), (q, k, v) = SPREAD[kind], inputs(shape, tokens, kind)
    true_out, true_lse = ref.attention(q, k, v)
    for arithmetic in EXACT if FULL else EXACT[:1]:
        started = time.monotonic()
        out, lse = ref.emulate(q, k, v, arithmetic=arithmetic)
        seconds = time.monotonic() - started
        assert np.linalg.norm(out - true_out) <= bound * np.linalg.norm(true_out)
        assert np.all(np.abs(lse - true_lse) <= 3e-7 * np.maximum(4 * spread, np.abs(true_lse)))
    return seconds


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("shape", SHAPES.split())
def test_accuracy_against_float64(shape, kind):
    longest = (LONG,) if FULL or shape.split("/")[1] in ("1", "2") else ()
    for context in (*CONTEXTS, *longest):
        check_accuracy(shape, context, kind)


@pytest.mark.parametrize(
    ("shape", "kind"), [("2/1/64", "sharp"), *[("8/1/256", "normal"), ("16/2/256", "sharp")] * FULL]
)
def test_accuracy_and_time_at_131072_keys(shape, kind):
    assert check_accuracy(shape, 131072, kind) < 60


SINKS = np.linspace(-150, 150, 9, dtype=np.float32) ** 3 / 2e4  # from far below to far above every score
OPTIONS = ({"window": 1}, {"window": 128}, {"softcap": 50.0, "scale": 0.3}, {"alibi": np.exp2(-np.arange(9.0))})


@pytest.mark.parametrize("options", (*OPTIONS, {"window": 200, "softcap": 30.0, "sinks": SINKS, "scale": 1.7}), ids=str)
def test_accuracy_of_options(rng, options):
    for tokens, rows in ((5, 9), (65, 1), (700, 3)):
        k, v = rng.standard_normal((2, tokens, 3, 64), np.float32).astype(np.float16)
        q = rng.standard_normal((rows, 9, 64), np.float32) * 8
        (out, lse), (exact, exact_lse) = (oracle(q, k, v, **options) for oracle in (ref.emulate, ref.attention))
        seen = np.isfinite(exact_lse)
        assert np.abs(out - exact).max() <= 2e-5 * max(1.0, np.abs(v).max()), tokens
        assert np.abs(lse[seen] - exact_lse[seen]).max() <= 6e-7 * max(4.0, np.abs(exact_lse[seen]).max()), tokens


def test_float64_is_the_formula():
    """Softmax of scores, head by head, also where the largest score is 200 above all others."""
    q, k, v = (x.astype(np.float64) for x in inputs("6/2/16", 100, dtype="f32"))
    k[17, 1] = q[3] / (q[3] @ q[3]) * 200 * 4
    out, lse = ref.attention(q, k, v)
    for head in range(6):
        scores = k[:, head // 3] @ q[head] / 4
        weights = np.exp(scores - scores.max())
        assert np.allclose(out[head], weights @ v[:, head // 3] / weights.sum(), rtol=1e-12)
        assert np.isclose(lse[head], scores.max() + np.log(weights.sum()), rtol=1e-14)


def test_logits_of_200_of_either_sign():
    """All of some heads are -200: the state of no keys, with which sums begin, is far below."""
    q, k, v = inputs("4/2/64", 600, "extreme")
    (out, lse), (exact, exact_lse) = ref.emulate(q, k, v), ref.attention(q, k, v)
    assert np.abs(out - exact).max() <= 2e-5 and np.abs(lse - exact_lse).max() <= 6e-7 * np.abs(exact_lse).max()


def test_no_key_gives_zero_and_minus_infinity():
    q, k, v = inputs("4/2/64", 0)
    for out, lse in (ref.emulate(q, k, v), ref.attention(q, k, v)):
        assert not out.any() and np.all(np.isneginf(lse))


@pytest.mark.parametrize("dtype", (np.float16, np.float32, np.float64))
@pytest.mark.parametrize("bad", (np.inf, -np.inf, np.nan))
@pytest.mark.parametrize("name", ("q", "k", "v", "sinks", "alibi", "mask_slopes"))
def test_numbers_that_are_refused(name, bad, dtype):
    arrays = dict(zip("qkv", inputs("4/2/16", 5), strict=True)) | {
        name: np.zeros(4) for name in ("sinks", "alibi", "mask_slopes")
    }
    arrays[name] = arrays[name].astype(dtype)
    ref.attention(**arrays)
    arrays[name].reshape(-1)[1] = bad
    oracles = (ref.attention,) if dtype == np.float64 and name in "qkv" else (ref.attention, ref.emulate)
    for oracle in oracles:
        with pytest.raises(ValueRangeError, match=f"^{name}: got a NaN, an infinity or a magnitude beyond"):
            oracle(**arrays)


def test_slopes_of_masks(rng):
    """A slope of 1 is none, and ALiBi's slope is that of a mask of distances."""
    (q, k, v), slopes = inputs("4/2/16", 70), np.exp2(-np.arange(1.0, 5.0)).astype(np.float32)
    mask = np.where(rng.random((1, 70)) < 0.3, -np.inf, rng.standard_normal((1, 70))).astype(np.float32)
    same(ref.emulate(q, k, v, mask=mask, mask_slopes=np.ones(4)), ref.emulate(q, k, v, mask=mask))
    distance = np.arange(-69, 1, dtype=np.float32)[None]
    for oracle in (ref.emulate, ref.attention):
        same(oracle(q, k, v, mask=distance, mask_slopes=slopes), oracle(q, k, v, alibi=slopes))


def split_states(rng, parts):
    q = rng.standard_normal((4, 64), np.float32)
    k, v = (rng.standard_normal((90, 2, 64), np.float32) for _ in range(2))
    pieces = [ref.attention(q, k[r], v[r]) for r in np.array_split(np.arange(90), parts)]
    return ref.attention(q, k, v), pieces


@pytest.mark.parametrize("parts", (1, 2, 5, 90, 95))
def test_states_of_any_partition_merge_to_the_whole(rng, parts):
    (out, lse), pieces = split_states(rng, parts)
    v, s = (np.stack(arrays)[None] for arrays in zip(*pieces, strict=True))
    result = [za.merge_states(v, s), *([za.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])] if parts == 2 else [])]
    for got_v, got_s in result:
        assert got_v.dtype == got_s.dtype == np.float32
        assert np.allclose(got_v[0], out, rtol=1e-6, atol=1e-7) and np.allclose(got_s[0], lse, rtol=1e-6)


def test_extreme_lse_do_not_overflow():
    """Two empty states make an empty one; a partition of more parts than keys has empty ones beside others."""
    v, s = za.merge_states(np.zeros((1, 2, 1, 8)), np.full((1, 2, 1), -np.inf))
    assert not v.any() and np.all(np.isneginf(s))
    v = np.stack([np.ones((1, 8)), 3 * np.ones((1, 8))])[None]
    got, s = za.merge_states(v, np.array([[[1e4], [-1e4]]]))
    assert np.array_equal(got, np.ones((1, 1, 8), np.float32)) and s == 1e4
    for pair in ((v * 1e39, np.zeros((1, 2, 1))), (v, np.full((1, 2, 1), -1e39)), (v, np.full((1, 2, 1), np.nan))):
        with pytest.raises(ValueRangeError, match=r"^v, s: got a NaN, an infinity or a number that float32"):
            za.merge_states(*pair)


UNEQUAL = [  # shapes of v and s, or of v_a, s_a, v_b and s_b
    ([(1, 2, 3), (1, 2, 3)], ShapeError, "v: got shape (1, 2, 3), expected (seq, n, heads, head_dim)"),
    ([(1, 2, 3, 4), (1, 2, 4)], ShapeError, "s: got shape (1, 2, 4), expected v's first three axes (1, 2, 3)"),
    ([(1, 0, 3, 4), (1, 0, 3)], ShapeError, "v: got shape (1, 0, 3, 4), expected at least one state (axis n)"),
    ([(1, 2, 8), (1, 2), (1, 3, 8), (1, 2)], ShapeError, "v_b: got shape (1, 3, 8), expected v_a's (1, 2, 8)"),
]


@pytest.mark.parametrize(("shapes", "error", "message"), UNEQUAL)
def test_states_that_do_not_fit(shapes, error, message):
    call = za.merge_states if len(shapes) == 2 else za.merge_state
    with pytest.raises(error) as caught:
        call(*map(np.zeros, shapes))
    assert str(caught.value) == message


def test_integers_are_no_states():
    with pytest.raises(DTypeError, match=r"^v: got dtype int64, expected float16, float32, float64 or bfloat16$"):
        za.merge_states(np.zeros((1, 2, 3, 4), int), np.zeros((1, 2, 3)))
