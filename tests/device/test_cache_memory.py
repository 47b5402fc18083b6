"""Where a cache's layers lie, and what a call makes: slices, buffers, blocks of rows, recordings, memory that lacks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_rows import DTYPES, SHAPE, SMALL, STEPS, Pair, grow, grown, new_q, new_rows, same
from support import FULL

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.cache.layer_storage import buffer_count
from zinc_attn.cache.pages import CapacityError
from zinc_attn.decode import runner
from zinc_attn.planning import inputs
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime import loader as libvulkan


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_cut_into_shards_have_the_same_bits(
    device: za.Device, monkeypatch: pytest.MonkeyPatch, dtype: str, tmp_path: Any
) -> None:
    shape = za.AttnShape(6, 3, 64)
    whole = grown(device, shape, 2, 256, dtype, 16)
    per_head = 256 * 64 * {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}[dtype] + (256 * 4 if dtype == "q8_0" else 0)
    for heads, cut in ((2, [1, 2]), (1, [1, 1, 1])):
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=heads * per_head))
        cache = za.KVCache(device, shape, 2, 256, dtype, 16)
        monkeypatch.undo()
        assert [[one.heads for one in layer.slices] for layer in cache.layers] == [cut] * 2
        for got, want in zip(grow(cache, STEPS), whole, strict=True):
            same(got, want, cut)
        k, v = new_rows(np.random.default_rng(0), 21, shape, dtype)
        seq = cache.new_sequence()
        for layer in (0, 1):
            cache.append(seq, layer, k, v)
        fork = seq.fork()  # page copies, gathers and files know shards too
        for layer in (0, 1):
            cache.append(fork, layer, v[:6], k[:6])
        fork.keep([0, 2, 5], 6)
        fork.save(tmp_path / "fork")
        back = cache.load(tmp_path / "fork")
        keys, values = rows.stored(np.concatenate([k, v[:6][[0, 2, 5]]]), np.concatenate([v, k[:6][[0, 2, 5]]]), dtype)
        q = new_q(np.random.default_rng(1), 1, shape)
        for one in (fork, back):
            same(za.Attention(cache)(q, one, 1, return_lse=True), reference.emulate(q, keys, values), cut)
        cache.close()


@pytest.mark.both_dispatchers
def test_a_call_in_several_blocks_of_rows_has_the_same_bits(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    start = device.runtime.start
    monkeypatch.setattr(device.runtime, "start", lambda recording: (runs.append(1), start(recording)))
    cache = za.KVCache(device, SMALL, 2, 2048, "f16", 16)
    grow(cache, ((300, 40), (1, 1), (20, 20)))
    assert len(runs) == 6  # one submission per call and layer
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 64 * 4 * 4 * 66)  # 64 states
    runs.clear()
    grow(cache, ((300, 40), (1, 1), (20, 20)))
    assert len(runs) > 12
    cache.close()


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("dtype", ("f16", "q8_0"))
def test_steady_decode_records_nothing(device: za.Device, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Nor does it plan more than once for each leaf of a sequence, also where two sequences take turns."""
    cache, rng, made, planned = za.KVCache(device, SMALL, 2, 1024, dtype, 64), np.random.default_rng(0), [], []
    record, plan = device.runtime.record, runner.plan_call
    monkeypatch.setattr(device.runtime, "record", lambda *a, **k: (made.append(1), record(*a, **k))[1])
    monkeypatch.setattr(runner, "plan_call", lambda *a: (planned.append(1), plan(*a))[1])
    attn, seqs = za.Attention(cache), [cache.new_sequence() for _ in range(2)]
    counts = []
    for at, seq, layer in itertools.product(range(256), seqs, range(2)):
        if at < 128:
            cache.append(seq, layer, *new_rows(rng, 1, SMALL, dtype))
        else:
            k, v = new_rows(rng, 1, SMALL, dtype)
            attn(new_q(rng, 1, SMALL), seq, layer, k=k, v=v)
            counts.append((attn.recordings, len(made)))
    assert {recordings for recordings, _ in counts} == {1} and len(set(counts)) == 1, counts
    assert len(planned) == len(seqs) * 128 // 64
    cache.close()


