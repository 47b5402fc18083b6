"""A sequence on several devices or ranks: the bits of one device, and an error where that cannot be."""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import Interrupter, files, moments
from support import FULL, differing, open_device

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows
from zinc_attn.cache.pages import CapacityError, StepError
from zinc_attn.cli import app as cli
from zinc_attn.cli.sweep import measure
from zinc_attn.distributed.nodes import deal
from zinc_attn.distributed.ranks import LOST_STATUS
from zinc_attn.errors import ArgumentError, ClosedError, DeviceMemoryError, ZincAttnError
from zinc_attn.tools.sweep import SweepSpec, distributed_sweep

SHAPE = za.AttnShape(6, 2, 64)


DEVICES = {
    "two runtimes": (("default", "vulkan"), ("default", "kompute")),
    **({"default and swiftshader": (("default", "vulkan"), ("swiftshader", "vulkan"))} if FULL else {}),
    # SwiftShader takes a second for what lavapipe takes a tenth for: in third place its weights are the least
    "swiftshader and two runtimes": (("default", "vulkan"), ("default", "kompute"), ("swiftshader", "vulkan")),
}


@pytest.fixture(scope="module", params=DEVICES)
def devices(request: pytest.FixtureRequest, device_of: Callable[[str, str], za.Device]) -> list[za.Device]:
    return [device_of(*name) for name in DEVICES[request.param]]


WINDOW = {"window": 900, "sinks": np.linspace(-2, 5, 6, dtype=np.float32)}


@pytest.mark.parametrize(
    ("dtype", "some"), (("f16", {}), ("q8_0", WINDOW), *((("f16", WINDOW), ("q8_0", {})) if FULL else ()))
)
def test_the_bits_of_one_device(devices: list[za.Device], dtype: str, some: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(devices))
    k, v = (rng.standard_normal((3700, 2, 64)).astype(np.float16) for _ in "kv")
    exact = rows.stored(k, v, dtype)
    weights = [3.0, 1.0, 2.0][: len(devices)]
    most = 6 if any("SwiftShader" in one.info.name for one in devices) else 20  # which takes seconds for 20 rows
    with za.ShardedKVCache(devices, SHAPE, 2, 4096, dtype, 64, weights=weights) as cache:
        attn, seq, at = za.ShardedAttention(cache, **some), cache.new_sequence(), 0
        for n in (1, 510, 1, 1, 1500, 1, 37, 1649) if FULL else (1, 510, 1, 1, 600, 1, 37, 889):  # of 4 nodes and more
            for layer in range(2):
                q = rng.standard_normal((min(n, most), 6, 64)).astype(np.float32)
                got = attn(q, seq, layer, k[at : at + n], v[at : at + n], return_lse=True)
                want = reference.emulate(q, exact[0][: at + n], exact[1][: at + n], **some)
                assert not differing(got[0], want[0]) and not differing(got[1], want[1]), (at, n)
            at += n
        assert len(seq) == at
        counts = [len(one) for one in seq.shards.values()]
        assert sum(counts) == at and all(counts)
        seq.truncate(1111)
        q = rng.standard_normal((6, 64)).astype(np.float32)
        want = reference.emulate(q, exact[0][:1111], exact[1][:1111], **some)
        assert not differing(attn(q, seq, 1), want[0])


@pytest.mark.parametrize("text", ("6/2/40/72", "6/1/80/64/latent"))
def test_masks_slopes_and_a_v_that_is_not_like_k(device: za.Device, rng: np.random.Generator, text: str) -> None:
    shape, n, alibi = za.AttnShape.parse(text), 1300, np.exp2(-np.arange(6)).astype(np.float32)
    k = rng.standard_normal((n, shape.kv_heads, shape.head_dim)).astype(np.float16)
    v = k[..., :64] if shape.latent else rng.standard_normal((n, 2, 72)).astype(np.float16)
    given = (k,) if shape.latent else (k, v)
    q = rng.standard_normal((3, 6, shape.head_dim)).astype(np.float32)
    mask = rng.random((3, 800)) < 0.6
    with za.ShardedKVCache([device] * 2, shape, 1, 2048, "f16") as cache:
        attn, seq = za.ShardedAttention(cache, alibi=alibi), cache.new_sequence()
        cache.append(seq, 0, *(x[:1290] for x in given))
        got = attn(q, seq, 0, *(x[1290:] for x in given), return_lse=True, mask=mask)
        for one, want in zip(got, reference.emulate(q, k, v, alibi=alibi, mask=mask), strict=True):
            assert not differing(one, want)
        blind = np.ones((3, n), bool)
        blind[1] = False
        with pytest.raises(ArgumentError, match="mask: row 1 sees no key"):
            attn(q, seq, 0, mask=blind)
        with pytest.raises(ArgumentError, match="^v: got an array" if shape.latent else "^k: got None"):
            attn(q, seq, 0, None, v)


def test_results_go_to_arrays_of_the_caller(device: za.Device, rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 600, 2, 64), np.float32)
    q = [rng.standard_normal((n, 6, 64), np.float32) for n in (1, 3)]
    with za.ShardedKVCache([device] * 2, SHAPE, 1, 2048, "f32") as cache:
        attn, seqs = za.ShardedAttention(cache), [cache.new_sequence() for _ in q]
        outs, lses = [np.full(x.shape, 7, np.float32) for x in q], [np.full(x.shape[:2], 7, np.float32) for x in q]
        for wrong, named in (({"out": outs[:1]}, "out"), ({"out": outs, "lse": [lses[0], lses[0]]}, "lse")):
            with pytest.raises(ArgumentError, match=f"^{named}: "):
                attn(q, seqs, 0, [k, k], [v, v], **wrong)
            assert all(np.all(x == 7) for x in (*outs, *lses)) and not any(map(len, seqs))
        with pytest.raises(ArgumentError, match=r"^q: got 3 rows for 2 keys, 1 of them before the first key, "):
            attn(q, seqs, 0, [k, k[:2]], [v, v[:2]], out=outs)
        assert all(np.all(x == 7) for x in outs) and not any(map(len, seqs))
        got = attn(q, seqs, 0, [k, k[:2]], [v, v[:2]], return_lse=True, out=outs, lse=lses, allow_empty=True)
        assert all(a is b for a, b in zip((*got[0], *got[1]), (*outs, *lses), strict=True))
        for i, n in enumerate((600, 2)):
            want = reference.emulate(q[i], k[:n], v[:n])
            assert not differing(outs[i], want[0]) and not differing(lses[i], want[1])


def test_dealing_keeps_the_shares() -> None:
    owners = deal(1000, [3.0, 1.0, 4.0])
    for n in range(1, 1000, 37):
        counts = np.bincount(owners[:n], minlength=3)
        assert np.all(np.abs(counts - n * np.array([3, 1, 4]) / 8) <= 1.5)
    for bad in ([], [1.0, 0.0], [float("nan")]):
        with pytest.raises(ArgumentError, match=r"^weights: got "):
            deal(5, bad)


