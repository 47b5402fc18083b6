"""A failed call leaves the cache as it was, an interrupt no open file; threads share a cache; closed objects refuse.

Every failure is injected, at the n-th call of the runtime for every n that a call makes. What comes out afterwards has
the oracle's bits. test_fuzz.py interrupts calls between bytecodes.
"""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL, Twin, done_or_not_done, story
from interrupts import Fault, Interrupter, files
from page_tables import check_counts, largest

import zinc_attn as za
from zinc_attn import errors

NATIVE = True
of_dispatchers = pytest.mark.both_dispatchers
LAYERS = 2
METHODS = ("run", "start", "write", "read", "record", "buffer", "kernel")


def state(cache: za.KVCache) -> Any:
    """What a failed call must not change. Page numbers too: what was taken came back to its place. The books agree."""
    check_counts(cache.pool, [s.pages for s in cache.sequences])
    return [(s.lengths, s.pages.table) for s in cache.sequences], cache.free_tokens, largest(cache)


FAULTS = {
    "out of memory": (errors.DeviceMemoryError, False),
    "lost": (errors.DeviceLostError, True),
    "interrupt": (KeyboardInterrupt, False),
    "interrupt behind": (KeyboardInterrupt, True),
}


@contextmanager
def world(device: za.Device) -> Iterator[tuple[Twin, Twin, Twin]]:
    """A sequence, a fork of it that shares a partly filled page, and one that goes its own way."""
    with za.KVCache(device, SMALL, LAYERS, 640, "f16", 16) as cache:
        a, c = (Twin(za.Attention(cache), seed) for seed in (1, 2))
        a.append(20)
        c.append(70)
        yield a, a.fork(), c


@of_dispatchers
@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_at_any_runtime_call_changes_nothing(device, monkeypatch, tmp_path, kind):
    (error, after), hits = FAULTS[kind], []
    fault = Fault(error, after)
    for method in METHODS:
        monkeypatch.setattr(device.runtime, method, fault.wrap(getattr(device.runtime, method)))
    with world(device) as twins:
        cache = twins[0].cache
        looker = za.Attention(cache)  # which no failure touches
        for number, call in enumerate(story(*twins, tmp_path / "file")):
            before = state(cache)
            for n in itertools.count():
                fault.at(n)
                for twin in twins:
                    twin.scale = 1 + number / 10  # so that the largest magnitudes move
                try:
                    with done_or_not_done(twins):
                        call()
                except error:
                    assert fault.hit and state(cache) == before, f"call {number}, fault {n}"
                    fault.at(-1)
                    for twin in twins if n % 3 == 1 else ():  # looking could also mend what a failure left
                        twin.look(attention=looker)
                    continue
                assert not fault.hit, f"call {number}: fault {n} was swallowed"
                fault.at(-1)
                break
            hits.append(n)
            assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]
        assert sum(hits) > 60 and min(h for i, h in enumerate(hits) if i != 15) >= 3, hits
        for twin in twins:
            twin.look(attention=looker)


