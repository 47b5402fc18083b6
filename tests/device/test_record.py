"""Attention recorded in a host program's own kp.Sequence, on its own kp.Manager."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import rows

pytestmark = pytest.mark.both_dispatchers

kp = pytest.importorskip("kp", reason="kp is not installed: scripts/run builds it")
SHAPE = za.AttnShape(4, 2, 64)


@pytest.fixture
def host():
    manager = kp.Manager(za.Device.open(runtime="kompute").info.index)
    device = za.Device.from_kompute(manager, za.Device.open(runtime="kompute").info.index)
    yield manager, device
    device.close()


def recorded(manager, device, dtype="f16", rows_tensor=True, **options):
    cache = za.KVCache(device, SHAPE, 2, 1024, dtype=dtype, page_size=64)
    attn, seq = za.Attention(cache), cache.new_sequence()
    q = manager.tensor_t(np.zeros(SHAPE.q_heads * SHAPE.head_dim, np.float32))
    new = manager.tensor_t(np.zeros(cache.row_words, np.uint32))
    sequence = manager.sequence()
    sequence.record(kp.OpTensorSyncDevice([q, new]))
    calls = [attn.record(sequence, q, seq, layer, new if rows_tensor else None, **options) for layer in range(2)]
    return cache, seq, q, new, sequence, calls


@pytest.mark.parametrize("dtype", ("f16", "q8_0"))
def test_a_host_sequence_gives_the_oracles_bits(host, rng, dtype):
    cache, seq, q_tensor, row_tensor, sequence, (first, second) = recorded(*host, dtype)
    keys, values = [], []
    for token in range(140):
        q = rng.standard_normal((SHAPE.q_heads, SHAPE.head_dim), np.float32)
        k, v = rng.standard_normal((2, 1, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float16)
        q_tensor.data()[:] = q.reshape(-1)
        row_tensor.data()[:] = rows.encode(k, v, cache.shape, dtype).reshape(-1)
        with first.step(second):
            sequence.eval()
        stored = rows.stored(k, v, dtype)
        keys.append(stored[0])
        values.append(stored[1])
        if token % 31 == 0 or token > 137:
            want, want_lse = za.reference.emulate(q, np.concatenate(keys), np.concatenate(values))
            for call in (first, second):
                words = call.out.data().view(np.float32)
                assert np.array_equal(words[: want.size].view(np.uint32), want.reshape(-1).view(np.uint32))
                assert np.array_equal(words[want.size :].view(np.uint32), want_lse.view(np.uint32))
    assert len(seq) == 140
    first.close()
    second.close()
    cache.close()


def test_a_window_that_begins_within_a_node(host, rng):
    """Lengths at which the window's keys lie in fewer nodes than the recording has splits."""
    manager, device = host
    k = rng.standard_normal((2050, 2, 64), np.float32)
    with za.KVCache(device, SHAPE, 1, 4096, "f32") as cache:
        attn, seq, sequence = za.Attention(cache, window=1000), cache.new_sequence(), manager.sequence()
        tensor = manager.tensor_t(np.zeros(SHAPE.q_heads * SHAPE.head_dim, np.float32))
        sequence.record(kp.OpTensorSyncDevice([tensor]))
        call, at = attn.record(sequence, tensor, seq, 0), 0
        assert call.splits == 3
        for n in (5, 600, 1000, 1010, 1024, 1025, 1500, 1536, 2048, 2050):
            cache.append(seq, 0, k[at:n], k[at:n])
            at, q = n, rng.standard_normal((SHAPE.q_heads, SHAPE.head_dim), np.float32)
            tensor.data()[:] = q.reshape(-1)
            with call.step():
                sequence.eval()
            want = np.concatenate([x.reshape(-1) for x in za.reference.emulate(q, k[:n], k[:n], window=1000)])
            assert np.array_equal(call.out.data().view(np.uint32), want.view(np.uint32)), n
        call.close()