def check_books(cache: za.ShardedKVCache, live: list[za.ShardedSequence]) -> int:
    """Nodes that ``live``, all sequences of the cache, have: the allocator and the shards have counted the same."""
    gc.collect()
    holders = Counter(node for seq in live for node in seq.held)
    assert all(cache.allocator.is_shared(node) == (count > 1) for node, count in holders.items())
    assert cache.allocator.used.tolist() == [sum(node.shard == i for node in holders) for i in cache.shards]
    for shard, one in cache.shards.items():
        one.pool.check([seq.shards[shard].pages for seq in live])
    return len(holders)


def test_short_sequences_fill_the_shards_by_weight(device: za.Device) -> None:
    """Also where others went: by ``free`` or dropped."""
    with za.ShardedKVCache([device] * 3, SHAPE, 1, 16 * 512, "f32", weights=[1.0, 2.0, 5.0]) as cache:
        k = np.ones((600, 2, 64), np.float32)
        assert [cache.shards[i].capacity for i in range(3)] == [1024, 2048, 5120]
        held = []
        for n in [1] * 8 + [600] * 4:
            held.append(cache.new_sequence())
            cache.append(held[-1], 0, k[:n], k[:n])
            if len(held) == 8:
                assert cache.allocator.used.tolist() == [1, 2, 5]
        assert cache.allocator.used.tolist() == [2, 4, 10]
        held[0].free()
        del held[5:9]
        assert check_books(cache, held[1:]) == 10
        for _ in range(6):
            held.append(cache.new_sequence())
            cache.append(held[-1], 0, k[:3], k[:3])
        assert check_books(cache, held[1:]) == 16
        assert cache.allocator.used.tolist() == [2, 4, 10]


@pytest.mark.parametrize("seed", range(3 if FULL else 1))
def test_what_fits_the_capacity_fits_the_shards(device: za.Device, seed: int) -> None:
    """Whatever was appended, cut, forked and freed before."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((2, 3000, 1, 64)).astype(np.float16)
    cache = za.ShardedKVCache([device] * 3, za.AttnShape(3, 1, 64), 1, 14 * 512, page_size=64, weights=[4.0, 2.0, 1.0])
    attn, most, kept = za.ShardedAttention(cache), 14, 0
    with cache:
        live: list[tuple[za.ShardedSequence, np.ndarray[Any, Any]]] = []  # with the numbers of their tokens' rows
        for _ in range(200 if FULL else 30):
            action, at = rng.integers(8), int(rng.integers(max(len(live), 1)))
            used = check_books(cache, [seq for seq, _ in live])
            if not live or action == 0:
                live.append((cache.new_sequence(), np.zeros(0, np.int64)))
            elif action == 1:
                seq, have = live.pop(at)
                if rng.random() < 0.5:
                    seq.free()
                del seq
            elif action in (2, 3):
                seq, have = live[at]
                n = int(rng.integers(len(seq) + 1))
                if action == 2 or any(map(cache.allocator.is_shared, seq.held[n // 512 :])):
                    n = n // 512 * 512
                seq.truncate(n)
                live[at] = seq, have[:n]
                if action == 2:
                    live.append((seq.fork(), have[:n]))
            elif action == 4:
                seq, have = live[at]
                last = int(rng.integers(min(len(seq), 1400) + 1))
                keep = np.sort(rng.choice(last, int(rng.integers(last + 1)), replace=False))
                pages = [one.pool.free_pages for one in cache.shards.values()]
                if min(pages) * 64 > last and not any(map(cache.allocator.is_shared, seq.held)):
                    seq.keep(keep, last)
                    kept += len(keep)
                    have = np.concatenate([have[: len(have) - last], have[len(have) - last :][keep]])
                    live[at] = seq, have
            elif action > 4:
                seq, have = live[at]
                room = (most - used + len(seq.held)) * 512 - len(seq)
                n = min(int(rng.choice([1, 30, 511, 1300, 7000])), room)
                if n:
                    new = rng.integers(0, 3000, n)
                    cache.append(seq, 0, *k[:, new])
                    live[at] = seq, np.concatenate([have, new])
        q = rng.standard_normal((len(live), 3, 64)).astype(np.float32)
        found = attn(list(q), [seq for seq, _ in live], 0, allow_empty=True)
        for got, one, (_, rows) in zip(found, q, live, strict=True):
            assert not differing(got, reference.emulate(one, *k[:, rows])[0])
        assert kept > 100


def test_a_full_shard_is_named(device: za.Device) -> None:
    k = np.ones((1500, 2, 64), np.float32)
    with za.ShardedKVCache([device, device], SHAPE, 2, 1024, "f32", weights=[1.0, 1.0]) as cache:
        attn, held = za.ShardedAttention(cache), [cache.new_sequence() for _ in range(5)]
        for layer in range(2):
            for seq in held[:4]:
                cache.append(seq, layer, k[:200], k[:200])  # more sequences than nodes: each takes a page of 256
        full = (
            r"^shard 0 of 2: got 1 of the {} new tokens, expected what it has room for: 0 of its 2 pages of 256 tokens "
            r"are free, and a sequence takes whole pages; truncate\(\) or free\(\) sequences, or make a larger cache$"
        )
        for layer in range(2):
            with pytest.raises(CapacityError, match=full.format(1)):
                cache.append(held[4], layer, k[:1], k[:1])
            with pytest.raises(CapacityError, match=full.format(2)):
                attn([k[:6, 0]] * 2, [held[3], held[4]], layer, [k[:1]] * 2, [k[:1]] * 2)
        assert [seq.lengths for seq in held] == [[200, 200]] * 4 + [[0, 0]]
        assert check_books(cache, held) == 4
        held[2].free()
        cache.append(held[4], 1, k[:1], k[:1])


def test_the_layers_advance_together(device: za.Device) -> None:
    """With a Sequence's errors, also where the shard that gets the tokens has none of the step."""
    k = np.ones((1024, 2, 64), np.float32)
    with (
        za.KVCache(device, SHAPE, 3, 2048, "f32") as one,
        za.ShardedKVCache([device, device], SHAPE, 3, 2048, "f32", weights=[1.0, 1.0]) as two,
    ):
        whole, seq, attn = one.new_sequence(), two.new_sequence(), za.ShardedAttention(two)
        for cache, sequence in ((one, whole), (two, seq)):
            cache.append(sequence, 0, k[:512], k[:512])
        for layer, n in ((0, 512), (1, 100), (1, 600)):
            with pytest.raises(StepError) as expected:
                one.append(whole, layer, k[:n], k[:n])
            with pytest.raises(StepError, match=f"^{re.escape(str(expected.value))}$"):
                two.append(seq, layer, k[:n], k[:n])
            with pytest.raises(StepError, match=f"^{re.escape(str(expected.value))}$"):
                attn(k[:6, 0], seq, layer, k[:n], k[:n])
        for sequence in (whole, seq):
            with pytest.raises(StepError, match=r"^fork: layer 0 has length 512, layer 1 has length 0, expected equal"):
                sequence.fork()
        two.append(seq, 1, k[:512], k[:512])
        same = r"^seq: items 0 and 1 are the same sequence, expected each once where k and v are given; fork\(\) it$"
        with pytest.raises(ArgumentError, match=same):
            attn([k[:6, 0]] * 2, [seq, seq], 2, [k[:512]] * 2, [k[:512]] * 2)
        assert (seq.lengths, len(seq)) == ([512, 512, 0], 0)
        two.append(seq, 2, k[:512], k[:512])
        two.append(seq, 0, k[512:], k[512:])
        seq.truncate(300)
        assert seq.lengths == [300] * 3
        seq.free()
        for call in (
            seq.fork,
            lambda: seq.truncate(0),
            lambda: two.append(seq, 0, k, k),
            lambda: attn(k[:6, 0], seq, 0),
        ):
            with pytest.raises(ClosedError, match=r"^sequence: used after free\(\)$"):
                call()