@pytest.mark.both_dispatchers
@pytest.mark.parametrize(("batch", "q_len", "window"), [(1, 1, None), (3, 1, 100), (2, 3, None)])
def test_what_was_prepared_is_not_made_again(
    device: za.Device, monkeypatch: pytest.MonkeyPatch, batch: int, q_len: int, window: int | None
) -> None:
    """Growth from nothing over several sizes records nothing, makes no buffer, and gives the oracle's bits."""
    tokens, layers = 1200 // q_len * q_len, 3
    cache, rng = za.KVCache(device, SMALL, layers, batch * 1280), np.random.default_rng(0)
    attn, seqs = za.Attention(cache, window=window), [cache.new_sequence() for _ in range(batch)]
    with pytest.raises(errors.ArgumentError, match=r"^tokens: got 1281, expected an int from 1 to 1280$"):
        attn.prepare(1281, batch=batch)
    attn.prepare(tokens, batch=batch, q_len=q_len)
    made = attn.recordings
    assert made == len(attn._runner.recordings) and 1 < made <= (5 if q_len == 1 else 10)
    with monkeypatch.context() as patch:
        for owner, name in ((device.runtime, "record"), (device.runtime, "run"), (runner, "growth_keys")):
            patch.setattr(owner, name, lambda *a, **k: pytest.fail("made by a second prepare"))
        attn.prepare(tokens, batch=batch, q_len=q_len)
        attn.replan(attn.cascade, device.info.layout_facts)
        with pytest.raises(pytest.fail.Exception):  # layouts may be others now
            attn.prepare(tokens, batch=batch, q_len=q_len)
    k, v = new_rows(rng, tokens, SMALL, "f16")
    for begin, end in ((0, 69), (999, 1101)):
        for seq, layer in itertools.product(seqs, range(layers) if begin else ()):
            cache.append(seq, layer, k[69:begin], v[69:begin])
        with monkeypatch.context() as patch:
            for name in ("record", "buffer", "kernel"):
                patch.setattr(device.runtime, name, lambda *a, **k: pytest.fail("made in a step"))
            for at in range(begin, end, q_len):
                one = slice(at, at + q_len)
                q = [new_q(rng, q_len, SMALL) for _ in range(batch)]
                for layer in range(layers):
                    found = attn(q, seqs, layer, [k[one]] * batch, [v[one]] * batch, return_lse=True)
                if at % 16 < q_len:
                    want = reference.emulate(q[-1], k[: at + q_len], v[: at + q_len], window=window)
                    same([x[-1] for x in found], want, at)
    assert attn.recordings == made
    cache.close()


@pytest.mark.both_dispatchers
def test_layers_in_several_buffers_have_the_same_bits(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grown(device, SMALL, 5, 256, "f16", 16)
    layer_bytes = 256 * SMALL.kv_heads * SMALL.head_dim * 2
    for most, numbers in ((4, [0, 0, 0, 1, 1]), (2, [0, 0, 1, 1, 2]), (1, [0, 1, 2, 3, 4])):
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=most * layer_bytes + 4))
        cache = za.KVCache(device, SMALL, 5, 256, "f16", 16)
        monkeypatch.undo()
        assert [layer.number for layer in cache.layers] == numbers
        assert buffer_count(cache.layers) == 2 * (numbers[-1] + 1)
        for got, want in zip(grow(cache, STEPS), whole, strict=True):
            same(got, want, most)
        seq = cache.new_sequence()
        k, v = new_rows(np.random.default_rng(0), 21, SMALL, "f16")
        for layer in range(5):
            cache.append(seq, layer, k * (1 + layer), v)
        fork = seq.fork()
        for layer in range(5):  # copies the shared page of every layer
            cache.append(fork, layer, v[:6], k[:6])
        seq.free()
        fork.keep((0, 2, 5), 6)
        for layer in range(5):
            got, kept = cache.read_rows(fork, layer, 0, 24), [0, 2, 5]
            want = rows.encode(np.r_[k * (1 + layer), v[kept]], np.r_[v, k[kept]], cache.shape, "f16")
            assert np.array_equal(got, want), (most, layer)
        cache.close()


@pytest.mark.both_dispatchers
def test_what_the_cache_says_of_its_memory(device: za.Device) -> None:
    cache = za.KVCache(device, SMALL, 3, 100, "f16", 16)
    assert (cache.capacity, cache.free_tokens, cache.bytes_per_token) == (100, 112, 3 * 2 * 2 * 64 * 2)
    assert cache.nbytes == 112 * cache.bytes_per_token
    assert {layer.number for layer in cache.layers} == {0}
    assert sum(s.k.nbytes + s.v.nbytes for s in cache.layers[0].slices) == cache.nbytes
    seq = cache.new_sequence()
    cache.append(seq, 0, *new_rows(np.random.default_rng(0), 17, SMALL, "f16"))
    assert cache.free_tokens == 112 - 32 and len(seq) == 0 and seq.lengths == (17, 0, 0)
    cache.close()


