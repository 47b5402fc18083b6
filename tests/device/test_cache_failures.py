"""A failed or interrupted call leaves the cache as it was; threads share it; closed and forked ones refuse.

Every failure is injected, at the n-th call of the runtime for every n that a call makes; test_fuzz.py interrupts calls
between bytecodes. An untouched twin, another cache that does the same without failures, says what must come out.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL, Twin, new_q, new_rows
from interrupts import Interrupter, files
from page_tables import check_counts, largest
from support import differing

import zinc_attn as za
from zinc_attn import errors

pytestmark = pytest.mark.both_dispatchers

LAYERS = 2
METHODS = ("run", "start", "write", "read", "record", "buffer", "kernel")


def values(n: int, seed: int) -> Any:
    """k, v (n, 2, 64) float16; later seeds are larger, so that the largest magnitudes move."""
    return new_rows(np.random.default_rng(seed), n, SMALL, "f16", 1 + seed / 10)


def queries(n: int, seed: int) -> Any:
    return new_q(np.random.default_rng(seed), n, SMALL)


class World:
    """A cache with a sequence, a fork of it that shares a partly filled page, and one that goes its own way."""

    def __init__(self, device: za.Device, path: Any) -> None:
        self.cache = za.KVCache(device, SMALL, LAYERS, 640, "f16", 16)
        self.path = path
        self.pending: Any = None  # what names a call, and the call
        self.attn, self.looker = za.Attention(self.cache), za.Attention(self.cache)
        self.a, self.c = self.cache.new_sequence(), self.cache.new_sequence()
        for layer in range(LAYERS):
            self.cache.append(self.a, layer, *values(20, 1))
            self.cache.append(self.c, layer, *values(70, 2))
        self.b = self.a.fork()

    def state(self) -> Any:
        """What a failed call must not change. Page numbers too: what was taken came back to its place."""
        check_counts(self.cache.pool, [s.pages for s in self.cache.sequences])
        held = [(s.lengths, s.pages.table) for s in self.cache.sequences]
        return held, self.cache.free_tokens, largest(self.cache)

    def look(self) -> list[Any]:
        """The bits of every live sequence and layer, by an Attention that no failure has touched."""
        seqs, q = self.cache.sequences, [queries(1, 9)] * len(self.cache.sequences)
        pairs = [self.looker(q, seqs, layer, return_lse=True) for layer in range(LAYERS)]
        return [x.copy() for pair in pairs for column in pair for x in column]

    def append(self, seq: Any, layer: int, n: int, seed: int) -> None:
        self.cache.append(seq, layer, *values(n, seed))

    def attend(self, seq: Any, layer: int, n: int, seed: int, rows_of_q: int = 1) -> Any:
        return self.attn(queries(rows_of_q, seed), seq, layer, *values(n, seed), return_lse=True)

    def submit(self, seq: Any, layer: int, seed: int) -> Any:
        """Whoever is interrupted in ``result`` asks again; one that has failed is made again."""
        try:
            if self.pending is None or self.pending[0] != (layer, seed):
                with self.cache.device.together():
                    made = self.attn.submit(queries(1, seed), seq, layer, *values(1, seed), return_lse=True)
                    self.pending = (layer, seed), made
            return self.pending[1].result()
        except Exception:
            self.pending = None
            raise

    def batch(self, layer: int, n: int, seed: int) -> Any:
        k, v = map(list, zip(*(values(n, seed + i) for i in range(3)), strict=True))
        q = [queries(n, seed + i) for i in range(3)]
        outs, lses = self.attn(q, [self.a, self.b, self.c], layer, k, v, return_lse=True)
        return [*outs, *lses]

    def load(self) -> None:
        self.cache.load(self.path).free()


def actions() -> list[Callable[[World], Any]]:
    """One story; each call is hit on its own, and the ones behind it show what is left behind."""
    return [
        lambda w: w.batch(1, 3, 7),  # copies the shared page for one of its two holders, in any order of layers
        lambda w: w.batch(0, 3, 7),
        # from the second on steady: nothing is new but the token
        *(lambda w, seed=seed, layer=layer: w.attend(w.a, layer, 1, seed) for seed in (4, 5, 6) for layer in (0, 1)),
        lambda w: w.append(w.b, 1, 40, 3),
        lambda w: w.append(w.b, 0, 40, 3),
        lambda w: w.attend(w.c, 0, 90, 11, 90),
        lambda w: w.attn(queries(2, 3), w.c, 1, return_lse=True),
        lambda w: w.attend(w.c, 1, 90, 11, 90),
        lambda w: w.c.save(w.path),
        World.load,
        lambda w: w.a.truncate(5),
        lambda w: w.attend(w.a, 0, 1, 12),
        lambda w: w.attend(w.a, 1, 1, 12),
        lambda w: w.submit(w.a, 0, 13),
        lambda w: w.submit(w.a, 1, 13),
        lambda w: w.b.keep([0, 1, 4, 5, 20, 33], 40),
    ]


class Fault:
    """Raises ``error`` at the n-th call of the runtime's methods, before or after it is made."""

    def __init__(self, error: type[BaseException], after: bool) -> None:
        self.error, self.after, self.left, self.hit = error, after, -1, False

    def wrap(self, method: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mine = self.left == 0
            self.left -= 1
            made = None if mine and not self.after else method(*args, **kwargs)
            if mine:
                self.hit = True
                raise self.error("injected")
            return made

        return wrapped

    def at(self, n: int) -> None:
        self.left, self.hit = n, False


def equal(got: Any, want: Any) -> bool:
    if got is None or want is None:
        return got is want
    return not any(differing(np.asarray(a), np.asarray(b)) for a, b in zip(got, want, strict=True))


@pytest.fixture
def worlds(device: za.Device, tmp_path: Any) -> Iterator[tuple[World, World]]:
    """The one that is hit, and its twin."""
    made = World(device, tmp_path / "hit"), World(device, tmp_path / "twin")
    yield made
    for world in made:
        world.cache.close()


FAULTS = {
    "out of memory": (errors.DeviceMemoryError, False),
    "lost": (errors.DeviceLostError, True),
    "interrupt": (KeyboardInterrupt, False),
    "interrupt behind": (KeyboardInterrupt, True),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_at_any_runtime_call_changes_nothing(device, monkeypatch, tmp_path, worlds, kind):
    (world, twin), (error, after) = worlds, FAULTS[kind]
    fault, hits = Fault(error, after), []
    for method in METHODS:
        monkeypatch.setattr(device.runtime, method, fault.wrap(getattr(device.runtime, method)))
    for number, action in enumerate(actions()):
        before, bits = world.state(), twin.look()
        for n in itertools.count():
            fault.at(n)
            try:
                got = action(world)
            except error:
                assert fault.hit and world.state() == before, f"action {number} call {n}"
                fault.at(-1)
                if n % 3 == 1:  # looking could also mend what a failure left
                    assert equal(world.look(), bits), f"action {number} call {n}"
                continue
            assert not fault.hit, f"action {number}: the error of call {n} was swallowed"
            fault.at(-1)
            break
        hits.append(n)
        assert equal(got, action(twin)), f"action {number} after {n} failures"
        assert world.state() == twin.state()
        assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]
    assert sum(hits) > 60 and min(h for i, h in enumerate(hits) if i != 15) >= 3, hits
    assert equal(world.look(), twin.look())


def test_a_copied_page_of_a_failed_call_is_not_used_again(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page goes to another sequence, while the call that is made again finds its old page its own: no copy."""
    start = device.runtime.start

    def interrupted(recording: Any) -> None:
        start(recording)
        raise KeyboardInterrupt  # behind the copy and the attention

    with za.KVCache(device, SMALL, 1, 1024, "f32") as cache:
        one, heir = (Twin(za.Attention(cache), seed) for seed in (0, 1))
        one.append(100)
        fork = one.fork()
        again = one.other(one.sequence)
        with monkeypatch.context() as patch:
            patch.setattr(device.runtime, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.step(1)
        fork.sequence.free()
        heir.append(150)
        again.step(1)
        again.look()
        heir.look()


def test_an_interrupt_of_a_file_leaves_none_open_and_none_behind(device: za.Device, tmp_path: Any) -> None:
    """Before each opcode of ``files``; a file that is dropped while it is open warns, and that fails the test, too."""

    cache, path = za.KVCache(device, SMALL, 1, 64, "f16", 16), tmp_path / "file"
    seq = cache.new_sequence()
    cache.append(seq, 0, *values(3, 1))
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


def test_threads_decode_their_own_sequences_of_one_cache(device: za.Device) -> None:
    with za.KVCache(device, SMALL, LAYERS, 2048, "f16", 16) as cache:
        attn = za.Attention(cache)

        def decode(seed: int) -> Twin:
            one = Twin(attn, seed)
            for step, n in enumerate((30 + seed, 1, 1, 5, 1, 1, 70, 1)):
                one.step(n)
                if step == 3:
                    fork = one.fork()
                    one.sequence.free()
                    one = fork
            return one

        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(decode, range(6)))
        check_counts(cache.pool, [one.sequence.pages for one in found])
        assert len(cache.sequences) == 6


CLOSED = {
    "cache": r"KVCache: used after close\(\)",
    "device": r".*: used after close\(\); open it again with Device\.open\(\)",
}


@pytest.mark.parametrize("closed", CLOSED)
def test_after_close(device: za.Device, tmp_path: Any, closed: str) -> None:
    """Of the cache, or of the device under it; test_faults.py has the same of forked children."""
    opened = za.Device.open(device.info.index, runtime=device.runtime.name)
    world = World(opened, tmp_path / "file")
    calls = [
        lambda: world.append(world.a, 0, 1, 1),
        lambda: world.attend(world.a, 0, 1, 1),
        lambda: world.attn(queries(1, 1), world.a, 0),
        lambda: world.a.save(world.path),
        world.cache.new_sequence,
        world.load,
        world.a.fork,
        lambda: world.a.truncate(0),
        lambda: za.Attention(world.cache),
    ]
    if closed == "device":
        calls.append(lambda: za.attention(queries(1, 1), *values(9, 1), opened))
    world.a.save(world.path)
    for layer in range(LAYERS):
        world.attend(world.a, layer, 1, 1)
    before, saved = world.state(), world.path.read_bytes()
    for _ in range(2):
        {"cache": world.cache, "device": opened}[closed].close()
    for call in calls:
        with pytest.raises(errors.ClosedError, match=f"^{CLOSED[closed]}$"):
            call()
        assert closed == "cache" or world.state() == before
    world.a.free()  # harmless
    assert [*tmp_path.iterdir()] == [world.path] and world.path.read_bytes() == saved
    world.cache.close()
    if closed == "cache":  # the device is as good as new
        other = World(opened, tmp_path / "file")
        other.attend(other.a, 0, 1, 1)
        other.cache.close()
        opened.close()