@pytest.mark.parametrize("causal", (True, False), ids=("causal", "not_causal"))
@pytest.mark.parametrize("alibi", (None, np.exp2(-np.arange(1, 5)).astype(np.float32)), ids=("plain", "alibi"))
def test_each_step_has_a_mask_of_its_own(host, rng, causal, alibi):
    """Trees of three tokens: masks of several widths, none, and another one for each layer."""
    manager, device = host
    k = rng.standard_normal((2, 700, 2, 64), np.float32).astype(np.float16)
    with za.KVCache(device, SHAPE, 2, 1024, "f16", page_size=64) as cache:
        attn, seq, sequence = za.Attention(cache, alibi=alibi), cache.new_sequence(), manager.sequence()
        tensor = manager.tensor_t(np.zeros(3 * SHAPE.q_heads * SHAPE.head_dim, np.float32))
        new = [manager.tensor_t(np.zeros(3 * cache.row_words, np.uint32)) for _ in k]
        sequence.record(kp.OpTensorSyncDevice([tensor, *new]))
        options = {"causal": causal, "mask_keys": 600}
        calls = [attn.record(sequence, tensor, seq, layer, new[layer], **options) for layer in range(2)]
        for n, width in ((3, 3), (60, 0), (67, 67), (580, 3), (583, None), (586, 569), (640, 600), (643, "each")):
            at = len(seq)
            for layer in range(2 if at < n - 3 else 0):
                cache.append(seq, layer, k[layer, at : n - 3], k[layer, at : n - 3])
            q = rng.standard_normal((3, SHAPE.q_heads, SHAPE.head_dim), np.float32)
            tensor.data()[:] = q.reshape(-1)
            for layer, words in enumerate(new):
                words.data()[:] = rows.encode(*[k[layer, n - 3 : n]] * 2, cache.shape, "f16").reshape(-1)
            masks = [None, np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], bool)]
            if width is None:
                masks = [None, None]
            elif width != "each":
                values = rng.standard_normal((3, width), np.float32)
                masks = [np.where(rng.random((3, width)) < 0.3, np.float32(-np.inf), values)] * 2
            for call in calls:
                call.allow_empty = n == 3  # such a mask may hide all that there is
            with calls[0].step(calls[1], mask=masks if width == "each" else masks[0]):
                sequence.eval()
            for layer, call in enumerate(calls):
                keys = k[layer, :n]
                want = za.reference.emulate(q, keys, keys, alibi=alibi, causal=causal, mask=masks[layer])
                got = call.out.data().view(np.uint32)
                assert np.array_equal(got, np.concatenate([x.reshape(-1) for x in want]).view(np.uint32)), (n, layer)
        for call in calls:
            call.close()


def test_refused_masks_leave_the_sequence(host):
    cache, seq, _, _, sequence, (first, second) = recorded(*host, mask_keys=2)
    plain = recorded(*host)[-1][0]
    refused = (
        (np.ones((1, 2), bool), errors.ShapeError, r"^mask: got shape \(1, 2\), .* of which there are 1$"),
        (np.ones((2, 1), bool), errors.ShapeError, r"^mask: got shape \(2, 1\), expected \(1, n\)"),
        (np.ones((1, 1), np.int32), errors.DTypeError, "^mask: "),
        (np.full((1, 1), np.nan, np.float32), errors.ValueRangeError, "^mask: got a NaN"),
        (np.zeros((1, 1), bool), errors.ArgumentError, "^mask: row 0 sees no key"),
        ([None], errors.ArgumentError, r"^mask: got 1 entries, expected an array or one per call \(2\)$"),
    )
    for mask, error, text in refused:
        with pytest.raises(error, match=text), first.step(second, mask=mask):
            pytest.fail("the step began")
    for _ in range(3):
        with first.step(second, mask=np.ones((1, 1), bool)):
            sequence.eval()
    with pytest.raises(errors.LimitError, match=r"^mask: got 3 keys, expected at most mask_keys = 2$"):
        first.step(second, mask=np.ones((1, 3), bool)).__enter__()
    with pytest.raises(errors.ArgumentError, match=r"^mask: got one, expected None: no call of the step was "):
        plain.step(mask=np.ones((1, 1), bool)).__enter__()
    assert seq.lengths == (3, 3)
    for name, value in (("mask_keys", -1), ("mask_keys", cache.pool.capacity + 1), ("causal", 2)):
        with pytest.raises(errors.ArgumentError, match=f"^{name}: got {value}"):
            recorded(*host, **{name: value})
    cache.pool.check([seq.pages])


def test_a_failed_step_leaves_the_sequence(host):
    cache, seq, _, _, sequence, (first, second) = recorded(*host)
    with first.step(second):
        sequence.eval()
    with pytest.raises(KeyboardInterrupt), first.step(second):
        raise KeyboardInterrupt
    assert seq.lengths == (1, 1)
    with first.step():
        pass
    with pytest.raises(RuntimeError), second.step():
        raise RuntimeError
    assert seq.lengths == (2, 1)
    with second.step():
        pass
    cache.pool.check([seq.pages])


