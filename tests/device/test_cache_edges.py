"""Calls at the edges of a submission: several blocks, limits of the grid, odd strides, rows of other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_rows import SMALL, Twin, grow, new_q, new_rows, together
from support import differing

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.planning import call, inputs

STATE_BYTES = 4 * SMALL.q_heads * (SMALL.head_dim + 2)


def same(got: Any, want: Any) -> bool:
    return not differing(got, want)


def makers(device: za.Device, *given: Any, **more: Any) -> list[Callable[..., tuple[Any, Any]]]:
    """A KVCache and a cache of two shards, each with its attention."""

    def one(**options: Any) -> tuple[Any, Any]:
        cache = za.KVCache(device, SMALL, *given, **more, **options)
        return cache, za.Attention(cache)

    def two(**options: Any) -> tuple[Any, Any]:
        cache = za.ShardedKVCache([device] * 2, SMALL, *given, **more, **options)
        return cache, za.ShardedAttention(cache)

    return [one, two]


def test_a_call_in_several_blocks_of_rows_has_the_same_bits(device, monkeypatch):
    runs, start = [], device.runtime.start
    monkeypatch.setattr(device.runtime, "start", lambda recording: (runs.append(1), start(recording)))
    with za.KVCache(device, SMALL, 2, 2048, "f16", 16) as cache:
        grow(cache, ((300, 40), (1, 1), (20, 20)))
        assert len(runs) == 6  # one submission per call and layer
        monkeypatch.setattr(inputs, "SCRATCH_BYTES", 64 * STATE_BYTES)
        runs.clear()
        grow(cache, ((300, 40), (1, 1), (20, 20)))
        assert len(runs) > 12


@pytest.mark.both_dispatchers
def test_steady_decode_of_a_batch_in_several_blocks(device, monkeypatch):
    """Every block but the first attends rows that the first submission appended."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 3 * STATE_BYTES)
    planned = []
    with za.KVCache(device, SMALL, 1, 4096, page_size=64) as cache:
        attention = za.Attention(cache, observer=lambda one, _: planned.append(len(one.rows)))
        twins = [Twin(attention, seed) for seed in range(3)]
        for one in twins:
            one.append(100)
        for count in (1, 1, 1, 2, 1):
            together(twins, [count] * 3)
    assert planned == [1] * 18  # a row has two states, of which a block holds three