def test_a_cache_that_does_not_fit(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    name, limit = device.info.name, device.info.max_buffer_bytes
    tokens = min(limit // (64 * 2) // 16 * 16 + 16, 1 << 24)
    if tokens * 64 * 2 > limit:
        with pytest.raises(errors.LimitError) as caught:
            za.KVCache(device, SMALL, 2, tokens - 1, "f16", 16)  # in whole pages, as many as ``tokens``
        assert str(caught.value) == (
            f"capacity: {tokens - 1:,} tokens need {tokens * 128:,} bytes per KV head, {name} takes at most {limit:,} "
            "in one storage buffer; use a smaller capacity or dtype"
        )
    with pytest.raises(errors.ArgumentError) as wrong:
        za.KVCache(device, SMALL, 2, 0)
    assert str(wrong.value) == "capacity: got 0, expected an int from 1 to 16777216"
    kept = za.KVCache(device, SMALL, 2, 64, "f16", 16)
    seq, attn = kept.new_sequence(), za.Attention(kept)
    real = libvulkan.Vulkan.heaps
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *args: [heap._replace(free=1000) for heap in real(*args)])
    q, k = np.ones((20, 4, 64), np.float32), np.ones((20, 2, 64), np.float16)
    message = "buffer: 65,536 bytes are needed, {} has 1,000 free; close other buffers or programs, or ask for less"
    with pytest.raises(errors.DeviceMemoryError) as caught_memory:
        za.KVCache(device, SMALL, 2, 64, "f16", 16)
    assert str(caught_memory.value) == message.format(name)
    with pytest.raises(errors.DeviceMemoryError, match="1,000 free"):
        attn(q, seq, 0, k=k, v=k)
    assert kept.free_tokens == 64 and seq.lengths == (0, 0) and kept.largest == (0, 0)
    monkeypatch.undo()
    same(attn(q, seq, 0, k=k, v=k, return_lse=True), reference.emulate(q, k, k))
    kept.close()


@pytest.mark.skipif(not FULL, reason="2.7 GB: the long run")
def test_131072_tokens_of_ten_layers(device: za.Device, record_property: Any) -> None:
    tokens, layers, chunk = 131072, 10, 4096
    if machine.memory_budget(device.info.index)[1] < 4 << 30:
        pytest.skip("needs 4 GiB of device memory")
    cache = za.KVCache(device, SHAPE, layers, tokens, "f16")
    assert cache.nbytes == tokens * 20480 and cache.bytes_per_token == 20480
    seq, attn, rng = cache.new_sequence(), za.Attention(cache), np.random.default_rng(0)
    base = new_rows(rng, chunk, SHAPE, "f16")
    picked = 7

    def rows_at(begin: int, layer: int) -> Pair:  # cheap, and different everywhere
        shift = begin // chunk * 131 + layer
        return np.roll(base[0], shift, axis=0), np.roll(base[1], -shift, axis=2)

    for begin in range(0, tokens, chunk):
        for layer in range(layers):
            cache.append(seq, layer, *rows_at(begin, layer))
    assert len(seq) == tokens and cache.free_tokens == 0
    q = new_q(rng, 1, SHAPE)
    outs = [attn(q, seq, layer, return_lse=True) for layer in range(layers)]
    parts = [rows_at(begin, picked) for begin in range(0, tokens, chunk)]
    k, v = (np.concatenate([p[i][:, 1:] for p in parts]) for i in (0, 1))
    want = reference.emulate(q[:, 8:], k, v)  # KV head 1 of one layer
    same([x[:, 8:] for x in outs[picked]], want, "131072 tokens")
    assert len({out.tobytes() for out, _ in outs}) == layers
    with pytest.raises(CapacityError):
        cache.append(seq, 0, base[0][:1], base[1][:1])
    figure = f"{cache.nbytes:,} bytes of K and V in {buffer_count(cache.layers)} buffers"
    record_property("memory", figure)
    print(figure)
    cache.close()