@pytest.mark.parametrize("shape", (za.AttnShape(2, 1, 576), za.AttnShape(4, 2, 64)), ids=str)
def test_a_call_examines_what_steps_appended(host, shape):
    """A bound on scores that nobody knows is not taken for 0: of a sequence, of its fork, and where rows moved on."""
    manager, device = host
    with za.KVCache(device, shape, 1, 64, "f32", page_size=16) as cache:
        attn, seq, sequence = za.Attention(cache), cache.new_sequence(), manager.sequence()
        tensor = manager.tensor_t(np.zeros(shape.q_heads * shape.k_dim, np.float32))
        new = manager.tensor_t(np.zeros(cache.row_words, np.uint32))
        sequence.record(kp.OpTensorSyncDevice([tensor, new]))
        call, q = attn.record(sequence, tensor, seq, 0, new), np.ones((shape.q_heads, shape.head_dim), np.float32)

        def step(value: float) -> None:
            k = np.full((1, shape.kv_heads, shape.head_dim), value, np.float32)
            new.data()[:] = rows.encode(k, np.ones_like(k), shape, "f32").reshape(-1)
            with call.step():
                sequence.eval()

        one = np.ones((shape.kv_heads, shape.head_dim), np.float32)
        attn(q, seq, 0, one, one)
        step(3.0)
        step(2.0**60)
        assert cache.largest == (1, 1)
        fork = seq.fork()
        cache.append(fork, 0, one, one)
        seq.truncate(2)
        want = za.reference.emulate(q, np.stack([one, 3 * one]), np.stack([one, one]))[0]
        assert np.array_equal(attn(q, seq, 0).view(np.uint32), want.view(np.uint32)) and cache.largest == (3, 1)
        for ask in (attn, lambda *given: attn.submit(*given).result(), attn.partial):
            with pytest.raises(errors.ValueRangeError, match=r"^q, k: got max\|q\| = 1.15\S+, max\|k\| = 1.15"):
                ask(np.float32(2.0**60) * q, fork, 0)
        attn(q, fork, 0)
        for value in (np.nan, -np.inf, 2.0**61, 2.0**-41):
            step(1.0)
            step(value)
            for ask in (lambda: attn(q, seq, 0, one, one), lambda: attn(q, seq.fork(), 0), lambda: seq.save("unused")):
                with pytest.raises(errors.ValueRangeError, match=r"^rows: .* token 3 of layer 0, .*; truncate\(3\) "):
                    ask()
            seq.truncate(3)
            assert np.isfinite(attn(q, seq, 0)).all()
            seq.truncate(2)
        call.close()


def test_refusals(host, device):
    manager, own = host
    cache, seq, q, new, _, (first, _) = recorded(manager, own, max_tokens=1)
    with first.step():
        pass
    with pytest.raises(errors.LimitError, match=r"^seq: 2 tokens, expected at most max_tokens = 1$"), first.step():
        pass
    attn = za.Attention(cache)
    short = manager.tensor_t(np.zeros(7, np.float32))
    with pytest.raises(errors.ShapeError, match=r"^q: got a tensor of 7 elements, expected q_len \* 256$"):
        attn.record(manager.sequence(), short, seq, 0, new)
    with pytest.raises(errors.ShapeError, match=r"^rows: got a tensor of 7 words, expected tokens \* "):
        attn.record(manager.sequence(), q, seq, 0, short)
    with pytest.raises(errors.ArgumentError, match=r"^max_tokens: got 0, "):
        attn.record(manager.sequence(), q, seq, 0, new, max_tokens=0)
    if device.runtime.name == "vulkan":
        other = za.KVCache(device, SHAPE, 1, 64)
        with pytest.raises(errors.RuntimeUnavailableError, match=r"expected a Device.from_kompute$"):
            za.Attention(other).record(None, None, other.new_sequence(), 0)


@pytest.mark.parametrize("most", (4, 64))
def test_a_grid_has_no_more_workgroups_than_the_device(host, rng, monkeypatch, most):
    """Where the nodes of all rows are more, splits have several nodes. Rows that alone are more are refused."""
    manager, device = host
    cache = za.KVCache(device, SHAPE, 1, 4096, "f32", 256)
    seq = cache.new_sequence()
    k, v = rng.standard_normal((2, 1400, SHAPE.kv_heads, SHAPE.head_dim), np.float32)
    cache.append(seq, 0, k, v)
    monkeypatch.setattr(device.runtime, "info", replace(device.info, max_workgroups=(most, 65535, 65535)))
    attn = za.Attention(cache)
    q = rng.standard_normal((3, SHAPE.q_heads, SHAPE.head_dim), np.float32)
    sequence, tensor = manager.sequence(), manager.tensor_t(q.reshape(-1))
    sequence.record(kp.OpTensorSyncDevice([tensor]))
    call = attn.record(sequence, tensor, seq, 0)
    key = call._workspace.key
    assert key.items <= most and key.build == ("loop" if most == 4 else "node")
    with call.step():
        sequence.eval()
    want = za.reference.emulate(q, k, v)[0].reshape(-1)
    assert np.array_equal(call.out.data().view(np.uint32)[: want.size], want.view(np.uint32))
    many = manager.tensor_t(np.zeros(5 * SHAPE.q_heads * SHAPE.head_dim, np.float32))
    if most == 4:
        with pytest.raises(errors.LimitError, match="q: got 5 rows, expected at most 4"):
            attn.record(manager.sequence(), many, seq, 0)
    call.close()
    cache.close()