@pytest.mark.parametrize(
    "some", ({}, {"window": 700, "softcap": 9.0, "sinks": np.linspace(-2, 5, 6, dtype=np.float32)})
)
def test_forks_and_batches_have_the_bits_of_each_alone(devices: list[za.Device], some: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((5000, 2, 64)).astype(np.float16) for _ in "kv")
    with za.ShardedKVCache(devices, SHAPE, 2, 12 * 512, weights=[2.0, 3.0, 1.0][: len(devices)]) as cache:
        attn, root = za.ShardedAttention(cache, **some), cache.new_sequence()
        for layer in range(2):
            cache.append(root, layer, k[:700], v[:700])
        seqs = [root, root.fork(), root.fork(), cache.new_sequence()]
        have = [np.arange(700)] * 3 + [np.zeros(0, np.int64)]
        for counts in ((1, 1, 400, 3), (2, 500, 1, 600), (1, 1, 1, 1)):
            new = [rng.integers(0, 5000, n) for n in counts]
            have = [np.concatenate(pair) for pair in zip(have, new, strict=True)]
            q = [rng.standard_normal((min(n, 3), 6, 64)).astype(np.float32) for n in counts]
            q[0] = q[0][0]
            for layer in range(2):
                rows_k, rows_v = [k[rows] for rows in new], [v[rows] for rows in new]
                outs, lses = attn(q, seqs, layer, rows_k, rows_v, return_lse=True)
                for one, rows, out, lse in zip(q, have, outs, lses, strict=True):
                    want = reference.emulate(one, k[rows], v[rows], **some)
                    assert out.shape == one.shape and not differing(out, want[0]) and not differing(lse, want[1])
        root.free()
        outs = attn([q[1], q[1], q[2]], [seqs[1], seqs[1], seqs[2]], 0)
        for one, rows, out in zip((q[1], q[1], q[2]), (have[1], have[1], have[2]), outs, strict=True):
            assert not differing(out, reference.emulate(one, k[rows], v[rows], **some)[0])
        assert attn([], [], 0) == []
        assert check_books(cache, seqs[1:]) == 1 + 2 + 2 + 2


class FailingFold:
    """A Folder that fails."""

    def __call__(self, parts: Any) -> Any:
        raise za.errors.DeviceLostError("injected")

    def release(self) -> None:
        pass


def test_a_batch_counts_in_whole_or_not(devices: list[za.Device]) -> None:
    rng = np.random.default_rng(6)
    k = rng.standard_normal((1400, 2, 64)).astype(np.float32)
    q = rng.standard_normal((6, 64)).astype(np.float32)
    with za.ShardedKVCache(devices, SHAPE, 1, 16 * 512, "f32", weights=[1.0] * len(devices)) as cache:
        attn, root = za.ShardedAttention(cache), cache.new_sequence()
        cache.append(root, 0, k[:600], k[:600])
        seqs = [root, root.fork(), cache.new_sequence()]
        nan = k[600:].copy()
        nan[2] = np.nan
        fold = attn.fold
        for bad, text, call in (
            (nan, r"^k\[2, 0, 0\]: got nan", fold),
            (k[:, :1], r"^k: got shape \(1400, 1, 64\)", fold),
            (k[600:], "^injected$", FailingFold()),
        ):
            attn.fold = call
            with pytest.raises(ZincAttnError, match=text):
                attn([q] * 3, seqs, 0, [k[600:], k[600:], bad], [k[600:], k[600:], bad])
            assert [len(seq) for seq in seqs] == [600, 600, 0]
            assert [sum(map(len, seq.shards.values())) for seq in seqs] == [600, 600, 0]
            assert check_books(cache, seqs) == 3
        attn.fold = fold
        for arguments, text in (
            (([q], seqs, 0), r"^q: expected a list of 3 arrays"),
            ((None, seqs, 0), r"^q: got None, expected a list of 3 arrays"),
            (([q] * 3, seqs, 0, [k] * 3), r"^v: got None, expected both k and v"),
            (([q] * 2, [root, root.shards[0]], 0), r"^seq: got Sequence, expected a ShardedSequence of this cache"),
        ):
            with pytest.raises(ArgumentError, match=text):
                attn(*arguments)
        more = [k[600:700], k[600:], k]
        for got, n in zip(attn([q] * 3, seqs, 0, more, more), (700, 1400, 1400), strict=True):
            assert not differing(got, reference.emulate(q, k[:n], k[:n])[0])


@pytest.mark.parametrize("call", ("append", "attend", "batch"))
def test_a_lost_device_leaves_the_lengths(device: za.Device, call: str) -> None:
    """VK_ERROR_DEVICE_LOST from a submission, for good."""
    k, q = np.ones((1400, 2, 64), np.float32), np.ones((6, 64), np.float32)
    with open_device("swiftshader", "vulkan") as other:
        cache = za.ShardedKVCache([device, other], SHAPE, 1, 4096, "f32", weights=[1.0, 1.0])
        with cache:
            attn, seq, twin = za.ShardedAttention(cache), cache.new_sequence(), cache.new_sequence()
            attn(q, seq, 0, k[:700], k[:700])
            lengths = {shard: len(one) for shard, one in seq.shards.items()}
            other.runtime._queue.queue_submit = lambda *_: -4  # type: ignore[attr-defined]
            for text in ("VK_ERROR_DEVICE_LOST; open a new Device", "was lost earlier; open a new Device"):
                with pytest.raises(za.errors.DeviceLostError, match=text):
                    if call == "append":
                        cache.append(seq, 0, k[700:], k[700:])
                    elif call == "attend":
                        attn(q, seq, 0, k[700:], k[700:])
                    else:
                        attn([q, q], [twin, seq], 0, [k[:2], k[700:]], [k[:2], k[700:]])
                assert (len(seq), len(twin)) == (700, 0)
                assert {shard: len(one) for shard, one in seq.shards.items()} == lengths
                assert check_books(cache, [seq, twin]) == 2
            on_the_first = attn._attention[0].partial(q, seq.shards[0], 0, nodes=seq.nodes(0, 700), tokens=700)
            assert on_the_first.nodes.tolist() == [0]
            assert not differing(attn(q, twin, 0, k[:1], k[:1]), reference.emulate(q, k[:1], k[:1])[0])
            seq.truncate(512)
            assert not differing(attn(q, seq, 0), reference.emulate(q, k[:512], k[:512])[0])