@of_dispatchers
def test_a_copied_page_of_a_failed_call_is_not_used_again(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page goes to another sequence, while the call that is made again finds its old page its own: no copy."""
    start = device.runtime.start

    def interrupted(recording: Any) -> None:
        start(recording)
        raise KeyboardInterrupt  # behind the copy and the attention

    with za.KVCache(device, SMALL, 1, 1024, "f32") as cache:
        twin, heir = (Twin(za.Attention(cache), seed) for seed in (0, 1))
        twin.append(100)
        fork = twin.fork()
        again = twin.other(twin.sequence)
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                twin.step(1)
        fork.sequence.free()
        heir.append(150)
        again.step(1)
        again.look()
        heir.look()


def test_an_interrupt_of_a_file_leaves_none_open_and_none_behind(device: za.Device, tmp_path: Any) -> None:
    """Before each opcode of ``files``; a file that is dropped while it is open warns, and that fails the test, too."""

    cache, path = za.KVCache(device, SMALL, 1, 64, "f16", 16), tmp_path / "file"
    twin = Twin(za.Attention(cache))
    twin.append(3)
    seq = twin.sequence
    seq.save(path)
    opened = os.listdir("/proc/self/fd")
    for call in (lambda: seq.save(path), lambda: cache.load(path).free()):
        for n in itertools.count():
            interrupter = Interrupter(files("cache/files.py"), n)
            with suppress(KeyboardInterrupt):
                interrupter.run(call)
            where = n, interrupter.raised
            assert cache.sequences == [seq] and cache.pool.num_pages - cache.pool.free_pages == 1, where
            assert os.listdir("/proc/self/fd") == opened and [*tmp_path.iterdir()] == [path], where
            if not interrupter.raised:
                break
        assert n > 100
    cache.close()


def test_an_interrupted_close_leaves_nothing_closed_in_use(device: za.Device) -> None:
    """Of an Attention, before each opcode; the calls that follow make anew what they need."""
    with za.KVCache(device, SMALL, 1, 64, "f16", 16) as cache:
        twin = Twin(za.Attention(cache))
        twin.append(40)
        for n in itertools.count():
            twin.look()
            twin.look(2)
            interrupter = Interrupter(files("decode"), n)
            with suppress(KeyboardInterrupt):
                interrupter.run(twin.attention.close)
            if not interrupter.raised:
                break
        assert n > 50


@of_dispatchers
def test_threads_decode_their_own_sequences_of_one_cache(device: za.Device) -> None:
    with za.KVCache(device, SMALL, LAYERS, 2048, "f16", 16) as cache:
        attn = za.Attention(cache)

        def decode(seed: int) -> Twin:
            twin = Twin(attn, seed)
            for step, n in enumerate((30 + seed, 1, 1, 5, 1, 1, 70, 1)):
                twin.step(n)
                if step == 3:
                    fork = twin.fork()
                    twin.sequence.free()
                    twin = fork
            return twin

        with ThreadPoolExecutor(4) as threads:
            result = list(threads.map(decode, range(6)))
        check_counts(cache.pool, [one.sequence.pages for one in result])
        assert len(cache.sequences) == 6


CLOSED = {  # and what a call says then
    "KVCache": r"KVCache: used after close\(\)",
    "ShardedKVCache": r"ShardedKVCache: used after close\(\)",
    "Device": r".*: used after close\(\); open it again with Device\.open\(\)",
}


@of_dispatchers
@pytest.mark.parametrize("closed", CLOSED)
def test_after_close(device: za.Device, tmp_path: Any, closed: str) -> None:
    """Of a cache, or of the device under it; test_faults.py has the same of forked children."""
    opened, path = za.Device.open(device.info.index, runtime=device.runtime.name), tmp_path / "file"
    cache: Any = za.KVCache(opened, SMALL, LAYERS, 640, "f16", 16)
    kind: Any = za.Attention
    if closed == "ShardedKVCache":
        cache, kind = za.ShardedKVCache([opened] * 2, SMALL, LAYERS, 1024), za.ShardedAttention
    attn, seq = kind(cache), cache.new_sequence()
    q, k = np.ones((4, 64), np.float32), np.ones((1, 2, 64), np.float16)
    calls = [
        lambda: cache.append(seq, 0, k, k),
        lambda: attn(q, seq, 0, k, k),
        lambda: attn(q, seq, 0),
        cache.new_sequence,
        seq.fork,
        lambda: seq.truncate(0),
        lambda: kind(cache),
    ]
    for layer in range(LAYERS):
        cache.append(seq, layer, k, k)
    attn.close()
    attn(q, seq, 0)  # what it needs is made anew
    if closed != "ShardedKVCache":
        seq.save(path)
        calls += [lambda: seq.save(path), lambda: cache.load(path)]
    if closed == "Device":
        calls.append(lambda: za.attention(q, k, k, opened))
    for _ in range(2):
        (opened if closed == "Device" else cache).close()
    for call in calls:
        with pytest.raises(errors.ClosedError, match=f"^{CLOSED[closed]}$"):
            call()
    seq.free()  # harmless
    cache.close()
    opened.close()
