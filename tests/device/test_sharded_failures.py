"""What a sharded cache refuses, and that a failed or interrupted call leaves it as it was."""

from typing import Any

import numpy as np
import pytest
from cache_rows import SHARDED as SHAPE
from cache_rows import check_books
from support import differing, raising

import zinc_attn as za
from zinc_attn.cache.mover import RowMover
from zinc_attn.cache.pages import CapacityError, StepError
from zinc_attn.errors import ArgumentError, ClosedError, DeviceMemoryError, LimitError, ShapeError, ValueRangeError

NATIVE = True


def test_the_layers_advance_together(device: za.Device) -> None:
    """With a Sequence's errors (test_pages.py), also where the shard that gets the tokens has none of the step."""
    k, q = np.ones((1024, 2, 64), np.float32), np.ones((6, 64), np.float32)
    with za.ShardedKVCache([device, device], SHAPE, 3, 2048, "f32", weights=[1.0, 1.0]) as cache:
        seq, attn = cache.new_sequence(), za.ShardedAttention(cache)
        cache.append(seq, 0, k[:512], k[:512])
        text = "^layer 1: got 600 tokens at length 0, expected 512, layer 0 has length 512; append "
        for give in (cache.append, lambda *arguments: attn(q, *arguments)):
            with pytest.raises(StepError, match=text):
                give(seq, 1, k[:600], k[:600])
        with pytest.raises(StepError, match=r"^fork: layer 0 has length 512, layer 1 has length 0, expected equal"):
            seq.fork()
        cache.append(seq, 1, k[:512], k[:512])
        same = r"^seq: items 0 and 1 are the same sequence, expected each once where k and v are given; fork\(\) it$"
        with pytest.raises(ArgumentError, match=same):
            attn([q] * 2, [seq, seq], 2, [k[:512]] * 2, [k[:512]] * 2)
        assert (seq.lengths, len(seq)) == ([512, 512, 0], 0)
        cache.append(seq, 2, k[:512], k[:512])
        cache.append(seq, 0, k[512:], k[512:])
        assert not differing(attn(q, seq, 1), k[0].repeat(3, axis=0))  # of a node less than layer 0 has
        seq.truncate(300)
        assert seq.lengths == [300] * 3
        seq.free()
        append, attend = (lambda: cache.append(seq, 0, k, k)), (lambda: attn(q, seq, 0))
        for call in (seq.fork, lambda: seq.truncate(0), append, attend):
            with pytest.raises(ClosedError, match=r"^sequence: used after free\(\)$"):
                call()


