"""Masks, ALiBi and attention that is not causal: steady decode, shared keys, calls without a cache, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache_rows import filled
from numpy.typing import NDArray
from support import FULL, same

import zinc_attn as za
from zinc_attn import errors, reference

NATIVE = True
SHAPE = za.AttnShape(6, 2, 64)
SLOPES = np.exp2(-np.arange(1, 7)).astype(np.float32)
RNG = np.random.default_rng(3)
N = 1300
K, V = (RNG.standard_normal((N, 2, 64), dtype=np.float32).astype(np.float16) for _ in "kv")
Q = RNG.standard_normal((5, 6, 64), dtype=np.float32)


def random_mask(rows: int, keys: int) -> NDArray[np.float32]:
    values = RNG.standard_normal((rows, keys)).astype(np.float32)
    return np.where(RNG.random((rows, keys)) < 0.4, np.float32(-np.inf), values)


def test_steady_decode_moves_the_rows_position(device):
    """Calls that are patched, not planned, over the end of a leaf; and a masked one between them."""
    with filled(device, SHAPE, K[:120], V[:120]) as (cache, seq):
        attn = za.Attention(cache, alibi=SLOPES)
        for n in range(121, 133):
            mask = random_mask(1, n) if n == 125 else None
            got = attn(Q[0], seq, 0, K[n - 1 : n], V[n - 1 : n], return_lse=True, mask=mask)
            same(got, reference.emulate(Q[0], K[:n], V[:n], alibi=SLOPES, mask=mask), n)


def test_rows_that_share_keys_have_masks_and_positions_of_their_own(device):
    """Calls that are planned, and then calls that are patched."""
    with filled(device, SHAPE, K[:900], V[:900]) as (cache, seq):
        attn = za.Attention(cache, cascade=True, alibi=SLOPES)
        seqs = [seq, *(seq.fork() for _ in range(3))]
        for step, rows in enumerate(((5, 5, 5, 3), *[(1, 1, 1, 1)] * 3)):
            ends = [len(one) + n for one, n in zip(seqs, rows, strict=True)]
            masks = [None] * 4
            if step < 2:
                masks[1:] = [random_mask(n, keys) for n, keys in zip(rows[1:], (*ends[1:3], 80), strict=True)]
            qs, new = [Q[:n] for n in rows], [K[end - n : end] for end, n in zip(ends, rows, strict=True)]
            outs, lses = attn(qs, seqs, 0, new, new, return_lse=True, mask=masks, allow_empty=True)
            assert attn.shared
            for q, mask, end, *got in zip(qs, masks, ends, outs, lses, strict=True):
                k, v = (np.concatenate([x[:900], K[900:end]]) for x in (K, V))
                same(got, reference.emulate(q, k, v, mask=mask, alibi=SLOPES), (step, end))


def test_of_one_call(any_device):
    """Without a cache, and submitted: bool and float16 masks, all hidden, not causal."""
    hidden = random_mask(5, 130) > 0
    hidden[2] = False
    options = {"alibi": SLOPES, "softcap": 8.0, "mask_slopes": SLOPES[::-1] - 0.2, "sinks": 9 * SLOPES}
    calls = (hidden, True), (random_mask(5, 70).astype(np.float16), False), (None, False)
    for mask, causal in calls[: 2 if "SwiftShader" in any_device.info.name and not FULL else 3]:
        want = reference.emulate(Q, K[:130], V[:130], mask=mask, causal=causal, **options)
        call = {"mask": mask, "causal": causal, "return_lse": True, "allow_empty": True}
        same(za.attention(Q, K[:130], V[:130], any_device, **options, **call), want)
        with za.KVCache(any_device, SHAPE, 1, 256, "f16", 64) as cache:
            attn, seq = za.Attention(cache, **options), cache.new_sequence()
            same(attn.submit(Q, seq, 0, K[:130], V[:130], **call).result(), want)


@pytest.mark.of_drivers
@pytest.mark.parametrize("causal", (True, False))
def test_rows_before_the_first_key_have_negative_positions(device, causal):
    """Their distances are in the lse, and next to a sink in the output."""
    options = {"alibi": SLOPES, "sinks": np.linspace(-2, 2, 6, dtype=np.float32)}
    call = {"causal": causal, "return_lse": True, "allow_empty": True}
    for n in (0, 3):
        want = reference.emulate(Q, K[:n], V[:n], causal=causal, **options)
        same(za.attention(Q, K[:n], V[:n], device, **options, **call), want)
    with za.KVCache(device, SHAPE, 1, 256, "f16", 64) as cache:
        same(za.Attention(cache, **options)(Q, cache.new_sequence(), 0, K[:3], V[:3], **call), want)


BEHIND = np.ones((5, 130), bool)
BEHIND[2, :128] = False  # row 2 is at position 127
OUTSIDE = np.zeros((5, 130), bool)
OUTSIDE[:, :100] = True
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (np.ones((4, 9), bool), errors.ShapeError, r"mask: got shape \(4, 9\), expected \(5, n\)"),
    "keys": (np.ones((5, 131), bool), errors.ShapeError, "of which there are 130"),
    "axes": (np.ones(5, bool), errors.ShapeError, r"mask: got shape \(5,\), expected \(5, n\)"),
    "dtype": (np.ones((5, 9), np.int32), errors.DTypeError, "mask"),
    "NaN": (np.full((5, 9), np.nan, np.float32), errors.ValueRangeError, "mask: got a NaN"),
    "plus infinity": (np.full((5, 9), np.inf, np.float32), errors.ValueRangeError, r"mask: got a NaN, \+inf or"),
    "hides all": (np.zeros((5, 130), bool), errors.ArgumentError, "mask: row 0 sees no key"),
    "hides all that is before": (BEHIND, errors.ArgumentError, "mask: row 2 sees no key"),
    # the mask leaves the keys before it, which the window does not reach
    "shows what a window hides": (OUTSIDE, errors.ArgumentError, "mask: row 0 sees no key"),
    "hides a window": (np.zeros((5, 20), bool), errors.ArgumentError, "mask: row 4 sees no key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_masks_leave_the_cache_as_it_was(device, name):
    mask, error, text = REFUSED[name]
    window = 20 if "window" in name else None
    with filled(device, SHAPE, K[:125], V[:125]) as (cache, seq):
        attn = za.Attention(cache, window=window)
        calls: list[Callable[[], Any]] = [
            lambda: attn(Q, seq, 0, K[125:130], V[125:130], mask=mask),
            lambda: attn.submit(Q, seq, 0, K[125:130], V[125:130], mask=mask),
            lambda: za.attention(Q, K[:130], V[:130], device, mask=mask, window=window),
        ]
        for call in calls:
            with pytest.raises(error, match=text):
                call()
        assert len(seq) == 125
        if name == "hides a window":
            assert np.any(za.Attention(cache, window=25)(Q, seq, 0, K[125:130], V[125:130], mask=mask))
