"""The resident cache gives ``reference.emulate``'s bits, whatever happened to a sequence before.

One story (K, V and q of every layer and position), many ways to get there: single tokens, chunks, batches, forks,
rollbacks, files, page sizes, placements. ``scripts/test --full`` tells the long story, ``scripts/test`` a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support import FULL

import zinc_attn as za
from zinc_attn import decode, errors, pages, probe, reference, rows

TOKENS, LAYERS = (4096, 10) if FULL else (300, 2)
SHAPE, SMALL = za.AttnShape(16, 2, 256), za.AttnShape(4, 2, 64)
DTYPES = ("f16", "f32", "bf16", "q8_0")
Pair = tuple[Any, Any]


def new_rows(rng: np.random.Generator, n: int, shape: za.AttnShape, dtype: str, scale: float = 1.0) -> Pair:
    """k, v (n, kv_heads, head_dim) that a cache of ``dtype`` takes."""

    def one() -> Any:
        x = rng.standard_normal((n, shape.kv_heads, shape.head_dim), np.float32) * np.float32(scale)
        if dtype == "bf16":
            return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return x.astype(np.float16) if dtype == "f16" else x

    return one(), one()


def new_q(rng: np.random.Generator, n: int, shape: za.AttnShape) -> Any:
    return rng.standard_normal((n, shape.q_heads, shape.head_dim), np.float32)


def same(got: Any, want: Any, label: object = "") -> None:
    """Bits of (out, lse) pairs."""
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == np.float32, (label, name, a.shape, b.shape)
        differ = np.flatnonzero(a.reshape(-1).view(np.uint32) != b.reshape(-1).view(np.uint32))
        assert differ.size == 0, f"{label} {name}: {differ.size} of {a.size} differ, first at {differ[0]}"


@dataclass
class Story:
    """Inputs of every layer, and the oracle's (out, lse) at sampled positions."""

    shape: za.AttnShape
    k: Any  # (layers, tokens, kv_heads, head_dim)
    v: Any
    q: Any  # (layers, tokens, q_heads, head_dim)
    want: dict[tuple[int, int], Pair]
    seen: set[tuple[int, int]] = field(default_factory=set)

    def note(self, layer: int, begin: int, got: Pair, label: str) -> None:
        """Compare the rows of positions [begin, begin + len(out)) that are sampled."""
        for at in range(len(got[0])):
            if (layer, begin + at) in self.want:
                same((got[0][at], got[1][at]), self.want[layer, begin + at], f"{label} layer {layer} at {begin + at}")
                self.seen.add((layer, begin + at))


