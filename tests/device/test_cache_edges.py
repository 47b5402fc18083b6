"""Calls at the edges of a submission: several blocks, limits of the grid, odd strides, dropped sequences."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import rows
from zinc_attn.planning import call, inputs

SHAPE = za.AttnShape(4, 2, 64)


def new_rows(rng, n):
    return tuple(rng.standard_normal((2, n, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float16))


def new_q(rng, *rows):
    return rng.standard_normal((*rows, SHAPE.q_heads, SHAPE.head_dim), np.float32)


def same(got, want):
    return np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.both_dispatchers
def test_steady_decode_of_a_batch_in_several_blocks(device, rng, monkeypatch):
    """Every block but the first attends rows that the first submission appended."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 4 * SHAPE.q_heads * (SHAPE.head_dim + 2) * 3)
    cache = za.KVCache(device, SHAPE, 1, 4096, page_size=64)
    attention, sequences = za.Attention(cache), [cache.new_sequence() for _ in range(3)]
    stored = []
    for sequence in sequences:
        k, v = new_rows(rng, 100)
        cache.append(sequence, 0, k, v)
        stored.append((k, v))
    for count in (1, 1, 1, 2, 1):
        new = [new_rows(rng, count) for _ in sequences]
        q = [new_q(rng, count) for _ in sequences]
        outs = attention(q, sequences, 0, k=[n[0] for n in new], v=[n[1] for n in new])
        stored = [tuple(map(np.concatenate, zip(*both, strict=True))) for both in zip(stored, new, strict=True)]
        for out, rows_q, (k, v) in zip(outs, q, stored, strict=True):
            assert same(out, za.reference.emulate(rows_q, k, v)[0])
    cache.close()