def test_rounding_a_bucket_never_goes_beyond_a_limit(device, monkeypatch):
    """1,500 rows over 3 states each: the power of two above would be beyond the scratch that one call may have."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 5000 * STATE_BYTES)
    planned = []
    with za.KVCache(device, SMALL, 1, 2048, page_size=64) as cache:
        Twin(za.Attention(cache, observer=lambda one, _: planned.append(one))).step(1500, 1500)
    assert all(submission.key.states <= 5000 for submission in planned)


def test_a_prompt_longer_than_one_append(device, monkeypatch):
    monkeypatch.setattr(call, "UPLOAD_ROWS", 100)
    with za.KVCache(device, SMALL, 1, 512, page_size=64) as cache:
        one = Twin(za.Attention(cache))
        one.step(300, 2)
        monkeypatch.setattr(call, "UPLOAD_ROWS", 1)
        both = [one, one.fork()]
        for _ in range(3):  # a batch of more new rows than that, step after step
            together(both, (1, 1))


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
def test_rows_in_any_memory_order(device, rng, dtype):
    k = np.rint(rng.standard_normal((70, SMALL.kv_heads, SMALL.head_dim)) * 4).astype(np.float16)
    q = new_q(rng, 1, SMALL)
    want = reference.emulate(q, *rows.stored(k, -k, dtype))[0]
    with za.KVCache(device, SMALL, 1, 256, dtype=dtype, page_size=64) as cache:
        for order in (np.asfortranarray, lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2), lambda x: x[::-1][::-1]):
            sequence, attention = cache.new_sequence(), za.Attention(cache)
            attention(np.asfortranarray(q), sequence, 0, k=order(k)[:69], v=order(-k)[:69])
            assert same(attention(q, sequence, 0, k=order(k)[69], v=order(-k)[69]), want)
            sequence.free()


def test_the_last_tokens_are_taken_back(device):
    """Speculative tokens: what is left has the bits of a sequence that never had them, within a step, too."""
    for make in makers(device, 2, 1024, page_size=16):
        cache, attention = make()
        with cache:
            one = Twin(attention)
            one.append(60)
            one.sequence.drop_last(0)
            one.sequence.drop_last(3)
            cache.append(one.sequence, 0, *new_rows(one.rng, 2, SMALL, "f16"))  # layer 1 is behind
            one.sequence.drop_last(5)
            assert list(one.sequence.lengths) == [52, 52]
            one.truncate(52)
            one.look()
            for n in (-1, 53, True, 2.5, None):
                with pytest.raises(errors.ArgumentError, match=f"^n: got {n}, expected"):
                    one.sequence.drop_last(n)
            one.sequence.drop_last(52)
            assert len(one) == 0
            one.sequence.free()
            with pytest.raises(errors.ClosedError, match=r"^sequence: used after free\(\)$"):
                one.sequence.drop_last(1)
        with pytest.raises(errors.ClosedError, match=r"used after close\(\)$"):
            one.sequence.drop_last(1)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "q8_0"))
def test_bfloat16_rows_of_ml_dtypes_and_torch(device, rng, dtype):
    """They are the rows of the same values in float32, and so are q and the arrays of a call without a cache."""
    torch = pytest.importorskip("torch")
    drawn = new_q(rng, 1, SMALL)[0], *new_rows(rng, 70, SMALL, "f32")
    given = [x.astype(ml_dtypes.bfloat16) for x in drawn]
    wide = [x.astype(np.float32) for x in given]
    tensors = [torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for x in given]
    with (
        za.KVCache(device, SMALL, 1, 512, dtype, page_size=16) as cache,
        za.KVCache(device, SMALL, 1, 512, "f16", page_size=16) as narrow,
    ):
        attention = za.Attention(cache)
        for attend in (
            lambda q, k, v: attention(q, cache.new_sequence(), 0, k=k, v=v),
            lambda q, k, v: za.attention(q, k, v, device=device),
            lambda q, k, v: za.attention(*wide, device=device, sinks=q[:, 0]),
            lambda q, k, v: reference.emulate(q, k, v)[0],
        ):
            want = attend(*wide)
            assert same(attend(*given), want) and same(attend(*tensors), want)
        with pytest.raises(errors.DTypeError, match=r"^k: got dtype bfloat16, a f16 cache takes float16; "):
            narrow.append(narrow.new_sequence(), 0, tensors[1], tensors[2])


@pytest.mark.parametrize(("dtype", "narrow"), (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)))
def test_float32_rows_are_rounded_on_request(any_device, rng, dtype, narrow):
    """The bits are those of rows that the caller rounds, subnormal float16 values among them."""
    q, (k, v) = new_q(rng, 1, SMALL), new_rows(rng, 70, SMALL, "f32")
    v[::3] *= np.float32(2.0**-18)
    tensor = pytest.importorskip("torch").from_numpy(k)
    want = reference.emulate(q, k.astype(narrow), v.astype(narrow))[0]
    for make in makers(any_device, 1, 512, dtype, 16):
        cache, attention = make(round_rows=True)
        with cache:
            for rows_k, rows_v in ((k, v), (tensor, v), (k.astype(narrow), v)):
                sequence = cache.new_sequence()
                cache.append(sequence, 0, rows_k[:60], rows_v[:60])
                assert same(attention(q, sequence, 0, k=rows_k[60:], v=rows_v[60:]), want)
        cache, _ = make()
        with cache, pytest.raises(errors.ArgumentError, match=r"a cache made with round_rows=True rounds"):
            cache.append(cache.new_sequence(), 0, k, v)


def test_numpy_integers_are_ints(device):
    plan = za.plan_splits(np.uint32(5000), SMALL, np.int64(64), q_len=np.int32(2))
    assert plan == za.plan_splits(5000, SMALL, 64, q_len=2) and plan.fingerprint()
    with za.KVCache(device, SMALL, 1, np.uint32(5000)) as cache:
        assert cache.capacity == 5000 and cache.free_tokens == 5120
