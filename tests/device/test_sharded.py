"""A sequence on several devices: the bits of one device, and nodes where there is room for them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from cache_rows import SHARDED as SHAPE
from cache_rows import Twin, check_books, done_or_not_done, together
from interrupts import Interrupter, files
from support import FULL, raising, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.errors import ArgumentError, DeviceLostError, ValueRangeError

NATIVE = True
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
    most = 6 if any("SwiftShader" in device.info.name for device in devices) else 20  # which takes seconds for 20 rows
    with za.ShardedKVCache(devices, SHAPE, 2, 4096, dtype, 64, weights=weights) as cache:
        twin = Twin(za.ShardedAttention(cache, **some), len(devices), **some)
        for n in (1, 510, 1, 1, 1500, 1, 37, 1649) if FULL else (1, 510, 1, 1, 600, 1, 37, 889):  # of 4 nodes and more
            twin.step(n, min(n, most))
        counts = [len(shard) for shard in twin.sequence.shards.values()]
        assert sum(counts) == len(twin) and all(counts)
        twin.truncate(1111)
        twin.look()


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


@contextmanager
def cut_short(attn: za.ShardedAttention, runtime: Any, rng: np.random.Generator, cuts: Counter[str]) -> Iterator[None]:
    """Often a call within fails, as on a lost device in a submission or the fold, or is interrupted at an opcode."""
    lost = raising(DeviceLostError)
    cut = str(rng.choice(["none", "submission", "fold", "opcode", "opcode"]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            if cut == "submission":
                patch.setattr(runtime, "start", lost)
            if cut == "fold":
                patch.setattr(type(attn.fold), "__call__", lost)
            with Interrupter(files("distributed"), *[int(rng.integers(4000))] * (cut == "opcode")).armed():
                yield
    except (DeviceLostError, KeyboardInterrupt):
        cuts[cut] += 1


@pytest.mark.parametrize("some", ({**WINDOW, "window": 700, "softcap": 9.0}, *[{}] * FULL), ids=len)
@pytest.mark.parametrize("seed", range(4 if FULL else 1))
def test_what_fits_the_capacity_fits_the_shards(device: za.Device, seed: int, some: dict[str, Any]) -> None:
    """Whatever was appended, cut, kept, forked and freed before; batches have the bits of each sequence alone.

    A call that is cut short is done or not done, in all sequences of a batch alike.
    """
    rng, most, kept, batches, cuts = np.random.default_rng(seed), 14, 0, 0, Counter[str]()
    with za.ShardedKVCache([device] * 3, SHAPE, 1, most * 512, page_size=64, weights=[4.0, 2.0, 1.0]) as cache:
        attn, live = za.ShardedAttention(cache, **some), list[Twin]()
        assert attn([], [], 0) == []
        for step in range(1000 if FULL else 400):
            action = rng.choice([*["batch", "append"] * 3, *["new", "fork", "free", "cut", "keep"] * 2])
            used = check_books(cache, [twin.sequence for twin in live])
            if not live or action == "new":
                live.append(Twin(attn, step, **some))
                continue
            index = int(rng.integers(len(live)))
            twin = live[index]
            held, n = twin.sequence.held, int(rng.integers(len(twin) + 1))
            if action == "free":
                if rng.random() < 0.5:
                    twin.sequence.free()
                del live[index], twin
            elif action in ("fork", "cut"):
                if action == "fork" or any(map(cache.allocator.is_shared, held[n // 512 :])):
                    n = n // 512 * 512
                twin.truncate(n)
                if action == "fork":
                    live.append(twin.fork())
            elif action == "keep":
                pages = min(shard.pool.free_pages for shard in cache.shards.values())
                last = min(n, 1400, max(pages - 1, 0) * 64)
                if not any(map(cache.allocator.is_shared, held)):
                    chosen = np.sort(rng.choice(last, int(rng.integers(last + 1)), replace=False))
                    with cut_short(attn, device.runtime, rng, cuts), done_or_not_done([twin]):
                        twin.keep(chosen.tolist(), last)
                    twin.look()
                    kept += len(chosen)
            elif action == "batch":
                count = int(rng.choice([1, 40])) if used + len(live) <= most else 0
                batch = [twin for twin in live if count or len(twin)]
                with cut_short(attn, device.runtime, rng, cuts), done_or_not_done(batch):
                    together(batch, [count] * len(batch), [1 + (count > 1)] * len(batch))
                batches += len(batch) > 2
            elif room := (most - used + len(held)) * 512 - len(twin):
                twin.append(min(int(rng.choice([1, 30, 511, 1300, 7000])), room))
            twin = batch = None
        for twin in live:
            twin.look(3)
        assert kept > 100 and batches > 1 and min(cuts[cut] for cut in ("submission", "fold", "opcode")) > 1, cuts


def test_rows_that_come_to_another_shard_count_there(device: za.Device, rng: np.random.Generator) -> None:
    """K of 2**60, from the second node to the first one, and to the front of it."""
    k, q = rng.standard_normal((600, 2, 64), np.float32), np.full((6, 64), 2.0**60, np.float32)
    k[580] = 2.0**60
    with za.ShardedKVCache([device] * 2, SHAPE, 1, 2048, "f32") as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        cache.append(seq, 0, k, k)
        seq.keep([3, 7, 580], 600)
        seq.keep([1, 2], 3)
        assert [len(shard) for shard in seq.shards.values()] == [2, 0]
        with pytest.raises(ValueRangeError, match=r"max\|k\| = 1\.15292e\+18"):
            attn(q, seq, 0)
        seq.truncate(1)
        same(attn(q, seq, 0, return_lse=True), reference.emulate(q, k[7:8], k[7:8]))


def test_rows_of_any_number_share_the_folds_buffers(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    k = rng.standard_normal((1100, 2, 64)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    with za.KVCache(device, SHAPE, 1, 2048, "f32") as cache:
        attn, seq, fold = za.Attention(cache, sinks=sinks), cache.new_sequence(), za.Fold(device, SHAPE)
        cache.append(seq, 0, k, k)
        buffers: list[int] = []
        buffer = device.runtime.buffer
        monkeypatch.setattr(device.runtime, "buffer", lambda *a, **o: (buffers.append(1), buffer(*a, **o))[1])
        for most in (1 << 20, 7):  # partial states of one submission
            fold.max_states = most
            for n in (22, 32, 27, 30):
                q = rng.standard_normal((n, 6, 64)).astype(np.float32)
                state = attn.partial(q, seq, 0)
                before = len(buffers)
                same(fold([state]), reference.emulate(q, k, k, sinks=sinks), (most, n))
                assert n == 22 or most == 7 or len(buffers) == before
        fold.close()