def test_rounding_a_bucket_never_goes_beyond_a_limit(device, rng, monkeypatch):
    """1,500 rows over 3 states each: the power of two above would be beyond the scratch that one call may have."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 4 * SHAPE.q_heads * (SHAPE.head_dim + 2) * 5000)
    cache = za.KVCache(device, SHAPE, 1, 2048, page_size=64)
    planned = []
    attention, sequence = za.Attention(cache, observer=lambda one, _: planned.append(one)), cache.new_sequence()
    k, v = new_rows(rng, 1500)
    q = new_q(rng, 1500)
    out = attention(q, sequence, 0, k=k, v=v)
    assert all(submission.key.states <= 5000 for submission in planned)
    picked = np.array([0, 63, 64, 700, 1499])
    for row in picked:
        assert same(out[row], za.reference.emulate(q[row], k[: row + 1], v[: row + 1])[0])
    cache.close()


@pytest.mark.both_dispatchers
def test_a_prompt_longer_than_one_append(device, rng, monkeypatch):
    monkeypatch.setattr(call, "UPLOAD_ROWS", 100)
    cache = za.KVCache(device, SHAPE, 1, 512, page_size=64)
    attention, sequence = za.Attention(cache), cache.new_sequence()
    k, v = new_rows(rng, 300)
    q = new_q(rng, 2)
    assert same(attention(q, sequence, 0, k=k, v=v), za.reference.emulate(q, k, v)[0])
    assert len(sequence) == 300
    monkeypatch.setattr(call, "UPLOAD_ROWS", 1)
    both = [sequence, sequence.fork()]
    for n in range(297, 300):  # a batch of more new rows than that, step after step
        new = [k[n : n + 1]] * 2, [v[n : n + 1]] * 2
        outs = attention([q[0], q[1]], both, 0, *new)
        k, v = np.concatenate([k, new[0][0]]), np.concatenate([v, new[1][0]])
        for out, row in zip(outs, q, strict=True):
            assert same(out, za.reference.emulate(row, k, v)[0])
    cache.close()


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
def test_rows_in_any_memory_order(device, rng, dtype):
    cache = za.KVCache(device, SHAPE, 1, 256, dtype=dtype, page_size=64)
    k = np.rint(rng.standard_normal((70, SHAPE.kv_heads, SHAPE.head_dim)) * 4).astype(np.float16)
    q = new_q(rng)
    want = za.reference.emulate(q, *rows.stored(k, -k, dtype))[0]
    for order in (np.asfortranarray, lambda x: x.transpose(0, 2, 1).copy().transpose(0, 2, 1), lambda x: x[::-1][::-1]):
        sequence = cache.new_sequence()
        out = za.Attention(cache)(np.asfortranarray(q), sequence, 0, k=order(k)[:69], v=order(-k)[:69])
        out = za.Attention(cache)(q, sequence, 0, k=order(k)[69], v=order(-k)[69])
        assert same(out, want)
        sequence.free()
    cache.close()


def test_a_dropped_sequence_gives_its_pages_back(device, rng):
    cache = za.KVCache(device, SHAPE, 1, 256, page_size=64, max_sequences=2)
    for _ in range(10):
        cache.append(cache.new_sequence(), 0, *new_rows(rng, 100))
        gc.collect()
    assert cache.sequences == [] and cache.free_tokens == cache.capacity
    cache.close()


def test_a_refused_truncate_changes_nothing(device, rng):
    cache = za.KVCache(device, SHAPE, 1, 512, page_size=16)
    attention, sequence = za.Attention(cache), cache.new_sequence()
    k, v = new_rows(rng, 60)
    cache.append(sequence, 0, k, v)
    fork = sequence.fork()
    q = new_q(rng)
    for n in (-1, -40, 61, 2.5):
        with pytest.raises(errors.ArgumentError):
            fork.truncate(n)
        assert same(attention(q, fork, 0), za.reference.emulate(q, k, v)[0])
    cache.close()


def test_the_last_tokens_are_taken_back(device, rng):
    """Speculative tokens: what is left has the bits of a sequence that never had them, within a step, too."""
    q = new_q(rng)
    k, v = new_rows(rng, 60)
    for make in (
        lambda: za.KVCache(device, SHAPE, 2, 512, page_size=16),
        lambda: za.ShardedKVCache([device] * 2, SHAPE, 2, 1024, page_size=16),
    ):
        with make() as cache:
            attention = (za.Attention if isinstance(cache, za.KVCache) else za.ShardedAttention)(cache)
            sequence = cache.new_sequence()
            for layer in (0, 1):
                cache.append(sequence, layer, k, v)
            sequence.drop_last(0)
            sequence.drop_last(3)
            cache.append(sequence, 0, k[:2], v[:2])  # layer 1 is behind
            sequence.drop_last(5)
            assert list(sequence.lengths) == [52, 52]
            for layer in (0, 1):
                assert same(attention(q, sequence, layer), za.reference.emulate(q, k[:52], v[:52])[0])
            for n in (-1, 53, True, 2.5, None):
                with pytest.raises(errors.ArgumentError, match=f"^n: got {n}, expected"):
                    sequence.drop_last(n)
            sequence.drop_last(52)
            assert len(sequence) == 0
            sequence.free()
            with pytest.raises(errors.ClosedError, match=r"^sequence: used after free\(\)$"):
                sequence.drop_last(1)
        with pytest.raises(errors.ClosedError, match=r"used after close\(\)$"):
            sequence.drop_last(1)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "q8_0"))
def test_bfloat16_rows_of_ml_dtypes_and_torch(device, rng, dtype):
    """They are the rows of the same values in float32, and so are q and the arrays of a call without a cache."""
    torch = pytest.importorskip("torch")
    q = new_q(rng)
    given = [x.astype(np.float32).astype(ml_dtypes.bfloat16) for x in (q, *new_rows(rng, 70))]
    wide = [x.astype(np.float32) for x in given]
    tensors = [torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for x in given]
    with za.KVCache(device, SHAPE, 1, 512, dtype, page_size=16) as cache:
        attention, outs = za.Attention(cache), []
        for rows in (wide, given, tensors):
            outs.append(attention(rows[0], cache.new_sequence(), 0, k=rows[1], v=rows[2]))
        assert same(outs[0], outs[1]) and same(outs[0], outs[2])
    with (
        za.KVCache(device, SHAPE, 1, 512, "f16", page_size=16) as cache,
        pytest.raises(errors.DTypeError, match=r"^k: got dtype bfloat16, a f16 cache takes float16; "),
    ):
        cache.append(cache.new_sequence(), 0, tensors[1], tensors[2])
    for attend in (lambda *x: za.attention(*x, device=device), lambda *x: za.reference.emulate(*x)[0]):
        assert same(attend(*wide), attend(*given)) and same(attend(*wide), attend(*tensors))
    outs = [za.attention(*wide, device=device, sinks=sinks) for sinks in (x[0][:, 0] for x in (wide, given, tensors))]
    assert same(outs[0], outs[1]) and same(outs[0], outs[2])


@pytest.mark.parametrize(("dtype", "narrow"), (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)))
def test_float32_rows_are_rounded_on_request(any_device, rng, dtype, narrow):
    """The bits are those of rows that the caller rounds, subnormal float16 values among them."""
    q = new_q(rng)
    k, v = (rng.standard_normal((70, SHAPE.kv_heads, SHAPE.head_dim), np.float32) for _ in "kv")
    v[::3] *= np.float32(2.0**-18)
    tensor = pytest.importorskip("torch").from_numpy(k)
    want = za.reference.emulate(q, k.astype(narrow), v.astype(narrow))[0]
    for make in (
        lambda **options: za.KVCache(any_device, SHAPE, 1, 512, dtype, page_size=16, **options),
        lambda **options: za.ShardedKVCache([any_device] * 2, SHAPE, 1, 512, dtype, page_size=16, **options),
    ):
        with make(round_rows=True) as cache:
            attention = (za.Attention if isinstance(cache, za.KVCache) else za.ShardedAttention)(cache)
            for rows_k, rows_v in ((k, v), (tensor, v), (k.astype(narrow), v)):
                sequence = cache.new_sequence()
                cache.append(sequence, 0, rows_k[:60], rows_v[:60])
                assert same(attention(q, sequence, 0, k=rows_k[60:], v=rows_v[60:]), want)
        with make() as cache, pytest.raises(errors.ArgumentError, match=r"a cache made with round_rows=True rounds"):
            cache.append(cache.new_sequence(), 0, k, v)


def test_a_sequence_in_the_middle_of_a_step_is_not_saved(device, rng, tmp_path):
    with za.KVCache(device, SHAPE, 2, 512, page_size=16) as cache:
        sequence, (k, v) = cache.new_sequence(), new_rows(rng, 3)
        cache.append(sequence, 1, k, v)
        text = r"^save: layer 1 has length 3, layer 0 has length 0, expected equal lengths; .*, or truncate\(0\)$"
        with pytest.raises(za.StepError, match=text):
            sequence.save(tmp_path / "half")
        assert not list(tmp_path.iterdir())
        cache.append(sequence, 0, k, v)
        sequence.save(tmp_path / "whole")
        assert len(cache.load(tmp_path / "whole")) == 3


def test_numpy_integers_are_ints(device):
    plan = za.plan_splits(np.uint32(5000), SHAPE, np.int64(64), q_len=np.int32(2))
    assert plan == za.plan_splits(5000, SHAPE, 64, q_len=2) and plan.fingerprint()
    cache = za.KVCache(device, SHAPE, 1, np.uint32(5000))
    assert cache.capacity == 5000 and cache.free_tokens == 5120
    cache.close()


@pytest.mark.parametrize("scale", (1e39, 1e300, "abc", [1], np.array([1, 2])))
def test_a_scale_that_is_no_float32_number(device, scale):
    q, k = np.zeros((4, 64), np.float32), np.zeros((1, 2, 64), np.float32)
    with pytest.raises(errors.ArgumentError, match=r"^scale: got "):
        za.attention(q, k, k, device=device, scale=scale)
