"""A sequence on several devices: the bits of one device, and nodes where there is room for them."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from cache_rows import Twin, together
from sharded import SHAPE, check_books
from support import FULL, differing, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.errors import ArgumentError, DeviceLostError, ZincAttnError

DEVICES = {
    "two runtimes": (("default", "vulkan"), ("default", "kompute")),
    **({"default and swiftshader": (("default", "vulkan"), ("swiftshader", "vulkan"))} if FULL else {}),
    # SwiftShader takes a second for what lavapipe takes a tenth for: in third place its weights are the least
    "swiftshader and two runtimes": (("default", "vulkan"), ("default", "kompute"), ("swiftshader", "vulkan")),
}


@pytest.fixture(scope="module")
def devices(request: pytest.FixtureRequest, device_of: Callable[[str, str], za.Device]) -> list[za.Device]:
    return [device_of(*name) for name in DEVICES[request.param]]


WINDOW = {"window": 900, "sinks": np.linspace(-2, 5, 6, dtype=np.float32)}


TWO, *_, THREE = DEVICES
CALLS = [*product(DEVICES, ("f16", "q8_0"), ({}, WINDOW))] if FULL else ((TWO, "q8_0", WINDOW), (THREE, "f16", {}))


@pytest.mark.parametrize(("devices", "dtype", "some"), CALLS, indirect=["devices"])
def test_the_bits_of_one_device(devices: list[za.Device], dtype: str, some: dict[str, Any]) -> None:
    weights = [3.0, 1.0, 2.0][: len(devices)]
    most = 6 if any("SwiftShader" in one.info.name for one in devices) else 20  # which takes seconds for 20 rows
    with za.ShardedKVCache(devices, SHAPE, 2, 4096, dtype, 64, weights=weights) as cache:
        one = Twin(za.ShardedAttention(cache, **some), len(devices), **some)
        for n in (1, 510, 1, 1, 1500, 1, 37, 1649) if FULL else (1, 510, 1, 1, 600, 1, 37, 889):  # of 4 nodes and more
            one.step(n, min(n, most))
        counts = [len(shard) for shard in one.sequence.shards.values()]
        assert sum(counts) == len(one) and all(counts)
        one.truncate(1111)
        one.look()


def test_results_go_to_arrays_of_the_caller(device: za.Device, rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 600, 2, 64), np.float32)
    q = [rng.standard_normal((n, 6, 64), np.float32) for n in (1, 3)]
    with za.ShardedKVCache([device] * 2, SHAPE, 1, 2048, "f32") as cache:
        attn, seqs = za.ShardedAttention(cache), [cache.new_sequence() for _ in q]
        outs, lses = [np.full(x.shape, 7, np.float32) for x in q], [np.full(x.shape[:2], 7, np.float32) for x in q]
        for wrong, n, text in (
            ({"out": outs[:1]}, 600, "out: "),
            ({"out": outs, "lse": [lses[0], lses[0]]}, 600, "lse: "),
            ({"out": outs}, 2, "q: got 3 rows for 2 keys, 1 of them before the first key, "),
        ):
            with pytest.raises(ArgumentError, match=f"^{text}"):
                attn(q, seqs, 0, [k, k[:n]], [v, v[:n]], **wrong)
            assert all(np.all(x == 7) for x in (*outs, *lses)) and not any(map(len, seqs))
        got = attn(q, seqs, 0, [k, k[:2]], [v, v[:2]], return_lse=True, out=outs, lse=lses, allow_empty=True)
        assert all(a is b for a, b in zip((*got[0], *got[1]), (*outs, *lses), strict=True))
        for i, n in enumerate((600, 2)):
            same((outs[i], lses[i]), reference.emulate(q[i], k[:n], v[:n]))


@pytest.mark.parametrize("some", ({**WINDOW, "window": 700, "softcap": 9.0}, *[{}] * FULL), ids=len)
@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_what_fits_the_capacity_fits_the_shards(device: za.Device, seed: int, some: dict[str, Any]) -> None:
    """Whatever was appended, cut, kept, forked and freed before; batches have the bits of each sequence alone."""
    rng, most, kept, batches = np.random.default_rng(seed), 14, 0, 0
    with za.ShardedKVCache([device] * 3, SHAPE, 1, most * 512, page_size=64, weights=[4.0, 2.0, 1.0]) as cache:
        attn, live = za.ShardedAttention(cache, **some), list[Twin]()
        assert attn([], [], 0) == []
        for step in range(400 if FULL else 150):
            action = rng.choice(
                ["new", "free", "free", "fork", "cut", "cut", "keep", "keep", "batch", "append", "append"]
            )
            used = check_books(cache, [one.sequence for one in live])
            if not live or action == "new":
                live.append(Twin(attn, step, **some))
                continue
            at = int(rng.integers(len(live)))
            one = live[at]
            held, n = one.sequence.held, int(rng.integers(len(one) + 1))
            if action == "free":
                if rng.random() < 0.5:
                    one.sequence.free()
                del live[at], one
            elif action in ("fork", "cut"):
                if action == "fork" or any(map(cache.allocator.is_shared, held[n // 512 :])):
                    n = n // 512 * 512
                one.truncate(n)
                if action == "fork":
                    live.append(one.fork())
            elif action == "keep":
                pages = min(shard.pool.free_pages for shard in cache.shards.values())
                last = min(n, 1400, max(pages - 1, 0) * 64)
                if not any(map(cache.allocator.is_shared, held)):
                    chosen = np.sort(rng.choice(last, int(rng.integers(last + 1)), replace=False))
                    one.keep(chosen.tolist(), last)
                    one.look()
                    kept += len(chosen)
            elif action == "batch":
                count = int(rng.choice([1, 40])) if used + len(live) <= most else 0
                batch = [one for one in live if count or len(one)]
                together(batch, [count] * len(batch), [1 + (count > 1)] * len(batch))
                batches += len(batch) > 2
            elif room := (most - used + len(held)) * 512 - len(one):
                one.append(min(int(rng.choice([1, 30, 511, 1300, 7000])), room))
            one = batch = None
        for one in live:
            one.look(3)
        assert kept > 100 and batches > 1, (kept, batches)


def lost(*_: Any) -> None:
    raise DeviceLostError("injected")


@pytest.mark.parametrize("devices", DEVICES if FULL else [TWO], indirect=True)
def test_a_batch_counts_in_whole_or_not(devices: list[za.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    k = rng.standard_normal((1400, 2, 64)).astype(np.float32)
    q = rng.standard_normal((6, 64)).astype(np.float32)
    with za.ShardedKVCache(devices, SHAPE, 1, 16 * 512, "f32", weights=[1.0] * len(devices)) as cache:
        attn, root = za.ShardedAttention(cache), cache.new_sequence()
        cache.append(root, 0, k[:600], k[:600])
        seqs = [root, root.fork(), cache.new_sequence()]
        nan = k[600:].copy()
        nan[2] = np.nan
        for bad, text, *fails in (
            (nan, r"^k\[2, 0, 0\]: got nan"),
            (k[:, :1], r"^k: got shape \(1400, 1, 64\)"),
            (k[600:], "^injected$", type(attn.fold), "__call__"),
            (k[600:], "^injected$", devices[-1].runtime, "start"),
        ):
            with monkeypatch.context() as patch, pytest.raises(ZincAttnError, match=text):
                if fails:
                    patch.setattr(*fails, lost)
                attn([q] * 3, seqs, 0, [k[600:], k[600:], bad], [k[600:], k[600:], bad])
            assert [len(seq) for seq in seqs] == [600, 600, 0]
            assert [sum(map(len, seq.shards.values())) for seq in seqs] == [600, 600, 0]
            assert check_books(cache, seqs) == 3
        more = [k[600:700], k[600:], k]
        for got, n in zip(attn([q] * 3, seqs, 0, more, more), (700, 1400, 1400), strict=True):
            assert not differing(got, reference.emulate(q, k[:n], k[:n])[0])


def test_rows_of_any_number_share_the_folds_buffers(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    k = rng.standard_normal((1100, 2, 64)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    with za.KVCache(device, SHAPE, 1, 2048, "f32") as cache:
        attn, seq, fold = za.Attention(cache, sinks=sinks), cache.new_sequence(), za.Fold(device, SHAPE)
        cache.append(seq, 0, k, k)
        made: list[int] = []
        buffer = device.runtime.buffer
        monkeypatch.setattr(device.runtime, "buffer", lambda *a, **o: (made.append(1), buffer(*a, **o))[1])
        for most in (1 << 20, 7):  # partial states of one submission
            fold.max_states = most
            for n in (22, 32, 27, 30):
                q = rng.standard_normal((n, 6, 64)).astype(np.float32)
                state = attn.partial(q, seq, 0)
                before = len(made)
                same(fold([state]), reference.emulate(q, k, k, sinks=sinks), (most, n))
                assert n == 22 or most == 7 or len(made) == before
        fold.close()