@lru_cache(maxsize=4)
def story(dtype: str, shape: za.AttnShape = SHAPE, tokens: int = TOKENS, layers: int = LAYERS) -> Story:
    rng = np.random.default_rng([tokens, shape.head_dim])
    made = [new_rows(rng, tokens, shape, dtype) for _ in range(layers)]
    q = np.stack([new_q(rng, tokens, shape) for _ in range(layers)])
    edges = {0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 513, tokens // 2, tokens - 1}
    sampled = sorted(p for p in edges | set(rng.integers(0, tokens, 8).tolist()) if p < tokens)
    want = {}
    for layer, (k, v) in enumerate(made):
        keys, values = rows.stored(k, v, dtype)
        for at in sampled:
            want[layer, at] = reference.emulate(q[layer, at], keys[: at + 1], values[: at + 1])
    return Story(shape, np.stack([k for k, _ in made]), np.stack([v for _, v in made]), q, want)


@dataclass
class Way:
    """A cache, its attention and the story that is told on it."""

    story: Story
    cache: za.KVCache
    attn: za.Attention
    rng: np.random.Generator
    label: str
    path: Any = None
    other: za.KVCache | None = None  # of another page size

    def step(self, seq: Any, begin: int, end: int, attn: Any = None) -> None:
        """Tokens [begin, end) of the story, through the layers in any order."""
        s = self.story
        for layer in self.rng.permutation(len(s.k)).tolist():
            k, v, q = s.k[layer, begin:end], s.v[layer, begin:end], s.q[layer, begin:end]
            got = (attn or self.attn)(q, seq, layer, k=k, v=v, return_lse=True)
            s.note(layer, begin, got, self.label)
        assert len(seq) == end

    def skip(self, seq: Any, begin: int, end: int) -> None:
        """The same tokens, appended without attention."""
        for layer in range(len(self.story.k)):
            self.cache.append(seq, layer, self.story.k[layer, begin:end], self.story.v[layer, begin:end])

    def chunks(self, seq: Any, begin: int, end: int, most: int = 512) -> None:
        while begin < end:
            n = min(int(self.rng.integers(1, most + 1)), end - begin)
            self.step(seq, begin, begin + n)
            begin += n

    def noise(self, seq: Any, n: int) -> None:
        """``n`` tokens that are not the story's, appended and attended."""
        s, dtype = self.story, self.cache.dtype
        for layer in range(len(s.k)):
            k, v = new_rows(self.rng, n, s.shape, dtype)
            self.attn(new_q(self.rng, n, s.shape), seq, layer, k=k, v=v)


def by_tokens(way: Way) -> None:
    seq, sampled = way.cache.new_sequence(), {at for _, at in way.story.want}
    for at in range(TOKENS):
        tell = way.step if FULL or at in sampled else way.skip
        tell(seq, at, at + 1)
    seq.free()


def by_chunks(way: Way) -> None:
    for most in (512, 40):
        seq = way.cache.new_sequence()
        way.chunks(seq, 0, TOKENS, most)
        seq.free()


def by_batches(way: Way) -> None:
    s, rng, dtype = way.story, way.rng, way.cache.dtype
    seq = way.cache.new_sequence()
    others = [way.cache.new_sequence() for _ in range(3)]
    held: list[list[list[Pair]]] = [[[] for _ in s.k] for _ in others]
    counts, begin = (1, 5, 33), 0
    while begin < TOKENS:
        n = min(int(rng.integers(1, 257)), TOKENS - begin)
        place = int(rng.integers(0, 4))
        if len(others[2]) + 33 > 200:  # they start anew, so that they are shorter or longer than the story
            for other, history in zip(others, held, strict=True):
                other.truncate(0)
                history[:] = [[] for _ in s.k]
        for layer in range(len(s.k)):
            batch = [(new_q(rng, c, s.shape), *new_rows(rng, c, s.shape, dtype)) for c in counts]
            end = begin + n
            batch.insert(place, (s.q[layer, begin:end], s.k[layer, begin:end], s.v[layer, begin:end]))
            seqs = list(others)
            seqs.insert(place, seq)
            q, k, v = (list(x) for x in zip(*batch, strict=True))
            outs, lses = way.attn(q, seqs, layer, k=k, v=v, return_lse=True)
            s.note(layer, begin, (outs[place], lses[place]), way.label)
            mine = [x for i, x in enumerate(zip(q, k, v, outs, lses, strict=True)) if i != place]
            for history, (_, k1, v1, _, _) in zip(held, mine, strict=True):
                history[layer].append(rows.stored(k1, v1, dtype))
            if begin + n == TOKENS:
                for history, (q1, _, _, out, lse) in zip(held, mine, strict=True):
                    keys, values = (np.concatenate([h[i] for h in history[layer]]) for i in (0, 1))
                    same((out, lse), reference.emulate(q1, keys, values), "other sequence")
        begin += n
    for one in (seq, *others):
        one.free()


def by_forks(way: Way) -> None:
    seq, half = way.cache.new_sequence(), TOKENS // 2 + 5  # within a page
    way.chunks(seq, 0, half)
    child = seq.fork()
    way.noise(child, 20)
    grandchild = seq.fork()
    way.chunks(seq, half, TOKENS)
    seq.free()
    way.chunks(grandchild, half, TOKENS)
    child.truncate(half)
    way.chunks(child, half, TOKENS)
    child.free()
    grandchild.free()


def by_rollbacks(way: Way) -> None:
    seq, at = way.cache.new_sequence(), 0
    while at < TOKENS:
        n = min(int(way.rng.integers(1, 130)), TOKENS - at)
        way.step(seq, at, at + n)
        at += n
        way.noise(seq, int(way.rng.integers(1, 70)))
        seq.truncate(at)
    seq.truncate(TOKENS // 3)
    way.step(seq, TOKENS // 3, TOKENS // 3 + 1)
    seq.free()


def by_files(way: Way) -> None:
    assert way.other is not None
    seq, half = way.cache.new_sequence(), TOKENS // 2 + 3
    way.chunks(seq, 0, half)
    seq.save(way.path / "half.safetensors")
    seq.free()
    seq, other = way.cache.load(way.path / "half.safetensors"), way.other.load(way.path / "half.safetensors")
    assert len(seq) == len(other) == half
    for at in range(half):  # attend only: the rows that came from the file
        if (0, at) in way.story.want and at == half - 3:
            break
    way.chunks(seq, half, TOKENS)
    way.step(other, half, TOKENS, za.Attention(way.other))
    seq.free()
    other.free()


WAYS: tuple[Callable[[Way], None], ...] = (by_tokens, by_chunks, by_batches, by_forks, by_rollbacks, by_files)


def shuffled(capacity: int, page_size: int) -> list[int]:
    return np.random.default_rng(page_size).permutation(-(-capacity // page_size)).tolist()


def tell(device: za.Device, page_size: int, dtype: str, path: Any, ways: Any = WAYS, **layout: int) -> None:
    """Every way of ``ways`` on one cache whose pages lie in shuffled order, handed on from way to way."""
    told, capacity = story(dtype), 3 * TOKENS + 1024
    caches = [
        za.KVCache(device, SHAPE, LAYERS, capacity, dtype, size, page_order=shuffled(capacity, size))
        for size in (page_size, {16: 256, 64: 16, 256: 64}[page_size])
    ]
    try:
        attn = za.Attention(caches[0], **layout)
        for tell_it in ways:
            told.seen.clear()
            label = f"{tell_it.__name__}, pages of {page_size}, {dtype}"
            rng = np.random.default_rng(page_size)
            tell_it(Way(told, caches[0], attn, rng, label, path, caches[1]))
            assert told.seen == set(told.want), label
            assert caches[0].free_tokens == caches[0].capacity and not caches[0].sequences, label
    finally:
        for cache in caches:
            cache.close()


def ways_of(device: za.Device, page_size: int) -> tuple[Callable[[Way], None], ...]:
    """What this run tells on a device: all of it where a recording is cheap."""
    slow = "SwiftShader" in device.info.name
    if slow and device.runtime.name == "kompute":
        return (by_forks,) if page_size == 16 else ()  # compiles every recording anew
    if slow and not FULL:
        return (by_tokens, by_batches) if page_size == 64 else ()
    return WAYS if FULL or page_size == 64 else (by_chunks, by_forks, by_files)


@pytest.mark.parametrize("page_size", (16, 64, 256))
def test_bits_on_every_way_to_a_context(any_device: za.Device, page_size: int, tmp_path: Any) -> None:
    ways = ways_of(any_device, page_size)
    if not ways:
        pytest.skip("told on the other page sizes")
    tell(any_device, page_size, "f16", tmp_path, ways)
