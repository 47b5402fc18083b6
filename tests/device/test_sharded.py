"""A sequence on several devices: the bits of one device, nodes where there is room for them, refusals and failures."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from cache_rows import Twin, check_books, done_or_not_done, filled, together
from interrupts import Interrupter, files
from support import FULL, differing, raising, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache.mover import RowMover
from zinc_attn.cache.pages import CapacityError, StepError
from zinc_attn.errors import ArgumentError, ClosedError, DeviceLostError, DeviceMemoryError, LimitError, ValueRangeError

NATIVE = True
SHAPE = za.AttnShape(6, 2, 64)
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
    outs, lses = [np.zeros_like(x) for x in q], [np.zeros(x.shape[:2], np.float32) for x in q]
    with za.ShardedKVCache([device] * 2, SHAPE, 1, 2048, "f32") as cache:
        attn, seqs = za.ShardedAttention(cache), [cache.new_sequence() for _ in q]
        for arrays, n, text in (
            ({"out": outs[:1]}, 600, "out: "),
            ({"out": outs, "lse": [lses[0], lses[0]]}, 600, "lse: "),
            ({"out": outs, "lse": lses}, 2, "q: got 3 rows for 2 keys, 1 of them before the first key, "),
        ):
            with pytest.raises(ArgumentError, match=f"^{text}"):
                attn(q, seqs, 0, [k, k[:n]], [v, v[:n]], **arrays)
            assert not any(x.any() for x in (*outs, *lses)) and not any(map(len, seqs))
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


def test_a_fold_keeps_its_buffers_until_it_is_closed(
    device: za.Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of about as many rows share them; a call may have more states than a submission takes."""
    k, q = rng.standard_normal((1100, 2, 64), np.float32), rng.standard_normal((30, 6, 64), np.float32)
    sinks = rng.standard_normal(6, np.float32)
    with filled(device, SHAPE, k, k, "f32") as (cache, seq):
        attn, fold = za.Attention(cache, sinks=sinks), za.Fold(device, SHAPE)
        states = [attn.partial(q[:n], seq, 0) for n in (30, 27)]
        wants = [reference.emulate(q[:n], k, k, sinks=sinks) for n in (30, 27)]
        same(fold(states[:1]), wants[0])
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime, "buffer", lambda *_: pytest.fail("made again"))
            same(fold(states[1:]), wants[1])
        fold.max_states = 7  # of 90
        same(fold(states[:1]), wants[0])
        fold.close()
        assert not fold._workspaces
    with pytest.raises(ClosedError, match=r"^Fold: used after close\(\)$"):
        fold(states)


# --- refusals and failures ----------------------------------------------------------------------------------


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
    with za.ShardedKVCache([device, device], SHAPE, 1, 8192, weights=np.ones(2)) as cache:  # type: ignore[arg-type]
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


def sharded(devices: Any, **options: Any) -> za.ShardedKVCache:
    return za.ShardedKVCache(devices, SHAPE, 1, 100, **options)


REFUSED = (  # of a constructor, with the device
    (lambda d: sharded([]), r"devices: got \[\], expected a list of open Devices$"),
    (lambda d: sharded([d], weights=1), r"weights: got 1, expected a list of positive numbers, one per device$"),
    (lambda d: sharded([d], weights=[1, 2]), r"weights: got 2, expected one per device \(1\)"),
    (lambda d: sharded([d], page_size=1024), "page_size: got 1024"),
    (lambda d: sharded([d], comm=1), r"comm: got 1, expected an mpi4py communicator, such as MPI\.COMM_WORLD$"),
    (lambda d: za.ShardedAttention(za.KVCache(d, SHAPE, 1, 600)),
     "cache: got KVCache, expected a ShardedKVCache; Attention attends"),
    (lambda d: za.Fold(d, SHAPE)([3]), "partial states: got int, expected a "),
)  # fmt: skip


def test_refusals(device: za.Device) -> None:
    for make, text in REFUSED:
        with pytest.raises(ArgumentError, match=f"^{text}"):
            make(device)
    with pytest.raises((DeviceMemoryError, LimitError)):
        za.ShardedKVCache([device], za.AttnShape(64, 64, 512), 1000, 1 << 24, "f32")
    with za.ShardedKVCache([device], SHAPE, 1, 600) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        q, k = np.ones((6, 64), np.float32), np.ones((1100, 2, 64), np.float16)
        nan = k.copy()
        nan[600, 1, 3] = np.nan
        assert repr(seq) == "ShardedSequence(serial=0, 0 tokens)"
        text = f"ShardedKVCache(6/2/64, f16, 1 layers, capacity=600 tokens, 1 shards: {[*cache.shards.values()]})"
        assert repr(cache) == text
        assert (cache.capacity, cache.free_tokens, cache.nbytes) == (600, 1024, 1024 * SHAPE.kv_bytes_per_token("f16"))
        beyond = r"got 1,100 tokens at length 0, expected at most 1,024 \(capacity = 600, in whole nodes of 512\); t"
        for keys, values, error, text in (
            (k, k, CapacityError, f"k: {beyond}"),
            (nan, k, ValueRangeError, r"k\[600, 1, 3\]: got nan"),  # as the caller counts, not as the shard does
        ):
            for give in (cache.append, lambda *arguments: attn(q, *arguments)):
                with pytest.raises(error, match=f"^{text}"):
                    give(seq, 0, keys, values)
        with pytest.raises(ArgumentError, match=r"^seq: got Sequence, expected a ShardedSequence of this cache"):
            attn(q, seq.shards[0], 0)
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
