"""Where a cache's layers lie, and what a call makes: slices, buffers, blocks of rows, recordings, memory that lacks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cache_rows import DTYPES, SMALL, Twin, grow, new_q, new_rows
from page_tables import largest
from support import same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.decode import runner
from zinc_attn.runtime import loader as libvulkan

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
        grow(cache)
        one = Twin(za.Attention(cache))
        one.append(21)
        fork = one.fork()
        fork.append(6)  # copies the shared page of every layer
        one.truncate(0)
        fork.keep([0, 2, 5], 6)  # page copies, gathers and files know slices and buffers, too
        fork.sequence.save(tmp_path / "fork")
        back = fork.other(cache.load(tmp_path / "fork"))
        for twin in (fork, back):
            twin.look()
            for layer, held in enumerate(twin.held):
                k, v = (x.astype(np.float16) if dtype == "f16" else x for x in held)
                want = rows.encode(k, v, cache.shape, dtype)
                assert dtype == "q8_0" or np.array_equal(cache.read_rows(twin.sequence, layer, 0, 24), want), layer


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
    recordings = attn.recordings
    assert recordings == len(attn._runner.recordings) and 1 < recordings <= (5 if q_len == 1 else 10)
    with monkeypatch.context() as patch:
        for owner, name in ((device.runtime, "record"), (device.runtime, "run"), (runner, "growth_keys")):
            patch.setattr(owner, name, lambda *a, **k: pytest.fail("made by a second prepare"))
        attn.prepare(tokens, batch=batch, q_len=q_len)
        attn.replan(attn.cascade)
        with pytest.raises(pytest.fail.Exception):  # layouts may be others now
            attn.prepare(tokens, batch=batch, q_len=q_len)
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
    assert (cache.capacity, cache.free_tokens, cache.nbytes) == (100, 112, 112 * 3 * 2 * 2 * 64 * 2)
    assert {layer.number for layer in cache.layers} == {0}
    assert sum(s.k.nbytes + s.v.nbytes for s in cache.layers[0].slices) == cache.nbytes
    seq = cache.new_sequence()
    for layer, magnitude in ((0, 3), (1, 2)):
        cache.append(seq, layer, *np.full((2, 17, 2, 64), -magnitude, np.float16))
        assert largest(cache) == (3, 3)  # ever
    assert cache.free_tokens == 112 - 32 and len(seq) == 0 and seq.lengths == (17, 17, 0)
    cache.close()


@pytest.mark.of_drivers
def test_a_cache_that_does_not_fit(device, monkeypatch):
    name, limit = device.info.name, device.info.max_buffer_bytes
    tokens = min(limit // (64 * 2) // 16 * 16 + 16, 1 << 24)
    if tokens * 64 * 2 > limit:
        with pytest.raises(errors.LimitError) as caught:
            za.KVCache(device, SMALL, 2, tokens - 1, "f16", 16)  # in whole pages, as many as ``tokens``
        assert str(caught.value) == (
            f"capacity: {tokens - 1:,} tokens need {tokens * 128:,} bytes per KV head, {name} takes at most {limit:,} "
            "in one storage buffer; use a smaller capacity or dtype"
        )
    with pytest.raises(errors.ArgumentError, match=r"^capacity: got 0, expected an int from 1 to 16777216$"):
        za.KVCache(device, SMALL, 2, 0)
    kept = za.KVCache(device, SMALL, 2, 64, "f16", 16)
    seq, attn = kept.new_sequence(), za.Attention(kept)
    real = libvulkan.Vulkan.heaps
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *args: [heap._replace(free=1000) for heap in real(*args)])
    q, k = np.ones((20, 4, 64), np.float32), np.ones((20, 2, 64), np.float16)
    for call in (lambda: za.KVCache(device, SMALL, 2, 64, "f16", 16), lambda: attn(q, seq, 0, k=k, v=k)):
        with pytest.raises(errors.DeviceMemoryError, match=r"^buffer: [\d,]+ bytes are needed, .* has 1,000 free; "):
            call()
    assert kept.free_tokens == 64 and seq.lengths == (0, 0) and largest(kept) == (0, 0)
    monkeypatch.undo()
    same(attn(q, seq, 0, k=k, v=k, return_lse=True), reference.emulate(q, k, k))
    kept.close()