def test_a_failed_keep_leaves_nodes_shared(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    k = np.ones((4096, 2, 64), np.float16)
    with za.ShardedKVCache([device, device], SHAPE, 1, 8192, weights=[1.0, 1.0]) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, k, k)
        twin, free = seq.fork(), cache.free_tokens
        with monkeypatch.context() as patch:
            patch.setattr(RowMover, "append", raising(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                seq.keep(range(600, 4096), 4096)
        assert len(seq) == len(twin) == 4096 and cache.free_tokens == free
        seq.keep(range(600, 4096), 4096)
        assert len(seq) == 3496 and free - cache.free_tokens == 7 * 512  # all of its nodes are its own
        check_books(cache, [seq, twin])


def test_close_comes_before_other_errors(device: za.Device) -> None:
    k = np.ones((600, 2, 64), np.float32)
    with za.ShardedKVCache([device] * 2, SHAPE, 2, 2048, "f32", weights=[1.0, 1.0]) as cache:
        attn, seq, even = za.ShardedAttention(cache), cache.new_sequence(), cache.new_sequence()
        fold = za.Fold(device, SHAPE)
        for layer in range(2):
            cache.append(even, layer, k, k)
        parts = [attn._attention[i].partial(k[:6, 0], even.shards[i], 0, nodes=[i], tokens=600) for i in range(2)]
        assert not differing(fold(parts)[0][0], attn(k[:6, 0], even, 0))
        fold.close()
        attn.close()
        attn(k[:6, 0], even, 0)  # what it needs is made anew
        assert attn.fold._workspaces
        cache.append(seq, 0, k, k)
    assert not attn.fold._workspaces
    for call in (
        lambda: cache.append(seq, 0, k, k),
        lambda: attn(k[:6, 0], seq, 0, k, k),
        lambda: attn([], [], 0),
        lambda: za.ShardedAttention(cache),
        lambda: seq.truncate(9),
        cache.new_sequence,
        seq.fork,
        even.fork,
    ):
        with pytest.raises(ClosedError, match=r"^ShardedKVCache: used after close\(\)$"):
            call()
    with pytest.raises(ClosedError, match=r"^Fold: used after close\(\)$"):
        fold(parts)


def test_a_full_shard_is_named(device: za.Device) -> None:
    """Pages of short sequences fill it before nodes do; another one may take their place."""
    k, q = np.ones((200, 2, 64), np.float16), np.ones((6, 64), np.float32)
    with za.ShardedKVCache([device] * 2, SHAPE, 1, 1024, weights=[1.0, 1.0]) as cache:
        attn, seqs = za.ShardedAttention(cache), [cache.new_sequence() for _ in range(5)]
        for seq in seqs[:4]:
            cache.append(seq, 0, k, k)  # a page of 256 each
        full = r"^shard 0 of 2: got 1 of the {} new tokens, .* 0 of its 2 pages of 256 tokens are free, .* larger"
        for new, give in (
            (1, lambda: cache.append(seqs[4], 0, k[:1], k[:1])),
            (2, lambda: attn([q] * 2, seqs[3:], 0, [k[:1]] * 2, [k[:1]] * 2)),
        ):
            used = cache.allocator.used.tolist()
            with pytest.raises(CapacityError, match=full.format(new)):
                give()
            assert [len(seq) for seq in seqs] == [200] * 4 + [0] and cache.allocator.used.tolist() == used
        seqs[2].free()
        cache.append(seqs[4], 0, k[:1], k[:1])
        check_books(cache, [seq for seq in seqs if not seq.closed])


def sharded(devices: Any, shape: Any = SHAPE, **options: Any) -> za.ShardedKVCache:
    return za.ShardedKVCache(devices, shape, 1, 100, **options)


REFUSED = (  # of a constructor, with the device
    *((lambda d, x=x: sharded(x(d)), r"devices: got .*, expected a list of open Devices$")
      for x in (lambda d: [], lambda d: [d, 3])),
    (lambda d: sharded([d], weights=["1"]), r"weights: got .*, expected a list of positive numbers, one "),
    (lambda d: sharded([d], weights=1), r"weights: got .*, expected a list of positive numbers, one "),
    (lambda d: sharded([d], weights=[1, 2]), r"weights: got 2, expected one per device \(1\)"),
    (lambda d: sharded([d], "6/2/64"), "shape: got str, expected an AttnShape$"),
    (lambda d: sharded([d], page_size=1024), "page_size: got 1024"),
    (lambda d: sharded([d], comm=1), r"comm: got 1, expected an mpi4py communicator, such as MPI\.COMM_WORLD$"),
    (lambda d: za.ShardedAttention(za.KVCache(d, SHAPE, 1, 600)),
     "cache: got KVCache, expected a ShardedKVCache; Attention attends"),
    (lambda d: za.Fold(3, SHAPE), "device: got int, expected a Device$"),
    (lambda d: za.Fold(d, 3), "shape: got int, expected an AttnShape$"),
    (lambda d: za.Fold(d, SHAPE)(3), "parts: got int, expected a list of the"),
    (lambda d: za.Fold(d, SHAPE)([3]), "partial states: got int, expected a "),
)  # fmt: skip


def test_refusals(device: za.Device) -> None:
    for make, text in REFUSED:
        with pytest.raises(ArgumentError, match=f"^{text}"):
            make(device)
    za.ShardedKVCache([device] * 2, SHAPE, 1, 1024, weights=np.ones(2, np.float32)).close()  # type: ignore[arg-type]
    with pytest.raises((DeviceMemoryError, LimitError)):
        za.ShardedKVCache([device], za.AttnShape(64, 64, 512), 1000, 1 << 24, "f32")
    with za.ShardedKVCache([device], SHAPE, 1, 600) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        q, k = np.ones((6, 64), np.float32), np.ones((1100, 2, 64), np.float16)
        nan = k.copy()
        nan[600, 1, 3] = np.nan
        assert (cache.capacity, cache.free_tokens, cache.nbytes) == (600, 1024, 1024 * SHAPE.kv_bytes_per_token("f16"))
        beyond = r"got 1,100 tokens at length 0, expected at most 1,024 \(capacity = 600, in whole nodes of 512\); t"
        for keys, values, error, text in (
            (k, k, CapacityError, f"k: {beyond}"),
            (nan, k, ValueRangeError, r"k\[600, 1, 3\]: got nan"),  # as the caller counts, not as the shard does
            (k, k[:-1], ShapeError, r"v: got shape \(1099, 2, 64\), expected k's "),
            (k[:0], k[:0], ShapeError, r"k: got shape \(0, 2, 64\), expected at least one token"),
            (k[..., :8], k, ShapeError, r"k: got shape \(1100, 2, 8\), expected "),
            (k[0, 0, 0], k, ShapeError, r"k: got shape \(\), expected "),
        ):
            for give in (cache.append, lambda *arguments: attn(q, *arguments)):
                with pytest.raises(error, match=f"^{text}"):
                    give(seq, 0, keys, values)
        with pytest.raises(ArgumentError, match=r"^seq: got Sequence, expected a ShardedSequence of this cache"):
            attn(q, seq.shards[0], 0)
        with pytest.raises(ArgumentError, match=r"^k: got None"):
            attn(q, seq, 0, None, k)
        with pytest.raises(ArgumentError, match=r"^causal: got False, expected True"):
            attn(q, seq, 0, k, k, causal=False)
        assert seq.lengths == [0]
        cache.append(seq, 0, k[:9], k[:9])
        with pytest.raises(ArgumentError, match="mask: row 1 sees no key"):
            attn(np.stack([q] * 3), seq, 0, mask=np.arange(27).reshape(3, 9) % 18 < 9)
    with (
        za.ShardedKVCache([device], za.AttnShape(6, 1, 80, 64, latent=True), 1, 600) as cache,
        pytest.raises(ArgumentError, match=r"^v: got an array"),
    ):
        za.ShardedAttention(cache)(np.ones((6, 80), np.float32), cache.new_sequence(), 0, k[:9, :1], k[:9, :1])
