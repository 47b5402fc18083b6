"""Where a cache's layers lie, and what its calls make and read: slices, buffers, submissions, recordings."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cache_rows import DTYPES, SMALL, Twin, new_q, new_rows, together
from support import differing, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.decode import runner
from zinc_attn.planning import call, inputs

NATIVE = True
HEAD_BYTES = {"f32": 256, "f16": 128, "bf16": 128, "q8_0": 64 + 4}  # of a token's K or V
CUTS = [  # dtype, shape, layers, KV heads of all that fit in a buffer, those of each slice, the buffers' numbers
    *((dtype, "6/3/64", 2, most, cut, [0, 1]) for dtype in DTYPES for most, cut in ((2, [1, 2]), (1, [1, 1, 1]))),
    *(("f16", "4/2/64", 5, 2 * most, [2], numbers)
      for most, numbers in ((4, [0, 0, 0, 1, 1]), (2, [0, 0, 1, 1, 2]), (1, [0, 1, 2, 3, 4]))),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "text", "layers", "most", "cut", "numbers"), CUTS)
def test_layers_in_several_buffers_have_the_same_bits(
    device, monkeypatch, tmp_path, dtype, text, layers, most, cut, numbers
):
    """Cut by KV heads, or by layers."""
    limit = most * 256 * HEAD_BYTES[dtype] + (4 if len(cut) == 1 else 0)
    monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=limit))
    cache = za.KVCache(device, za.AttnShape.parse(text), layers, 256, dtype, 16)
    monkeypatch.undo()
    with cache:
        assert [[one.heads for one in layer.slices] for layer in cache.layers] == [cut] * layers
        assert [layer.number for layer in cache.layers] == numbers
        assert len(cache._buffers) == 2 * len(cut) * (numbers[-1] + 1)
        one = Twin(za.Attention(cache))
        for new, rows_of_q in ((5, 5), (1, 1), (70, 70), (60, 2), (1, 1)):
            one.step(new, rows_of_q)
        one.truncate(21)
        fork = one.fork()
        fork.append(6)  # copies the shared page of every layer
        one.truncate(0)
        fork.keep([0, 2, 5], 6)  # page copies, gathers and files know slices and buffers, too
        fork.sequence.save(tmp_path / "fork")
        back = fork.other(cache.load(tmp_path / "fork"))
        fork.look()
        back.look()


@pytest.mark.parametrize(("dtype", "page_size"), (("f16", 1), ("q8_0", 64)))
def test_steady_decode_records_nothing(device, monkeypatch, dtype, page_size):
    """Nor does it plan more than once for each leaf of a sequence, also where two sequences take turns."""
    cache, recorded, planned = za.KVCache(device, SMALL, 2, 1024, dtype, page_size), [], []
    rng = np.random.default_rng(0)
    record, plan = device.runtime.record, runner.plan_call
    monkeypatch.setattr(device.runtime, "record", lambda *a, **k: (recorded.append(1), record(*a, **k))[1])
    monkeypatch.setattr(runner, "plan_call", lambda *a: (planned.append(1), plan(*a))[1])
    attn, seqs = za.Attention(cache), [cache.new_sequence() for _ in range(2)]
    counts = []
    for at, seq, layer in itertools.product(range(256), seqs, range(2)):
        if at < 128:
            cache.append(seq, layer, *new_rows(rng, 1, SMALL, dtype))
        else:
            k, v = new_rows(rng, 1, SMALL, dtype)
            attn(new_q(rng, 1, SMALL), seq, layer, k=k, v=v)
            counts.append((attn.recordings, len(recorded)))
    assert {recordings for recordings, _ in counts} == {1} and len(set(counts)) == 1, counts
    assert len(planned) == len(seqs) * 128 // 64
    cache.close()


@pytest.mark.parametrize(("batch", "q_len", "window"), [(1, 1, None), (3, 1, 100), (2, 3, None)])
def test_what_was_prepared_is_not_made_again(device, monkeypatch, batch, q_len, window):
    """Growth from nothing over several sizes records nothing, makes no buffer, and gives the oracle's bits."""
    tokens, layers = 1200 // q_len * q_len, 3
    cache, rng = za.KVCache(device, SMALL, layers, batch * 1280), np.random.default_rng(0)
    attn, seqs = za.Attention(cache, window=window), [cache.new_sequence() for _ in range(batch)]
    with pytest.raises(errors.ArgumentError, match=r"^tokens: got 1281, expected an int from 1 to 1280$"):
        attn.prepare(1281, batch=batch)
    attn.prepare(tokens, batch=batch, q_len=q_len)
    with monkeypatch.context() as patch:
        for owner, name in ((device.runtime, "record"), (device.runtime, "run"), (runner, "growth_keys")):
            patch.setattr(owner, name, lambda *a, **k: pytest.fail("made by a second prepare"))
        attn.prepare(tokens, batch=batch, q_len=q_len)
    recordings = attn.recordings
    assert recordings == len(attn._runner.recordings) and 1 < recordings <= (5 if q_len == 1 else 10)
    k, v = new_rows(rng, tokens, SMALL, "f16")
    for begin, end in ((0, 69), (999, 1101)):
        for seq, layer in itertools.product(seqs, range(layers) if begin else ()):
            cache.append(seq, layer, k[69:begin], v[69:begin])
        with monkeypatch.context() as patch:
            for name in ("record", "buffer", "kernel"):
                patch.setattr(device.runtime, name, lambda *a, **k: pytest.fail("made in a step"))
            for start in range(begin, end, q_len):
                one = slice(start, start + q_len)
                q = [new_q(rng, q_len, SMALL) for _ in range(batch)]
                for layer in range(layers):
                    result = attn(q, seqs, layer, [k[one]] * batch, [v[one]] * batch, return_lse=True)
                if start % 16 < q_len:
                    want = reference.emulate(q[-1], k[: start + q_len], v[: start + q_len], window=window)
                    same([x[-1] for x in result], want, start)
    assert attn.recordings == recordings
    cache.close()


