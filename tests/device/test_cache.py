"""The resident cache gives ``reference.emulate``'s bits, whatever happened to a sequence before.

One story (K, V and q of every layer and position), many ways to get there: single tokens, chunks, batches, forks,
rollbacks, files, page sizes, placements. ``scripts/test --full`` tells the long story, ``scripts/test`` a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from cache_rows import DTYPES, SHAPE, SMALL, STEPS, Pair, grown, new_q, new_rows, same
from support import FULL

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows

TOKENS, LAYERS = (4096, 10) if FULL else (300, 2)


@dataclass
class Story:
    """Inputs of every layer, and the oracle's (out, lse) at sampled positions."""

    shape: za.AttnShape
    k: Any  # (layers, tokens, kv_heads, head_dim)
    v: Any
    q: Any  # (layers, tokens, q_heads, head_dim)
    want: dict[tuple[int, int], Pair]
    seen: set[tuple[int, int]] = field(default_factory=set)

    def first(self, layer: int, begin: int, end: int) -> int:
        """The first row of a chunk to attend: the long story's are those from a sampled one on, or the last."""
        if not FULL:
            return begin
        return min((at for one, at in self.want if one == layer and begin <= at < end), default=end - 1)

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
    want = {}
    for layer, (k, v) in enumerate(made):
        keys, values = rows.stored(k, v, dtype)
        few = edges if layer in (0, layers - 1) else {tokens // 2, tokens - 1}
        for at in sorted(few | set(rng.integers(0, tokens, 2 if layers > 2 else 5).tolist())):
            if at < tokens:
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
            first = s.first(layer, begin, end)
            k, v, q = s.k[layer, begin:end], s.v[layer, begin:end], s.q[layer, first:end]
            got = (attn or self.attn)(q, seq, layer, k=k, v=v, return_lse=True)
            s.note(layer, first, got, self.label)
        assert len(seq) == end

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
            self.attn(new_q(self.rng, min(n, 3), s.shape), seq, layer, k=k, v=v)


def by_tokens(way: Way) -> None:
    """Layer 0 attends at every token, the others where it is sampled."""
    s, seq = way.story, way.cache.new_sequence()
    for at in range(TOKENS):
        for layer in range(len(s.k)):
            k, v = s.k[layer, at], s.v[layer, at]
            if (layer == 0 and FULL) or (layer, at) in s.want:
                out, lse = way.attn(s.q[layer, at], seq, layer, k=k, v=v, return_lse=True)
                s.note(layer, at, (out[None], lse[None]), way.label)
            else:
                way.cache.append(seq, layer, k, v)
    assert len(seq) == TOKENS
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
            first = s.first(layer, begin, end)
            batch.insert(place, (s.q[layer, first:end], s.k[layer, begin:end], s.v[layer, begin:end]))
            seqs = list(others)
            seqs.insert(place, seq)
            q, k, v = (list(x) for x in zip(*batch, strict=True))
            outs, lses = way.attn(q, seqs, layer, k=k, v=v, return_lse=True)
            s.note(layer, first, (outs[place], lses[place]), way.label)
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
    seq, half = way.cache.new_sequence(), TOKENS // 2 + 1
    way.chunks(seq, 0, half)
    seq.save(way.path / "half.safetensors")
    seq.free()
    seq, other = way.cache.load(way.path / "half.safetensors"), way.other.load(way.path / "half.safetensors")
    assert len(seq) == len(other) == half
    for layer in range(len(way.story.k)):  # the rows that came from the file, on their own
        got = way.attn(way.story.q[layer, half - 1], seq, layer, return_lse=True)
        same(got, way.story.want[layer, half - 1], f"{way.label} layer {layer}")
    way.chunks(seq, half, TOKENS)
    way.step(other, half, half + 33, za.Attention(way.other))
    seq.free()
    other.free()


WAYS: tuple[Callable[[Way], None], ...] = (by_tokens, by_chunks, by_batches, by_forks, by_rollbacks, by_files)


def shuffled(capacity: int, page_size: int) -> list[int]:
    return np.random.default_rng(page_size).permutation(-(-capacity // page_size)).tolist()


def tell(device: za.Device, shape: za.AttnShape, page_size: int, path: Any, ways: Any) -> None:
    """Every way of ``ways`` on one cache whose pages lie in shuffled order, handed on from way to way."""
    dtype = "f16"
    told, capacity = story(dtype, shape), 3 * TOKENS + 1024
    caches = [
        za.KVCache(device, shape, LAYERS, capacity, dtype, size, page_order=shuffled(capacity, size))
        for size in (page_size, {16: 256, 64: 16, 256: 64}[page_size])
    ]
    try:
        attn = za.Attention(caches[0])
        for tell_it in ways:
            told.seen.clear()
            label = f"{tell_it.__name__}, pages of {page_size}, {dtype}"
            rng = np.random.default_rng(page_size)
            tell_it(Way(told, caches[0], attn, rng, label, path, caches[1]))
            assert told.seen == set(told.want), label
            assert caches[0].pool.used_pages == 0 and not caches[0].sequences, label
    finally:
        for cache in caches:
            cache.close()


def ways_of(device: za.Device, page_size: int) -> tuple[Callable[[Way], None], ...]:
    """What this run tells on a device: all of it where a recording is cheap."""
    slow = "SwiftShader" in device.info.name
    if slow and device.runtime.name == "kompute":
        return (by_forks,) if page_size == 16 and FULL else ()
    if slow and FULL:
        return (by_tokens, by_batches, by_forks) if page_size == 64 else ()
    if slow:  # with the pipelines of test_bits_of_every_dtype
        return (by_batches,) if page_size == 16 else ()
    if FULL:
        some = {16: (by_chunks, by_forks, by_files), 64: WAYS, 256: (by_chunks, by_batches, by_rollbacks)}
        return some[page_size]
    if device.runtime.name == "kompute":
        return {16: (by_chunks,), 64: (by_batches, by_forks, by_files), 256: (by_rollbacks,)}[page_size]
    return WAYS if page_size == 64 else (by_chunks, by_forks)


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("page_size", (16, 64, 256))
def test_bits_on_every_way_to_a_context(any_device: za.Device, page_size: int, tmp_path: Any) -> None:
    ways = ways_of(any_device, page_size)
    if not ways:
        pytest.skip("told on the other page sizes")
    tell(any_device, SHAPE if FULL else SMALL, page_size, tmp_path, ways)
    if len(ways) == len(WAYS) and not FULL:  # a page knows no shape, so one way stands for all
        tell(any_device, SHAPE, page_size, tmp_path, (by_forks,))


# --- dtypes, layouts, shapes -------------------------------------------------------------------------------


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype(any_device: za.Device, dtype: str) -> None:
    slow = "SwiftShader" in any_device.info.name and any_device.runtime.name == "kompute"
    grown(any_device, SMALL, 2, 256, dtype, 16, steps=STEPS[:3] if slow and not FULL else STEPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_values_near_the_dtypes_lower_end(device: za.Device, dtype: str) -> None:
    """float16 subnormals, q8_0 scales that are subnormal or 0, and what is flushed on entry."""
    for scale in (2.0**-21, 2.0**-41):
        grown(device, SMALL, 2, 256, dtype, 16, steps=((20, 20), (1, 1)), scale=scale)


def test_fixed_layouts_and_dtypes_do_not_show(device: za.Device) -> None:
    """One input, f16 or f32, in every layout: one output."""
    outs, shape = {}, za.AttnShape(6, 2, 64)
    for dtype in ("f16", "f32"):
        cache = za.KVCache(device, shape, 1, 1024, dtype, 64)
        for layout in ({}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 100}):
            attn, seq, found = za.Attention(cache, **layout), cache.new_sequence(), []
            rng = np.random.default_rng(5)
            for n in (700, 1, 30):
                k, v = new_rows(rng, n, shape, "f16")
                k, v = (k, v) if dtype == "f16" else (k.astype(np.float32), v.astype(np.float32))
                found.append(attn(new_q(rng, min(n, 20), shape), seq, 0, k=k, v=v, return_lse=True))
            outs[dtype, tuple(layout.items())] = found
            seq.free()
        cache.close()
    first = next(iter(outs.values()))
    for label, found in outs.items():
        for got, want in zip(found, first, strict=True):
            same(got, want, label)
    rng = np.random.default_rng(5)
    k, v = new_rows(rng, 700, shape, "f16")
    same(first[0], reference.emulate(new_q(rng, 20, shape), k, v), "the first chunk")


SHAPES = ["3/1/64", "7/1/80", "6/2/96", "9/1/112", "2/2/128", "3/1/192", "1/1/256", "4/2/512"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES if FULL else ("f16", "q8_0"))
def test_bits_of_head_dims_and_groups(device: za.Device, shape: str, dtype: str) -> None:
    parsed = za.AttnShape.parse(shape)
    few = ("6/2/96", "7/1/80")
    if not FULL and shape not in (few if dtype == "q8_0" or device.runtime.name == "kompute" else SHAPES):
        pytest.skip("the long run has it")
    grown(device, parsed, 1, 256, dtype, 16, steps=((67, 3), (1, 1)))


@pytest.mark.both_dispatchers
def test_rows_of_a_chunk_have_the_bits_of_decode(device: za.Device) -> None:
    cache, rng = za.KVCache(device, SMALL, 1, 1024, "f16", 16), np.random.default_rng(1)
    k, v = new_rows(rng, 150, SMALL, "f16")
    q, attn = new_q(rng, 150, SMALL), za.Attention(cache)
    one, many = cache.new_sequence(), cache.new_sequence()
    out, lse = attn(q, many, 0, k=k, v=v, return_lse=True)
    for at in range(150):
        same(attn(q[at], one, 0, k=k[at], v=v[at], return_lse=True), (out[at], lse[at]), at)
    same((out, lse), reference.emulate(q, k, v), "the chunk")
    q = q[-1:].repeat(200, axis=0)  # more rows than tokens: some see no key
    more = attn(q, many, 0, return_lse=True, allow_empty=True)
    same(more, reference.emulate(q, k, v), "rows before the first key")
    assert np.isneginf(more[1][:50]).all() and not more[0][:50].any()
    cache.close()


@pytest.mark.both_dispatchers
def test_an_empty_sequence_has_output_0_and_lse_minus_infinity(device: za.Device) -> None:
    cache = za.KVCache(device, SMALL, 1, 64)
    for layout in ({}, {"num_splits": 3}):
        for n in (1, 3):
            out, lse = za.Attention(cache, **layout)(
                np.ones((n, 4, 64), np.float32), cache.new_sequence(), 0, return_lse=True, allow_empty=True
            )
            assert not out.view(np.uint32).any() and np.isneginf(lse).all()
    assert za.Attention(cache)([], [], 0) == []
    cache.close()


def test_q8_0_accuracy_against_float64(device: za.Device, record_property: Any) -> None:
    """|x - stored| <= d / 2 + max|x| * 2**-11, d = max|x| / 127: half a step, and the float16 rounding of the step.

    Scores move by at most e = scale * max|q (k - stored k)|, so weights p by a factor within exp(+-2 e), and the
    output by at most (exp(2 e) - 1) * sum p |v - out| + sum p |v - stored v| * exp(2 e).
    """
    tokens, rng = 1000, np.random.default_rng(8)
    k, v = new_rows(rng, tokens, SHAPE, "q8_0")
    q = new_q(rng, 1, SHAPE)
    cache = za.KVCache(device, SHAPE, 1, 1024, "q8_0")
    seq = cache.new_sequence()
    out, lse = za.Attention(cache)(q, seq, 0, k=k, v=v, return_lse=True)
    cache.close()
    keys, values = rows.stored(k, v, "q8_0")
    same((out, lse), reference.emulate(q, keys, values), "emulation")
    truth, _ = reference.attention(q, k, v)
    for x, stored in ((k, keys), (v, values)):
        largest = np.repeat(np.abs(x.reshape(tokens, 2, 8, 32)).max(-1), 32, axis=-1).reshape(x.shape)
        step = largest.astype(np.float64) / 127
        assert np.all(np.abs(x - stored) <= step / 2 * (1 + 2.0**-10) + largest * 2.0**-11)
    bound = np.empty_like(truth)
    for head in range(16):
        k64, v64 = k[:, head // 8].astype(np.float64), v[:, head // 8].astype(np.float64)
        row = q[0, head].astype(np.float64) / 16
        p = np.exp(k64 @ row - (k64 @ row).max())
        p, e = p / p.sum(), np.abs((k64 - keys[:, head // 8]) @ row).max()
        spread, off = p @ np.abs(v64 - truth[0, head]), p @ np.abs(v64 - values[:, head // 8])
        bound[0, head] = np.expm1(2 * e) * spread + np.exp(2 * e) * off + 2.0**-20
    error, relative = np.abs(out - truth), np.linalg.norm(out - truth) / np.linalg.norm(truth)
    figure = f"max error {error.max():.2e}, bound {bound.max():.2e}, relative L2 {relative:.2e}"
    record_property("q8_0", figure)
    print(f"q8_0 at {tokens} keys of 16/2/256: {figure}")
    assert np.all(error <= bound)
    assert relative < 0.02  # what the rounding of random values leaves; the bound above is for the worst case
