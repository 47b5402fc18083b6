"""A failed or interrupted call leaves the cache as it was; threads share it; closed and forked ones refuse.

Every failure is injected, at the n-th call of the runtime for every n that a call makes, and interrupts between
bytecodes. What comes out afterwards has the oracle's bits.
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
from interrupts import Fault, Interrupter, files, moments, opcodes
from page_tables import check_counts, largest
from support import FULL

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


WHERE = files("cache", "decode", "planning", "runtime/vulkan", "runtime/kompute")
STEADY = 6  # the call of the story that changes nothing but the token


@of_dispatchers
def test_an_interrupt_at_any_bytecode_leaves_a_call_done_or_not_done(device: za.Device, tmp_path: Any) -> None:
    """Wherever Ctrl-C comes, and a second one after it; with --full before each opcode of a steady call."""
    seen = 0
    with world(device) as others, world(device) as twins:
        cache = twins[0].cache
        calls = zip(*(story(*of, tmp_path / str(i)) for i, of in enumerate((others, twins))), strict=True)
        for number, (counted, call) in enumerate(calls):
            budget = (100_000 if number == STEADY else 300) if FULL else 40
            for n, moment in enumerate(moments(opcodes(counted, WHERE), budget, seed=number)):
                interrupter, before, kept = Interrupter(WHERE, *moment), [twin.held for twin in twins], None
                try:
                    with done_or_not_done(twins):
                        try:
                            interrupter.run(call)
                        finally:
                            with cache.lock:
                                cache.settle()  # as the next call does
                except KeyboardInterrupt as error:
                    kept = error if n % 3 == 0 else None  # as sys.last_exc keeps its frames, and what they hold
                    seen += 1
                else:
                    assert not interrupter.raised, f"call {number}: {moment} was swallowed"
                    break
                del kept
                state(cache)
                if any(twin.held is not held for twin, held in zip(twins, before, strict=True)):  # it is done
                    break
            else:
                call()
            with ThreadPoolExecutor(1) as thread:  # another thread gets the lock
                assert thread.submit(cache.lock.acquire, timeout=10).result()
                thread.submit(cache.lock.release).result()
            for twin in twins:
                twin.look()
    assert seen > 200


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


CLOSED = {
    "cache": r"KVCache: used after close\(\)",
    "device": r".*: used after close\(\); open it again with Device\.open\(\)",
}


@of_dispatchers
@pytest.mark.parametrize("closed", CLOSED)
def test_after_close(device: za.Device, tmp_path: Any, closed: str) -> None:
    """Of the cache, or of the device under it; test_faults.py has the same of forked children."""
    opened, path = za.Device.open(device.info.index, runtime=device.runtime.name), tmp_path / "file"
    cache = za.KVCache(opened, SMALL, LAYERS, 640, "f16", 16)
    twin, (q, k, v) = Twin(za.Attention(cache)), np.ones((3, 1, 4, 64), np.float32)
    attn, seq, k, v = twin.attention, twin.sequence, *(x[:, :2].astype(np.float16) for x in (k, v))
    calls = [
        lambda: cache.append(seq, 0, k, v),
        lambda: attn(q, seq, 0, k, v),
        lambda: attn(q, seq, 0),
        lambda: seq.save(path),
        cache.new_sequence,
        lambda: cache.load(path),
        seq.fork,
        lambda: seq.truncate(0),
        lambda: za.Attention(cache),
    ]
    if closed == "device":
        calls.append(lambda: za.attention(q, k, v, opened))
    twin.append(20)
    seq.save(path)
    twin.step(1)
    before, saved = state(cache), path.read_bytes()
    for _ in range(2):
        {"cache": cache, "device": opened}[closed].close()
    for call in calls:
        with pytest.raises(errors.ClosedError, match=f"^{CLOSED[closed]}$"):
            call()
        assert closed == "cache" or state(cache) == before
    seq.free()  # harmless
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == saved
    cache.close()
    if closed == "cache":  # the device is as good as new
        with za.KVCache(opened, SMALL, LAYERS, 640, "f16", 16) as other:
            Twin(za.Attention(other)).step(1)
        opened.close()