def test_what_the_cache_says_of_its_memory(device):
    cache = za.KVCache(device, SMALL, 3, 100, "f16", 16)
    assert (cache.capacity, cache.free_tokens, cache.bytes_per_token) == (100, 112, 3 * 2 * 2 * 64 * 2)
    assert cache.nbytes == 112 * cache.bytes_per_token
    seq = cache.new_sequence()
    cache.append(seq, 0, *np.ones((2, 17, 2, 64), np.float16))
    assert cache.free_tokens == 112 - 32 and len(seq) == 0 and seq.lengths == (17, 0, 0)
    cache.close()


@pytest.mark.of_drivers
def test_a_cache_that_does_not_fit(device):
    """test_errors.py has a device whose memory is full."""
    limit = device.info.max_buffer_bytes
    tokens = min(limit // (64 * 2) // 16 * 16 + 16, 1 << 24)
    if tokens * 64 * 2 > limit:
        with pytest.raises(errors.LimitError) as caught:
            za.KVCache(device, SMALL, 2, tokens - 1, "f16", 16)  # in whole pages, as many as ``tokens``
        assert str(caught.value) == (
            f"capacity: {tokens - 1:,} tokens need {tokens * 128:,} bytes per KV head, {device.info.name} takes at "
            f"most {limit:,} in one storage buffer; use a smaller capacity or dtype"
        )
    with pytest.raises(errors.ArgumentError, match=r"^capacity: got 0, expected an int from 1 to 16777216$"):
        za.KVCache(device, SMALL, 2, 0)


# --- long prompts, odd strides, tokens taken back, and windows --------------------------------------------------


def test_rounding_a_bucket_never_goes_beyond_a_limit(device, monkeypatch):
    """1,500 rows over 3 states each: the power of two above would be beyond the scratch that one call may have."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 5000 * 4 * SMALL.q_heads * (SMALL.head_dim + 2))
    planned = []
    with za.KVCache(device, SMALL, 1, 2048, page_size=64) as cache:
        Twin(za.Attention(cache, observer=lambda submission, _: planned.append(submission))).step(1500, 1500)
    assert all(submission.key.states <= 5000 for submission in planned)


def test_a_prompt_longer_than_one_append(device, monkeypatch):
    monkeypatch.setattr(call, "UPLOAD_ROWS", 100)
    with za.KVCache(device, SMALL, 1, 512, page_size=64) as cache:
        twin = Twin(za.Attention(cache))
        twin.step(300, 2)
        monkeypatch.setattr(call, "UPLOAD_ROWS", 1)
        both = [twin, twin.fork()]
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
            assert not differing(attention(q, sequence, 0, k=order(k)[69], v=order(-k)[69]), want)
            sequence.free()


def test_the_last_tokens_are_taken_back(device):
    """Speculative tokens: what is left has the bits of a sequence that never had them, within a step, too."""
    for make, devices in ((za.KVCache, device), (za.ShardedKVCache, [device] * 2)):
        with make(devices, SMALL, 2, 1024, page_size=16) as cache:
            twin = Twin((za.Attention if make is za.KVCache else za.ShardedAttention)(cache))
            twin.append(60)
            twin.sequence.drop_last(0)
            twin.sequence.drop_last(3)
            cache.append(twin.sequence, 0, *new_rows(twin.rng, 2, SMALL, "f16"))  # layer 1 is behind
            twin.sequence.drop_last(5)
            assert list(twin.sequence.lengths) == [52, 52]
            twin.truncate(52)
            twin.look()
            with pytest.raises(errors.ArgumentError, match=r"^n: got 53, expected"):
                twin.sequence.drop_last(53)
            twin.sequence.drop_last(52)
            assert len(twin) == 0


@pytest.mark.parametrize("window", (1, 130))
def test_a_window_reads_only_its_keys(device: za.Device, window: int) -> None:
    """Keys outside it are not touched: a cache full of NaN there does not show."""
    shape = za.AttnShape(2, 1, 64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((4000, 1, 64), np.float32) for _ in "kv")
    q = rng.standard_normal((2, 64), np.float32)
    want = reference.emulate(q, k, v, window=window)
    begin = (4000 - window) // 64 * 64
    with za.KVCache(device, shape, 1, 4096, "f32") as cache:
        sequence = cache.new_sequence()
        cache.append(sequence, 0, k, v)
        cache.mover.append(
            0, np.arange(begin), sequence.table(), rows.encode(*[np.full_like(k[:begin], np.nan)] * 2, shape, "f32")
        )
        for layout in ({"num_splits": 2}, {}):
            same(za.Attention(cache, window=window, **layout)(q, sequence, 0, return_lse=True), want)