def test_a_fork_writes_on_its_parents_shard(device: za.Device) -> None:
    """Where that node is partly filled; the next ones go where they are lacking."""
    k = np.ones((1400, 2, 64), np.float32)
    with za.ShardedKVCache([device, device], SHAPE, 1, 4096, "f32", weights=[1.0, 1.0]) as cache:
        root = cache.new_sequence()
        cache.append(root, 0, k[:100], k[:100])
        forks = [root.fork() for _ in range(3)]
        assert check_books(cache, [root, *forks]) == 4
        assert cache.allocator.used.tolist() == [4, 0]
        cache.append(forks[0], 0, k, k)
        assert [forks[0].nodes(shard, 1500).tolist() for shard in range(2)] == [[0], [1, 2]]
        forks[0].truncate(50)
        full = cache.new_sequence()
        cache.append(full, 0, k[:1024], k[:1024])
        twin = full.fork()
        twin.truncate(1000)
        assert check_books(cache, [root, *forks, full, twin]) == 7
        assert cache.allocator.used.tolist() == [4, 3]


def test_a_failing_device_leaves_the_cache_as_it_was(devices: list[za.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((2000, 2, 64)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((6, 64)).astype(np.float32)
    with za.ShardedKVCache(devices, SHAPE, 1, 4096, "f32", weights=[1.0] * len(devices)) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        before = attn(q, seq, 0, k[:700], v[:700])
        runtime = devices[-1].runtime

        def lost(*_: Any) -> None:
            raise za.errors.DeviceLostError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "start", lost)
            with pytest.raises(za.errors.DeviceLostError):
                attn(q, seq, 0, k[700:], v[700:])
        assert len(seq) == 700 and sum(len(one) for one in seq.shards.values()) == 700
        assert not differing(attn(q, seq, 0), before)
        assert not differing(attn(q, seq, 0, k[700:], v[700:]), reference.emulate(q, k, v)[0])


INTERRUPTED = ("append", "attend", "truncate", "fork", "keep")


@pytest.mark.parametrize("call", INTERRUPTED)
def test_an_interrupt_leaves_a_call_done_or_not_done(device: za.Device, call: str) -> None:
    """At some of the bytecodes; tests/host/test_nodes.py interrupts at each of them."""
    k = np.random.default_rng(1).standard_normal((1100, 2, 64)).astype(np.float32)
    q = np.ones((6, 64), np.float32)
    have = {700: k[:700], 600: np.delete(k[:700], range(300, 400), 0) if call == "keep" else k[:600]}
    want = {n: reference.emulate(q, x, x)[0] for n, x in have.items()}
    grown = {n: reference.emulate(q, x, x)[0] for n, x in ((n, np.concatenate([x, k[n:]])) for n, x in have.items())}
    with za.ShardedKVCache([device, device], SHAPE, 2, 4096, "f32", weights=[1.0, 1.0]) as cache:
        attn = za.ShardedAttention(cache)
        calls = {
            "append": lambda seq: cache.append(seq, 0, k[700:], k[700:]),
            "attend": lambda seq: attn(q, seq, 0, k[700:], k[700:]),
            "truncate": lambda seq: seq.truncate(600),
            "fork": lambda seq: seq.fork(),
            "keep": lambda seq: seq.keep(range(100, 400), 400),  # rows of one shard go to the other
        }

        def run(*at: int) -> Interrupter:
            seq, interrupter = cache.new_sequence(), Interrupter(files("distributed"), *at)
            for layer in range(2):
                cache.append(seq, layer, k[:700], k[:700])
            with suppress(KeyboardInterrupt):
                interrupter.run(lambda: calls[call](seq))
            n = len(seq)
            assert n in ((700, 600) if call in ("truncate", "keep") else (700,)), interrupter.raised
            assert seq.lengths in ([n, n], [1100, 700]), interrupter.raised
            assert not differing(attn(q, seq, 1), want[n]), interrupter.raised
            assert check_books(cache, [seq]) == (3 if seq.lengths[0] == 1100 else 2), interrupter.raised
            for layer in [layer for layer in range(2) if seq.lengths[layer] == n]:
                assert not differing(attn(q, seq, layer, k[n:], k[n:]), grown[n]), interrupter.raised
            return interrupter

        count = run().seen
        hits = sum(bool(run(*at).raised) for at in moments(count, 24 if FULL else 9, INTERRUPTED.index(call)))
        assert hits > 6


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
                got, want = fold([state]), reference.emulate(q, k, k, sinks=sinks)
                assert not differing(got[0], want[0]) and not differing(got[1], want[1]), (most, n)
                assert n == 22 or most == 7 or len(made) == before
        fold.close()


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


def test_what_a_server_asks(device: za.Device) -> None:
    k = np.ones((600, 2, 64), np.float16)
    with (
        za.KVCache(device, SHAPE, 2, 8 * 512) as one,
        za.ShardedKVCache([device] * 2, SHAPE, 2, 8 * 512, weights=[1.0, 3.0]) as cache,
    ):
        assert (cache.nbytes, cache.free_tokens) == (one.nbytes, 8 * 512)
        seqs = [cache.new_sequence() for _ in range(3)]
        for seq in seqs:
            cache.append(seq, 0, k, k)
        assert cache.free_tokens == 2 * 512
        del seq, seqs[1:]
        gc.collect()
        assert cache.free_tokens == 6 * 512
        cache.append(cache.new_sequence(), 0, *[np.ones((6 * 512, 2, 64), np.float16)] * 2)


def test_refusals(device: za.Device) -> None:
    for devices in ([], device, [device, 3], None):
        with pytest.raises(ArgumentError, match=r"^devices: got .*, expected a list of open Devices$"):
            za.ShardedKVCache(devices, SHAPE, 1, 100)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^shape: got str, expected an AttnShape$"):
        za.ShardedKVCache([device], "6/2/64", 1, 100)  # type: ignore[arg-type]
    for weights in (1, ["1"], "1"):
        with pytest.raises(ArgumentError, match=r"^weights: got .*, expected a list of positive numbers, one "):
            za.ShardedKVCache([device], SHAPE, 1, 100, weights=weights)  # type: ignore[arg-type]
    za.ShardedKVCache([device] * 2, SHAPE, 1, 1024, weights=np.ones(2, np.float32)).close()  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^comm: got 1, expected an mpi4py communicator, such as MPI\.COMM_WORLD$"):
        za.ShardedKVCache([device], SHAPE, 1, 100, comm=1)
    with (
        za.KVCache(device, SHAPE, 1, 600) as whole,
        pytest.raises(ArgumentError, match=r"^cache: got KVCache, expected a ShardedKVCache; Attention attends"),
    ):
        za.ShardedAttention(whole)  # type: ignore[arg-type]
    for arguments, text in (
        ((3, SHAPE), "^device: got int, expected a Device$"),
        ((device, 3), "^shape: got int, expected an AttnShape$"),
    ):
        with pytest.raises(ArgumentError, match=text):
            za.Fold(*arguments)  # type: ignore[arg-type]
    fold = za.Fold(device, SHAPE)
    for parts, text in ((3, "^parts: got int, expected a list of the"), ([3], "^partial states: got int, expected a ")):
        with pytest.raises(ArgumentError, match=text):
            fold(parts)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^weights: got 2, expected one per device \(1\)"):
        za.ShardedKVCache([device], SHAPE, 1, 100, weights=[1, 2])
    with pytest.raises(ArgumentError, match=r"^page_size: got 1024"):
        za.ShardedKVCache([device], SHAPE, 1, 100, page_size=1024)
    with pytest.raises((DeviceMemoryError, za.errors.LimitError)):
        za.ShardedKVCache([device], za.AttnShape(64, 64, 512), 1000, 1 << 24, "f32")
    with za.ShardedKVCache([device], SHAPE, 1, 600) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        q, k = np.ones((6, 64), np.float32), np.ones((1100, 2, 64), np.float16)
        assert cache.capacity == 600 and cache.free_tokens == 1024
        beyond = (
            r"^k: got 1,100 tokens at length 0, expected at most 1,024 \(capacity = 600, in whole nodes of 512\); t"
        )
        for call in (lambda: attn(q, seq, 0, k, k), lambda: cache.append(seq, 0, k, k)):
            with pytest.raises(CapacityError, match=beyond):
                call()
        with pytest.raises(ArgumentError, match=r"^seq: got Sequence, expected a ShardedSequence of this cache"):
            attn(q, seq.shards[0], 0)
        nan = k.copy()
        nan[600, 1, 3] = np.nan
        for keys, values, text in (
            (nan, k, r"^k\[600, 1, 3\]: got nan"),  # as the caller counts, not as the shard does
            (k, k[:-1], r"^v: got shape \(1099, 2, 64\), expected k's "),
            (k[:0], k[:0], r"^k: got shape \(0, 2, 64\), expected at least one token"),
            (k[..., :8], k, r"^k: got shape \(1100, 2, 8\), expected "),
            (k[0, 0, 0], k, r"^k: got shape \(\), expected "),
        ):
            for give in (cache.append, lambda s, layer, a, b: attn(q, s, layer, a, b)):
                with pytest.raises(ZincAttnError, match=text):
                    give(seq, 0, keys, values)
        assert seq.lengths == [0]


RANK = """
import sys, time, numpy as np, zinc_attn as za
from mpi4py import MPI
from zinc_attn import reference
mode, comm = sys.argv[1], MPI.COMM_WORLD
shape = za.AttnShape(6, 2, 64)
k, v = (np.random.default_rng(i).standard_normal((3000, 2, 64)).astype(np.float16) for i in (1, 2))
q = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
layers = 2 if mode == "mismatch" and comm.rank == 1 else 1
try:
    cache = za.ShardedKVCache([za.Device.open()], shape, layers, 4096, comm=comm, weights=[1.0], timeout_s=5)
    attn, seq = za.ShardedAttention(cache), cache.new_sequence()
    for at, n in ((0, 2500), (2500, 1), (2501, 499)):
        if mode == "error" and comm.rank == 1 and at == 2500:
            q = q[:3]
        if mode == "silent" and at == 2500:
            cache.ranks.timeout_s = 2  # from here on no rank starts or compiles
            if comm.rank == 1:
                time.sleep(5)
                sys.exit(0)
        out = attn(q, seq, 0, k[at:at + n], v[at:at + n])
        assert np.array_equal(out.view(np.uint32), reference.emulate(q, k[:at + n], v[:at + n])[0].view(np.uint32))
    assert attn.sent_bytes == sum(
        4 * 6 * 66 * int(np.sum(cache.owners[: -(-n // 512)] == comm.rank)) for n in (2500, 2501, 3000)
    )
    said = "equal"
except za.ZincAttnError as error:
    said = f"{type(error).__name__} {error}"
with open(f"{sys.argv[2]}/{comm.rank}.txt", "w") as file:  # the ranks share one stdout, where lines can mix
    file.write(said)
"""


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


NO_MPI = importlib.util.find_spec("mpi4py") is None or mpiexec() is None


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize(
    ("ranks", "mode", "expected"),
    (
        (2, "equal", ["equal"] * 2),
        (4, "equal", ["equal"] * 4),
        (2, "mismatch", ["RankError rank 1 is set up as 6/2/64 layers=2"] * 2),
        (3, "error", ["RankError rank 1 failed: ShapeError"] * 2 + ["ShapeError q: got shape (3, 64)"]),
        (2, "silent", ["RankError rank 0 waited 2 s for rank 1; it is lost, late, or in no call; look at"]),
    ),
)
def test_ranks(tmp_path: Path, ranks: int, mode: str, expected: list[str]) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(script), mode, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = sorted(file.read_text() for file in tmp_path.glob("*.txt"))
    assert len(lines) == len(expected), done
    for line, start in zip(lines, sorted(expected), strict=True):
        assert line.startswith(start), (line, done.stderr)


START = """
import sys, time, numpy as np, zinc_attn as za
from mpi4py import MPI
from zinc_attn import reference
comm, shape = MPI.COMM_WORLD, za.AttnShape(6, 2, 64)
second = comm.rank == 1
k, v = (np.random.default_rng(i).standard_normal((3000, 2, 64)).astype(np.float16) for i in (1, 2))
q = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
file = open(f"{sys.argv[1]}/{comm.rank}.txt", "w")

def make(nodes, timeout_s):
    device = za.Device.open()
    return za.ShardedKVCache([device], shape, 1, nodes * 512, comm=comm, weights=[1.0], timeout_s=timeout_s)

def said(call):
    try:
        call()
    except (za.ZincAttnError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "done"
"""


def run_ranks(folder: Path, script: str, ranks: int = 2, *more: str) -> tuple[list[list[str]], str]:
    """What each rank of ``script`` says, in lines, and what is on stderr."""
    (folder / "rank.py").write_text(START + script)
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(folder / "rank.py"), str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [(folder / f"{rank}.txt").read_text().splitlines() for rank in range(ranks)], done.stderr


EDGES = """
cache = make(16, 30)
attn, seq = za.ShardedAttention(cache), cache.new_sequence()

def failing(*_):
    raise za.errors.DeviceLostError("injected")

def interrupted(*_):
    raise KeyboardInterrupt

def says(call):
    text = said(call)
    print(len(seq), text, file=file, flush=True)

def right(sequence, rows):
    want = reference.emulate(q, k[rows], v[rows])[0]
    assert np.array_equal(attn(q, sequence, 0).view(np.uint32), want.view(np.uint32))

# one rank fails, and the other has appended nothing either
cache.append(seq, 0, k[:600], v[:600])
says(lambda: cache.append(seq, 0, k[600:700, :, :8] if second else k[600:700], v[600:700]))
whole = cache.shards[comm.rank].append
cache.shards[comm.rank].append = failing if second else whole
says(lambda: cache.append(seq, 0, k[600:1600], v[600:1600]))
cache.shards[comm.rank].append = whole
right(seq, np.arange(600))

# other arguments, another call, another length
says(lambda: cache.append(seq, 0, k[600:1600], (v + second)[600:1600]))
says(lambda: attn(q + second, seq, 0, k[600:1600], v[600:1600]))
says(lambda: (cache.append if second else lambda *a: attn(q, *a))(seq, 0, k[600:1600], v[600:1600]))
if second:
    seq.truncate(500)
says(lambda: attn(q, seq, 0, k[600:1600], v[600:1600]))
seq.truncate(500)
right(seq, np.arange(500))

says(lambda: attn([q] * (1 + second), [seq] * (1 + second), 0))
says(lambda: cache.append(seq, 0, k[500:510 + second], v[500:510 + second]))

# one rank fails behind the exchange: the other knows with its next call
fold = attn.fold
attn.fold = failing if second else fold
says(lambda: attn(q, seq, 0, k[500:700], v[500:700]))
attn.fold = fold
if not second:
    says(lambda: attn(q, seq, 0, k[700:701], v[700:701]))
seq.truncate(500)
right(seq, np.arange(500))

# forks and batches, with the states of a batch in one exchange
twin, other, exchanges = seq.fork(), cache.new_sequence(), cache.ranks.exchanges
slices = [slice(500, 510), slice(600, 1700), slice(0, 30)]
outs = attn([q] * 3, [seq, twin, other], 0, [k[s] for s in slices], [v[s] for s in slices])
assert cache.ranks.exchanges == exchanges + 1
rows = [np.r_[0:510], np.r_[0:500, 600:1700], np.r_[0:30]]
for out, one in zip(outs, rows):
    assert np.array_equal(out.view(np.uint32), reference.emulate(q, k[one], v[one])[0].view(np.uint32))
for sequence, one in zip((seq, twin, other), rows):
    right(sequence, one)

# of a fork some rows stay, and go to nodes of the other rank
says(lambda: twin.keep(range(10 + second, 100), 1150))
twin.keep(range(200, 1140), 1150)
rows[1] = np.r_[rows[1][:450], rows[1][650:1590]]
right(twin, rows[1])
right(seq, rows[0])

# a rank may collect a sequence before the other does, and the deal stays one
held = [int(cache.allocator.used.sum())]
kept = [twin] if second else []
del twin, sequence
right(seq, rows[0])
held.append(int(cache.allocator.used.sum()))
kept.clear()
right(seq, rows[0])
held.append(int(cache.allocator.used.sum()))
more = [cache.new_sequence() for _ in range(12)]
for sequence in more:
    cache.append(sequence, 0, k[:5], v[:5])
print(held, cache.allocator.used.tolist(), file=file)

# an interrupt within an exchange ends them
if second:
    cache.ranks.on_wait = interrupted
says(lambda: cache.append(seq, 0, k[:5], v[:5]))
says(lambda: cache.append(seq, 0, k[:5], v[:5]))
file.close()
"""


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_ranks_that_differ_notice(tmp_path: Path) -> None:
    """One run, in which the ranks go on behind each error."""
    said, stderr = run_ranks(tmp_path, EDGES)

    def differ(text: str) -> list[str]:
        return [f"RankError: rank 1{text}"] * 2

    alike = "; make the same calls with the same arguments on every rank$"
    of = r"sequence 0 \(600 tokens, 1,000 new\)"
    late = r"\(behind the exchange of attend at layer 0, sequence 0 \(500 tokens, 200 new\), which the "
    lost = "a rank was lost, or left, before; start all of them again"
    expected = (
        ((600, 600), ["RankError: rank 1 failed: ShapeError: k: got shape ", "ShapeError: k: got shape "]),
        ((600, 600), ["RankError: rank 1 failed: DeviceLostError: injected$", "DeviceLostError: injected$"]),
        ((600, 600), differ(f" was given other rows than rank 0 for {of}{alike}")),
        (
            (600, 600),
            differ(f": other q or mask, or other options of scores, than rank 0 for {of}{alike}"),
        ),
        ((600, 600), differ(f" is in append, rank 0 in attend{alike}")),
        ((600, 500), differ(r" has sequence 0 at length 500 in layer 0, rank 0 at 600; truncate\(500\) or free")),
        ((500, 500), differ(f" was given a batch of 2, rank 0 one of 1{alike}")),
        ((500, 500), differ(f" was given k, v of length 11 for sequence 0, rank 0 of 10{alike}")),
        ((700, 500), ["done$", "DeviceLostError: injected$"]),
        ((700,), [rf"RankError: rank 1 failed: DeviceLostError: injected {late}other ranks have done\)$"]),
        ((510, 510), differ(r" was given other rows than rank 0 for sequence 1 \(1,600 tokens, 0 new\)" + alike)),
        ((510, 510), ["RankError: rank 1 gave an exchange up: KeyboardInterrupt$", "KeyboardInterrupt: $"]),
        ((510, 510), [f"RankError: rank 0: {lost}", f"RankError: rank 1: {lost}"]),
    )
    for rank, lines in enumerate(said):
        mine = [(lengths[rank], texts[rank]) for lengths, texts in expected if rank < len(texts)]
        assert len(lines) == len(mine) + 1, (lines, stderr)
        assert lines.pop(-3) == "[5, 5, 2] [7, 7]"
        for line, (length, text) in zip(lines, mine, strict=True):
            assert re.match(f"{length} {text}", line), (rank, line, text)


FULL_RANK = """
cache = make(2, 30)
attn = za.ShardedAttention(cache)
seqs = [cache.new_sequence() for _ in range(5)]
for seq in seqs[:4]:
    cache.append(seq, 0, k[:200], v[:200])  # a page of 256 each

def says(call):
    text = said(call)
    print([len(seq) for seq in seqs], text, file=file, flush=True)

# rank 0 is full, and every rank evicts the same
says(lambda: cache.append(seqs[4], 0, k[:1], v[:1]))
says(lambda: attn([q] * 2, [seqs[3], seqs[4]], 0, [k[:1]] * 2, [v[:1]] * 2))
says(lambda: cache.append(seqs[4], 0, k[:1, :, :8] if second else k[:1], v[:1]))
says(lambda: cache.append(seqs[4], 0, k[:1100], v[:1100]))
seqs[2].free()
del seqs[2]
says(lambda: attn(q, seqs[3], 0, k[:1], v[:1]))
out = attn(q, seqs[2], 0)
assert np.array_equal(out.view(np.uint32), reference.emulate(q, k[:200], v[:200])[0].view(np.uint32))

# a fork, then a new sequence, on one rank only
for seq in seqs:
    seq.truncate(0)
for seq in seqs[:2]:
    cache.append(seq, 0, k[:100], v[:100])
twin = seqs[0].fork() if second else None
says(lambda: cache.append(seqs[2], 0, k[:100], v[:100]))
if second:
    twin.free()
mine = cache.new_sequence()
says(lambda: cache.append(mine, 0, k[:1], v[:1]))
says(lambda: cache.append(seqs[2 + second], 0, k[:1], v[:1]))
says(lambda: cache.append(seqs[2], 0, k[:1], v[:1]))
file.close()
"""


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_a_full_rank_is_full_for_all(tmp_path: Path) -> None:
    said, stderr = run_ranks(tmp_path, FULL_RANK)
    full = r"shard 0 of 2: got 1 of the {} new tokens, .* 0 of its 2 pages of 256 tokens are free, .* larger cache$"
    failed = r"ShapeError: k: got shape \(1, 2, 8\)"
    beyond = r"k: got 1,100 tokens at length 0, expected at most 1,024 \(capacity = "
    made = r"; sequences made: {} on rank 1, {} on rank 0; call new_sequence\(\) and fork\(\) alike on every rank$"
    before, held, cut = r"\[200, 200, 200, 200, 0\] ", r"\[200, 200, 200, 1\] ", r"\[100, 100, {}, 0\] "
    expected = (
        (before + "CapacityError: " + full.format(1), before + "CapacityError: rank 0: " + full.format(1)),
        (before + "CapacityError: " + full.format(2), before + "CapacityError: rank 0: " + full.format(2)),
        (before + "RankError: rank 1 failed: " + failed, before + failed),
        (before + "CapacityError: " + beyond, before + "CapacityError: " + beyond),
        (held + "done$",) * 2,
        (
            cut.format(0)
            + r"RankError: rank 1 has the nodes of sequence 3 \(0 tokens, 100 new\) on other ranks than rank 0"
            + made.format(6, 5),
        )
        * 2,
        (cut.format(0) + "RankError: rank 1 was given sequence 6, rank 0 sequence 5" + made.format(7, 6),) * 2,
        (cut.format(0) + "RankError: rank 1 was given sequence 4, rank 0 sequence 3" + made.format(7, 6),) * 2,
        (cut.format(1) + "done$",) * 2,
    )
    for rank, lines in enumerate(said):
        assert len(lines) == len(expected), (lines, stderr)
        for line, texts in zip(lines, expected, strict=True):
            assert re.match(texts[rank], line), (rank, line, texts[rank])


LEAVE = """
mode, begin, took = sys.argv[2], time.monotonic(), []

def work():
    global begin
    with make(16, 4 if mode == "late" else 30) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        for at in range(3):
            begin = time.monotonic()
            if mode == "own" and second and at == 1:
                raise ValueError("of its own")
            if mode == "late" and second and at == 1:
                time.sleep(6)
                begin = time.monotonic()
            bad = mode == "in a call" and second and at == 1
            attn(q, seq, 0, k[at:at + 1, :, :8] if bad else k[at:at + 1], v[at:at + 1])

try:
    work()
except (za.ZincAttnError, ValueError) as error:
    print(f"{type(error).__name__}: {error}", file=file)
print(time.monotonic() - begin, file=file)
file.close()
"""


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    (
        ("own", 2, ["RankError: rank 1 failed: ValueError: of its own", "ValueError: of its own"]),
        ("own", 3, ["RankError: rank 1 failed: ValueError: of its own", "ValueError: of its own"] * 2),
        ("in a call", 2, ["RankError: rank 1 failed: ShapeError: k: got shape ", "ShapeError: k: got shape "]),
        ("late", 2, ["RankError: rank 0 waited 4 s for rank 1; it is lost, late, or in no call"] * 2),
    ),
)
def test_a_rank_that_leaves_ends_all(tmp_path: Path, mode: str, ranks: int, expected: list[str]) -> None:
    """At once, in none of the 30 s; a late one ends as soon as it comes."""
    said, stderr = run_ranks(tmp_path, LEAVE, ranks, mode)
    for rank, (line, seconds) in enumerate(said):
        assert line.startswith(expected[rank % 2]), (line, stderr)
        assert float(seconds) < (7 if mode == "late" and rank == 0 else 3), (rank, seconds)


KILLED = """
import os, signal
with make(16, 30) as cache:
    attn, seq = za.ShardedAttention(cache), cache.new_sequence()
    attn(q, seq, 0, k[:1000], v[:1000])
    cache.ranks.timeout_s = 2  # from here on no rank starts or compiles
    os.kill(os.getpid(), signal.SIGUSR1)  # mpiexec's note of a lost rank ends none
    if second:
        os.kill(os.getpid(), signal.SIGKILL)
    attn(q, seq, 0, k[1000:1001], v[1000:1001])
"""
# what mpiexec watches lives until all ranks have ended, so that it neither ends one nor takes note of the killed one
WATCHED = """
folder=$1; shift
"$@" 2> "$folder/$PMI_RANK.err"
echo $? > "$folder/$PMI_RANK.status"
while [ $(ls "$folder"/*.status | wc -l) -lt 3 ]; do sleep 0.1; done
"""


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_ranks_outlive_a_killed_one_and_end_by_themselves(tmp_path: Path) -> None:
    """Nobody cleans up behind a rank that got SIGKILL; MPI's finalization would wait for it without end."""
    script = tmp_path / "rank.py"
    script.write_text(START + KILLED)
    ranks = ["sh", "-c", WATCHED, "sh", str(tmp_path), sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        [str(mpiexec()), "-disable-auto-cleanup", "-n", "3", *ranks], capture_output=True, text=True, timeout=60
    )
    errors = [(tmp_path / f"{rank}.err").read_text() for rank in range(3)]
    statuses = [int((tmp_path / f"{rank}.status").read_text()) for rank in range(3)]
    assert statuses == [LOST_STATUS, 128 + 9, LOST_STATUS], (done, errors)
    for text in errors[0], errors[2]:
        assert re.search(r"RankError: rank [02] waited 2 s for the 2 other ranks; MPI cannot tell which", text), text
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
    assert not any(bytes(script) in line for line in running), "a process is left"


# --- zinc-attn sweep --distributed --------------------------------------------------------------------------

SWEEP = ("sweep", "--distributed", "--shape", "6/2/64", "--contexts", "1k,1500", "--q-len", "2", "--repeats", "2")
PROGRAMS = {
    "cli": "import sys; from zinc_attn import cli; sys.exit(cli.main())",
    "steady memory": """
import sys
from zinc_attn.cli import app as cli
from zinc_attn.distributed import cache
cache.memory_budget = lambda device: (1 << 30, 1 << 30)
sys.exit(cli.main())
""",
    "no device": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--device', 'none']))",
    "other seed": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--seed', '7']))",
    "ended": "raise SystemExit(2)",
    "silent": """
import sys, time
from zinc_attn import reference
from zinc_attn.cli import app as cli
reference.emulate = lambda *_: time.sleep(60)
sys.exit(cli.main())
""",
    "no room": """
import sys, zinc_attn as za
from zinc_attn.cli import app as cli
whole = za.KVCache
def small(device, shape, layers, tokens, *rest, **named):
    if tokens > 512:
        raise za.errors.LimitError("injected")
    return whole(device, shape, layers, tokens, *rest, **named)
za.ShardedKVCache.make_shard = staticmethod(small)
sys.exit(cli.main())
""",
    "wrong bit": """
import sys
from zinc_attn import reference
from zinc_attn.cli import app as cli
emulate = reference.emulate
def wrong(q, k, v):  # one KV head, with its three query heads
    out, lse = emulate(q, k, v)
    out.view('u4')[1, 2, 5] ^= 1
    return out, lse
reference.emulate = wrong
sys.exit(cli.main())
""",
}


def distributed(folder: Path, programs: tuple[str, ...], *more: str) -> subprocess.CompletedProcess[str]:
    """``zinc-attn sweep --distributed`` of as many ranks; stderr of rank i goes to the file i, for lines can mix."""
    command = [str(mpiexec())]
    for rank, name in enumerate(programs):
        shell = ["sh", "-c", f'exec 2> "{folder}/{rank}"; exec "$@"', "sh"]
        command += [":"] * (rank > 0) + ["-n", "1", *shell, sys.executable, "-c", PROGRAMS[name]]
        command += [*SWEEP, "--runtime", "vulkan", "--out", str(folder / "out"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_distributed_sweep(tmp_path: Path, ranks: int) -> None:
    done = distributed(tmp_path, ("steady memory",) * ranks, "--json")
    assert done.returncode == 0, (done, [file.read_text() for file in tmp_path.glob("[0-9]")])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()] == rows
    assert [(r["context"], r["status"], r["verified"], r["repeats"]) for r in rows] == [
        (1024, "ok", "bits", 2),
        (1500, "ok", "bits", 2),
    ]
    for row in rows:
        nodes = -(-row["context"] // 512)
        others = nodes - int(np.sum(deal(nodes, [1.0] * ranks) == 0))
        assert (row["ranks"], row["layout"], row["num_splits"]) == (ranks, "nodes", nodes)
        assert row["formula_bytes"] == others * 2 * 6 * 66 * 4
        assert bool(row["formula_bytes"]) == (ranks > 1)
        assert 0 <= row["received_bytes"] - row["formula_bytes"] <= 1024 * (ranks - 1)
        assert row["median_us"] > 0
    assert "written: " in (tmp_path / "0").read_text()
    assert not any((tmp_path / str(rank)).read_text() for rank in range(1, ranks)), "rank 0 alone speaks"


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize(
    ("programs", "says"),
    (
        (("cli", "other seed"), ["rank 1 is set up as ", "rank 1 is set up as "]),
        (("cli", "no device"), ["rank 1 failed: DeviceNotFoundError: ", "device: no Vulkan device matches 'none'"]),
        (("cli", "ended"), ["waited 4 s for all ranks to start; one ended before", ""]),
        (
            ("cli", "cli", "silent"),
            ["rank [01] waited 4 s for the 2 other ranks; MPI cannot tell which of them is lost"] * 2 + [""],
        ),
    ),
)
def test_distributed_sweep_that_cannot_be(tmp_path: Path, programs: tuple[str, ...], says: list[str]) -> None:
    done = distributed(tmp_path, programs, "--timeout", "4")
    # MPI_Abort kills a silent rank (9), and mpiexec may tell of that in place of the others' status
    assert done.returncode in ((2, 9) if "silent" in programs else (2,)), done
    for rank, text in enumerate(says):
        said = (tmp_path / str(rank)).read_text()
        assert bool(re.search(f"zinc-attn: error: {text}", said)) == bool(text), (rank, said)
        assert text or "zinc-attn: error" not in said, (rank, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_what_one_rank_has_no_room_for_is_refused(tmp_path: Path) -> None:
    done = distributed(tmp_path, ("cli", "no room"), "--json", "--contexts", "512,2k,1k")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["context"], r["status"], r["error"]) for r in rows] == [
        (512, "ok", None),
        (2048, "refused", "rank 0: rank 1 failed: LimitError: injected"),
        (1024, "ok", None),
    ], done


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_a_wrong_bit_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    done = distributed(tmp_path, ("cli", "wrong bit"))
    assert done.returncode == 1, done
    assert done.stdout.count("FAILED: rank 1: out[0, 1, 2, 5]: got ") == 2


def test_distributed_needs_mpi4py(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main(list(SWEEP)) == 2
    assert capsys.readouterr().err.startswith(
        "zinc-attn: error: several ranks need mpi4py and an MPI: pip install 'zinc-attn[mpi]', and MPICH or Open MPI"
    )
    assert cli.main(["sweep", "--shape", "6/2/64", "--timeout", "3"]) == 2
    assert capsys.readouterr().err == "zinc-attn: error: timeout: got 3 without --distributed, expected both\n"


@pytest.mark.parametrize("more", (["--batch", "2"], ["--splits", "auto"], ["--contiguous"]))
def test_what_distributed_does_not_take(more: list[str]) -> None:
    class One:
        rank, size = 0, 1

    args = cli.build_parser().parse_args([*SWEEP, *more])
    with pytest.raises(ArgumentError, match=rf"^{more[0][2:]}: got {more[0]} with --distributed, expected neither"):
        measure(args, One())


class Agreed:
    """Ranks that have been given the same."""

    def agree(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("given", ({"batch": 2}, {"page_size": None}))
def test_what_a_distributed_sweep_does_not_take(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(given))}: got .* for a distributed sweep"):
        distributed_sweep(Agreed(), None, SweepSpec(za.AttnShape(6, 2, 64), 1, (64,), **given))
