"""The resident cache gives ``reference.emulate``'s bits, whatever happened to a sequence before.

One story (K, V and q of every layer and position), many ways to get there: single tokens, chunks, batches, forks,
rollbacks, files, page sizes, placements. ``scripts/test --full`` tells the long story, ``scripts/test`` a short one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from support import FULL

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.cache.layer_storage import buffer_count
from zinc_attn.cache.pages import CapacityError, StepError
from zinc_attn.decode import runner
from zinc_attn.planning import inputs
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime import loader as libvulkan

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


def grow(cache: za.KVCache, steps: Any, seed: int = 0, scale: float = 1.0, **layout: Any) -> list[Pair]:
    """(out, lse) of every step (tokens, query rows) and layer on one sequence, each equal to the emulation."""
    rng, shape, attn = np.random.default_rng(seed), cache.shape, za.Attention(cache, **layout)
    seq, held, found = cache.new_sequence(), [[] for _ in range(cache.num_layers)], []
    for n, q_len in steps:
        for layer in range(cache.num_layers):
            k, v = new_rows(rng, n, shape, cache.dtype, scale)
            q = new_q(rng, q_len, shape)
            got = attn(q, seq, layer, k=k, v=v, return_lse=True)
            held[layer].append(rows.stored(k, v, cache.dtype))
            keys, values = (np.concatenate([h[i] for h in held[layer]]) for i in (0, 1))
            same(got, reference.emulate(q, keys, values), (str(shape), cache.dtype, n, q_len, layer))
            found.append(got)
    seq.free()
    return found


STEPS = ((5, 5), (1, 1), (70, 70), (60, 2), (1, 1), (1, 1))


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype(any_device: za.Device, dtype: str) -> None:
    slow = "SwiftShader" in any_device.info.name and any_device.runtime.name == "kompute"
    with_cache(za.KVCache(any_device, SMALL, 2, 256, dtype, 16), grow, STEPS[:3] if slow and not FULL else STEPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_values_near_the_dtypes_lower_end(device: za.Device, dtype: str) -> None:
    """float16 subnormals, q8_0 scales that are subnormal or 0, and what is flushed on entry."""
    for scale in (2.0**-21, 2.0**-41):
        with_cache(za.KVCache(device, SMALL, 2, 256, dtype, 16), grow, ((20, 20), (1, 1)), scale=scale)


def with_cache(cache: za.KVCache, use: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return use(cache, *args, **kwargs)
    finally:
        cache.close()


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
    with_cache(za.KVCache(device, parsed, 1, 256, dtype, 16), grow, ((67, 3), (1, 1)))


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
    more = attn(
        q[-1:].repeat(200, axis=0), many, 0, return_lse=True, allow_empty=True
    )  # more rows than tokens: some see no key
    same(more, reference.emulate(q[-1:].repeat(200, axis=0), k, v), "rows before the first key")
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


# --- memory: shards, blocks, recordings --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_cut_into_shards_have_the_same_bits(
    device: za.Device, monkeypatch: pytest.MonkeyPatch, dtype: str, tmp_path: Any
) -> None:
    shape = za.AttnShape(6, 3, 64)
    whole = with_cache(za.KVCache(device, shape, 2, 256, dtype, 16), grow, STEPS)
    per_head = 256 * 64 * {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}[dtype] + (256 * 4 if dtype == "q8_0" else 0)
    for heads, cut in ((2, [1, 2]), (1, [1, 1, 1])):
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=heads * per_head))
        cache = za.KVCache(device, shape, 2, 256, dtype, 16)
        monkeypatch.undo()
        assert [[one.heads for one in layer.slices] for layer in cache.layers] == [cut] * 2
        for got, want in zip(grow(cache, STEPS), whole, strict=True):
            same(got, want, cut)
        k, v = new_rows(np.random.default_rng(0), 21, shape, dtype)
        seq = cache.new_sequence()
        for layer in (0, 1):
            cache.append(seq, layer, k, v)
        fork = seq.fork()  # page copies, gathers and files know shards too
        for layer in (0, 1):
            cache.append(fork, layer, v[:6], k[:6])
        fork.keep([0, 2, 5], 6)
        fork.save(tmp_path / "fork")
        back = cache.load(tmp_path / "fork")
        keys, values = rows.stored(np.concatenate([k, v[:6][[0, 2, 5]]]), np.concatenate([v, k[:6][[0, 2, 5]]]), dtype)
        q = new_q(np.random.default_rng(1), 1, shape)
        for one in (fork, back):
            same(za.Attention(cache)(q, one, 1, return_lse=True), reference.emulate(q, keys, values), cut)
        cache.close()


@pytest.mark.both_dispatchers
def test_a_call_in_several_blocks_of_rows_has_the_same_bits(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    start = device.runtime.start
    monkeypatch.setattr(device.runtime, "start", lambda recording: (runs.append(1), start(recording)))
    cache = za.KVCache(device, SMALL, 2, 2048, "f16", 16)
    grow(cache, ((300, 40), (1, 1), (20, 20)))
    assert len(runs) == 6  # one submission per call and layer
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 64 * 4 * 4 * 66)  # 64 states
    runs.clear()
    grow(cache, ((300, 40), (1, 1), (20, 20)))
    assert len(runs) > 12
    cache.close()


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("dtype", ("f16", "q8_0"))
def test_steady_decode_records_nothing(device: za.Device, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    cache, rng, made = za.KVCache(device, SMALL, 2, 1024, dtype, 64), np.random.default_rng(0), []
    record = device.runtime.record
    monkeypatch.setattr(device.runtime, "record", lambda *a, **k: (made.append(1), record(*a, **k))[1])
    attn, seq = za.Attention(cache), cache.new_sequence()
    counts = []
    for at in range(512):
        for layer in range(2):
            if at < 256:
                cache.append(seq, layer, *new_rows(rng, 1, SMALL, dtype))
            else:
                k, v = new_rows(rng, 1, SMALL, dtype)
                attn(new_q(rng, 1, SMALL), seq, layer, k=k, v=v)
        if at >= 256:
            counts.append((attn.recordings, len(made)))
    assert {recordings for recordings, _ in counts} == {1} and len(set(counts)) == 1, counts
    cache.close()


@pytest.mark.both_dispatchers
@pytest.mark.parametrize(("batch", "q_len", "window"), [(1, 1, None), (3, 1, 100), (2, 3, None)])
def test_what_was_prepared_is_not_made_again(
    device: za.Device, monkeypatch: pytest.MonkeyPatch, batch: int, q_len: int, window: int | None
) -> None:
    """Growth from nothing over several sizes records nothing, makes no buffer, and gives the oracle's bits."""
    tokens, layers = 1200 // q_len * q_len, 3
    cache, rng = za.KVCache(device, SMALL, layers, batch * 1280), np.random.default_rng(0)
    attn, seqs = za.Attention(cache, window=window), [cache.new_sequence() for _ in range(batch)]
    with pytest.raises(errors.ArgumentError, match=r"^tokens: got 1281, expected an int from 1 to 1280$"):
        attn.prepare(1281, batch=batch)
    attn.prepare(tokens, batch=batch, q_len=q_len)
    made = attn.recordings
    assert made == len(attn._runner.recordings) and 1 < made <= (5 if q_len == 1 else 10)
    with monkeypatch.context() as patch:
        for owner, name in ((device.runtime, "record"), (device.runtime, "run"), (runner, "growth_keys")):
            patch.setattr(owner, name, lambda *a, **k: pytest.fail("made by a second prepare"))
        attn.prepare(tokens, batch=batch, q_len=q_len)
        attn.replan(attn.cascade, device.info.layout_facts)
        with pytest.raises(pytest.fail.Exception):  # layouts may be others now
            attn.prepare(tokens, batch=batch, q_len=q_len)
    k, v = new_rows(rng, tokens, SMALL, "f16")
    for begin, end in ((0, 69), (999, 1101)):
        for seq, layer in itertools.product(seqs, range(layers) if begin else ()):
            cache.append(seq, layer, k[69:begin], v[69:begin])
        with monkeypatch.context() as patch:
            for name in ("record", "buffer", "kernel"):
                patch.setattr(device.runtime, name, lambda *a, **k: pytest.fail("made in a step"))
            for at in range(begin, end, q_len):
                one = slice(at, at + q_len)
                q = [new_q(rng, q_len, SMALL) for _ in range(batch)]
                for layer in range(layers):
                    found = attn(q, seqs, layer, [k[one]] * batch, [v[one]] * batch, return_lse=True)
                if at % 16 < q_len:
                    want = reference.emulate(q[-1], k[: at + q_len], v[: at + q_len], window=window)
                    same([x[-1] for x in found], want, at)
    assert attn.recordings == made
    cache.close()


@pytest.mark.both_dispatchers
def test_layers_in_several_buffers_have_the_same_bits(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_cache(za.KVCache(device, SMALL, 5, 256, "f16", 16), grow, STEPS)
    layer_bytes = 256 * SMALL.kv_heads * SMALL.head_dim * 2
    for most, numbers in ((4, [0, 0, 0, 1, 1]), (2, [0, 0, 1, 1, 2]), (1, [0, 1, 2, 3, 4])):
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=most * layer_bytes + 4))
        cache = za.KVCache(device, SMALL, 5, 256, "f16", 16)
        monkeypatch.undo()
        assert [layer.number for layer in cache.layers] == numbers
        assert buffer_count(cache.layers) == 2 * (numbers[-1] + 1)
        for got, want in zip(grow(cache, STEPS), whole, strict=True):
            same(got, want, most)
        seq = cache.new_sequence()
        k, v = new_rows(np.random.default_rng(0), 21, SMALL, "f16")
        for layer in range(5):
            cache.append(seq, layer, k * (1 + layer), v)
        fork = seq.fork()
        for layer in range(5):  # copies the shared page of every layer
            cache.append(fork, layer, v[:6], k[:6])
        seq.free()
        fork.keep((0, 2, 5), 6)
        for layer in range(5):
            got, kept = cache.read_rows(fork, layer, 0, 24), [0, 2, 5]
            want = rows.encode(np.r_[k * (1 + layer), v[kept]], np.r_[v, k[kept]], cache.shape, "f16")
            assert np.array_equal(got, want), (most, layer)
        cache.close()


@pytest.mark.both_dispatchers
def test_what_the_cache_says_of_its_memory(device: za.Device) -> None:
    cache = za.KVCache(device, SMALL, 3, 100, "f16", 16)
    assert (cache.capacity, cache.free_tokens, cache.bytes_per_token) == (100, 112, 3 * 2 * 2 * 64 * 2)
    assert cache.nbytes == 112 * cache.bytes_per_token
    assert {layer.number for layer in cache.layers} == {0}
    assert sum(s.k.nbytes + s.v.nbytes for s in cache.layers[0].slices) == cache.nbytes
    seq = cache.new_sequence()
    cache.append(seq, 0, *new_rows(np.random.default_rng(0), 17, SMALL, "f16"))
    assert cache.free_tokens == 112 - 32 and len(seq) == 0 and seq.lengths == (17, 0, 0)
    cache.close()


# --- q8_0 --------------------------------------------------------------------------------------------------


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


# --- refusals ----------------------------------------------------------------------------------------------


def k_(n: int = 1, dtype: Any = np.float16, shape: tuple[int, ...] = (2, 64)) -> Any:
    return np.ones((n, *shape), dtype)


def q_(n: int = 1, dtype: Any = np.float32, shape: tuple[int, ...] = (4, 64)) -> Any:
    return np.ones((n, *shape), dtype)


class Scene:
    """A float16 cache of 7 pages of 16: ``seq`` has 20 tokens, ``ahead`` has 3 in layer 0 and 2 in layer 1."""

    def __init__(self, device: za.Device) -> None:
        self.cache = za.KVCache(device, SMALL, 2, 100, "f16", 16, max_sequences=3)
        self.other = za.KVCache(device, SMALL, 2, 16, "f16", 16)
        self.attn = za.Attention(self.cache)
        self.seq, self.ahead = self.cache.new_sequence(), self.cache.new_sequence()
        self.foreign, self.gone = self.other.new_sequence(), self.cache.new_sequence()
        self.gone.free()
        rng = np.random.default_rng(0)
        for layer in (0, 1):
            self.cache.append(self.seq, layer, *new_rows(rng, 20, SMALL, "f16"))
            self.cache.append(self.ahead, layer, *new_rows(rng, 2, SMALL, "f16"))
        self.cache.append(self.ahead, 0, *new_rows(rng, 1, SMALL, "f16"))

    def state(self) -> Any:
        lives = (self.seq, self.ahead)
        self.cache.pool.check([s.pages for s in self.cache.sequences])
        bits = [x.tobytes() for s in lives for layer in (0, 1) for x in self.attn(q_(), s, layer, return_lse=True)]
        return bits, self.cache.free_tokens, [s.lengths for s in lives], len(self.cache.sequences), self.cache.largest

    def close(self) -> None:
        self.cache.close()
        self.other.close()


ROWS_TAKEN = "(tokens, 2, 64)"
BAD: list[tuple[Callable[[Scene], Any], type[Exception], str]] = [
    (
        lambda s: s.cache.append(s.seq, 0, k_(81), k_(81)),
        CapacityError,
        "k: got 81 tokens at length 20, expected at most 76: 4 of 7 pages of 16 tokens are free (capacity = 100, in "
        "whole pages); truncate() or free() a sequence, or make the cache with a larger capacity",
    ),
    (
        lambda s: s.attn(q_(), s.seq, 0, k=k_(77), v=k_(77)),
        CapacityError,
        "k: got 77 tokens at length 20, expected at most 76: 4 of 7 pages of 16 tokens are free (capacity = 100, in "
        "whole pages); truncate() or free() a sequence, or make the cache with a larger capacity",
    ),
    (
        lambda s: s.attn([q_(), q_()], [s.seq, s.seq], 0, k=[k_(), k_()], v=[k_(), k_()]),
        errors.ArgumentError,
        "seq: items 0 and 1 are the same sequence, expected each once where k and v are given; fork() it",
    ),
    (lambda s: s.cache.append(s.gone, 0, k_(), k_()), errors.ClosedError, "sequence: used after free()"),
    (lambda s: s.attn(q_(), s.gone, 0), errors.ClosedError, "sequence: used after free()"),
    (lambda s: s.gone.fork(), errors.ClosedError, "sequence: used after free()"),
    (lambda s: s.gone.truncate(0), errors.ClosedError, "sequence: used after free()"),
    (
        lambda s: s.attn(q_(), s.foreign, 0),
        errors.ArgumentError,
        "seq: got a sequence of another cache, expected one of this cache",
    ),
    (
        lambda s: s.cache.append(s.foreign, 0, k_(), k_()),
        errors.ArgumentError,
        "seq: got a sequence of another cache, expected one of this cache",
    ),
    (
        lambda s: s.cache.append("seq", 0, k_(), k_()),
        errors.ArgumentError,
        "seq: got str, expected a Sequence of this cache",
    ),
    (lambda s: s.attn(q_(), s.seq, 2), errors.ArgumentError, "layer: got 2, expected an int from 0 to 1"),
    (
        lambda s: s.cache.append(s.seq, -1, k_(), k_()),
        errors.ArgumentError,
        "layer: got -1, expected an int from 0 to 1",
    ),
    (
        lambda s: s.attn(q_(shape=(6, 64)), s.seq, 0, k=k_(), v=k_()),
        errors.ShapeError,
        "q: got shape (1, 6, 64), expected (4, 64) or (q_len, 4, 64)",
    ),
    (
        lambda s: s.attn(q_(0), s.seq, 0),
        errors.ShapeError,
        "q: got shape (0, 4, 64), expected (4, 64) or (q_len, 4, 64)",
    ),
    (
        lambda s: s.attn(q_(dtype=np.float64), s.seq, 0, k=k_(), v=k_()),
        errors.DTypeError,
        "q: got dtype float64, expected float32, float16 or bfloat16",
    ),
    (
        lambda s: s.attn(q_() * np.float32(np.nan), s.seq, 0, k=k_(), v=k_()),
        errors.ValueRangeError,
        "q[0, 0, 0]: got nan, expected a finite value of at most 2**60",
    ),
    (
        lambda s: s.attn(q_(), s.seq, 0, k=k_()),
        errors.ArgumentError,
        "v: got None, expected both k and v, or neither",
    ),
    (
        lambda s: s.attn(q_(), s.seq, 0, v=k_()),
        errors.ArgumentError,
        "k: got None, expected both k and v, or neither",
    ),
    (
        lambda s: s.attn([q_()], [s.seq, s.ahead], 0),
        errors.ArgumentError,
        "q: expected a list of 2 arrays, one per sequence",
    ),
    (
        lambda s: s.cache.append(s.seq, 0, k_(shape=(4, 64)), k_(shape=(4, 64))),
        errors.ShapeError,
        f"k: got shape (1, 4, 64), expected {ROWS_TAKEN}",
    ),
    (
        lambda s: s.cache.append(s.seq, 0, k_(2), k_(1)),
        errors.ShapeError,
        "v: got shape (1, 2, 64), expected k's tokens: (2, 2, 64)",
    ),
    (
        lambda s: s.cache.append(s.seq, 0, k_(0), k_(0)),
        errors.ShapeError,
        "k: got shape (0, 2, 64), expected at least one token",
    ),
    (
        lambda s: s.cache.append(s.seq, 0, k_(), k_(dtype=np.float32)),
        errors.DTypeError,
        "v: got dtype float32, a f16 cache takes float16; a cache made with round_rows=True rounds float32 and "
        "bfloat16",
    ),
    (
        lambda s: s.attn(q_(21), s.seq, 0),
        errors.ArgumentError,
        "q: got 21 rows for 20 keys, 1 of them before the first key, expected at least as many keys as rows; append k "
        "and v first, or give allow_empty=True, with which such rows have an output of 0",
    ),
    (
        lambda s: s.attn([q_(), q_(30)], [s.ahead, s.seq], 0, k=[k_(), k_()], v=[k_(), k_()]),
        StepError,
        "layer 0: got 1 tokens at length 3, expected none yet, layer 1 has length 2; append 1 to every layer that is "
        "behind first, or truncate(2)",
    ),
    (
        lambda s: s.attn(q_(30), s.seq, 0, k=k_(2), v=k_(2)),
        errors.ArgumentError,
        "q: got 30 rows for 22 keys, 8 of them before the first key, expected at least as many keys as rows; append k "
        "and v first, or give allow_empty=True, with which such rows have an output of 0",
    ),
    (
        lambda s: s.attn(q_(), s.seq, 0, allow_empty=1),
        errors.ArgumentError,
        "allow_empty: got 1, expected True or False",
    ),
    (
        lambda s: s.cache.append(s.ahead, 0, k_(), k_()),
        StepError,
        "layer 0: got 1 tokens at length 3, expected none yet, layer 1 has length 2; append 1 to every layer that is "
        "behind first, or truncate(2)",
    ),
    (
        lambda s: s.attn(q_(), s.ahead, 1, k=k_(2), v=k_(2)),
        StepError,
        "layer 1: got 2 tokens at length 2, expected 1, layer 0 has length 3; append as many as it did, or truncate(2)",
    ),
    (
        lambda s: s.ahead.fork(),
        StepError,
        "fork: layer 0 has length 3, layer 1 has length 2, expected equal lengths; append to every layer first, or "
        "truncate(2)",
    ),
    (
        lambda s: [s.seq.fork() for _ in range(2)],
        errors.LimitError,
        "max_sequences: 3 sequences are live, expected at most 3; free() one",
    ),
    (lambda s: s.seq.truncate(21), errors.ArgumentError, "n: got 21, expected an int from 0 to 20"),
    (lambda s: s.seq.truncate("5"), errors.ArgumentError, "n: got '5', expected an int"),
    (
        lambda s: za.Attention(s.cache, num_splits=2, split_size=3),
        errors.ArgumentError,
        "num_splits, split_size: got 2, 3, expected at most one",
    ),
]


def test_bad_arguments_change_nothing(device: za.Device) -> None:
    scene = Scene(device)
    before = scene.state()
    for call, error, message in BAD:
        with np.errstate(invalid="ignore"), pytest.raises(error) as caught:
            call(scene)
        assert type(caught.value) is error and str(caught.value) == message
        for seq in list(scene.cache.sequences):
            if seq not in (scene.seq, scene.ahead):
                seq.free()  # the first fork of two
        assert scene.state() == before, message
    scene.close()


WRONG_ROWS = [
    ("f16", np.float32, "a f16 cache takes float16; a cache made with round_rows=True rounds float32 and bfloat16"),
    ("f32", np.float64, "a f32 cache takes float32, float16 or bfloat16"),
    (
        "bf16",
        np.float64,
        "a bf16 cache takes bfloat16, or float32 or float16 values that bfloat16 holds exactly; a cache made with "
        "round_rows=True rounds float32 and float16",
    ),
    ("q8_0", np.int8, "a q8_0 cache takes float32, float16 or bfloat16"),
]


@pytest.mark.parametrize(("dtype", "given", "takes"), WRONG_ROWS, ids=DTYPES)
def test_rows_that_a_cache_does_not_take(device: za.Device, dtype: str, given: Any, takes: str) -> None:
    cache = za.KVCache(device, SMALL, 2, 32, dtype, 16)
    seq, good = cache.new_sequence(), k_(3, np.float16)
    with pytest.raises(errors.DTypeError) as caught:
        cache.append(seq, 0, k_(1, given), k_(1, given))
    assert str(caught.value) == f"k: got dtype {np.dtype(given)}, {takes}"
    bad = k_(3, np.float16 if dtype == "f16" else np.float32)
    cases = [(np.inf, "inf", "expected a finite value of at most 2**60")]
    if dtype != "f16":
        cases.append((np.float32(2.0**61), "2.30584e+18", "expected a finite value of at most 2**60"))
    for value, shown, expected in cases:
        bad[1, 0, 5] = value
        with pytest.raises(errors.ValueRangeError) as caught:
            za.Attention(cache)(q_(), seq, 0, k=bad, v=bad)
        assert str(caught.value) == f"k[1, 0, 5]: got {shown}, {expected}"
    if dtype == "bf16":
        bad[1, 0, 5] = 1 + 2.0**-8
        with pytest.raises(errors.ValueRangeError) as caught:
            cache.append(seq, 0, good, bad)
        assert str(caught.value) == f"v[1, 0, 5]: not a bfloat16 value; {takes}"
    if dtype == "q8_0":
        bad[1, 0, 5] = 127 * 65536.0
        with pytest.raises(errors.ValueRangeError) as caught:
            cache.append(seq, 0, good, bad)
        most = "a cache of q8_0 takes at most 8319008; use a bf16 or f32 cache"
        assert str(caught.value) == f"v[1, 0, 5]: got a magnitude of up to 8323072, {most}"
    assert cache.free_tokens == 32 and seq.lengths == (0, 0) and cache.largest == (0, 0)
    cache.append(seq, 0, good, good)
    cache.close()


def test_scores_that_could_overflow_are_refused_for_what_the_cache_holds(device: za.Device) -> None:
    cache = za.KVCache(device, SMALL, 1, 32, "f32", 16)
    seq, attn = cache.new_sequence(), za.Attention(cache)
    cache.append(seq, 0, k_(1, np.float32) * np.float32(2.0**59), k_(1, np.float32))
    with pytest.raises(errors.ValueRangeError) as caught:
        attn(q_() * np.float32(2.0**40), seq, 0)
    assert str(caught.value) == (
        "q, k: got max|q| = 1.09951e+12, max|k| = 5.76461e+17, scale = 0.125 at head_dim 64; expected max|q| * max|k| "
        "* head_dim * scale of at most 2**96"
    )
    same(
        attn(q_(), seq, 0, return_lse=True),
        reference.emulate(q_(), k_(1, np.float32) * np.float32(2.0**59), k_(1, np.float32)),
    )
    cache.close()


def test_a_block_table_that_is_out_of_range_is_seen(device: za.Device) -> None:
    """No public call takes a page number: tables are the pool's, whose check sees one that is not its own."""
    cache = za.KVCache(device, SMALL, 2, 64, "f16", 16)
    seq = cache.new_sequence()
    for layer in (0, 1):
        cache.append(seq, layer, k_(20), k_(20))
    cache.pool.check([seq.pages])
    kept = seq.pages._settled
    for page in (4, 2, kept[0][0]):  # beyond the pool, free, and twice
        seq.pages._settled = (kept[0][0], page), *kept[1:]
        with pytest.raises((AssertionError, IndexError)):
            cache.pool.check([seq.pages])
        seq.pages._settled = kept
    cache.pool.check([seq.pages])
    with pytest.raises(errors.ArgumentError) as caught:
        za.KVCache(device, SMALL, 2, 64, "f16", 16, page_order=[0, 1, 2, 4])
    assert str(caught.value) == "order: got 4 ids, expected each of 0 to 3 exactly once"
    cache.close()


@pytest.mark.both_dispatchers
def test_repr(device: za.Device, rng: np.random.Generator) -> None:
    """What a debugger shows: without the lock, which another thread holds, in the middle of a step, and after close."""
    with za.KVCache(device, SMALL, 2, 100, "f16", page_size=64) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, *new_rows(rng, 7, SMALL, "f16"))
        freed = cache.new_sequence()
        freed.free()
        with za.ShardedKVCache([device], SMALL, 1, 1024) as sharded, ThreadPoolExecutor(1) as other:
            shown = [cache, seq, freed, za.Attention(cache, split_size=64), sharded, sharded.new_sequence()]
            with cache.lock, sharded.lock:
                texts = other.submit(lambda: list(map(repr, shown))).result(10)
    where = f"Device({device.info.name!r}, runtime={device.runtime.name!r})"
    said = f"KVCache(4/2/64, f16, 2 layers, 64 of 100 tokens free in pages of 64, {where})"
    assert texts[:4] == [
        said,
        f"Sequence(serial={seq.serial}, 0 to 7 tokens)",
        f"Sequence(serial={freed.serial}, 0 tokens, freed)",
        f"Attention({said}, num_splits=None, split_size=64, canonical)",
    ]
    assert texts[4].startswith("ShardedKVCache(4/2/64, f16, 1 layers, capacity=1,024 tokens, 1 shards: [KVCache(4/2/64")
    assert texts[5] == "ShardedSequence(serial=0, 0 tokens)"
    assert repr(cache).endswith(f"{where}, closed)") and repr(sharded).endswith("closed)") and repr(seq)
    for kind in (za.Device, *map(type, shown)):
        assert repr(object.__new__(kind)) == f"<{kind.__name__}: AttributeError>"  # its constructor failed


def test_a_cache_that_does_not_fit(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    name, limit = device.info.name, device.info.max_buffer_bytes
    tokens = min(limit // (64 * 2) // 16 * 16 + 16, 1 << 24)
    if tokens * 64 * 2 > limit:
        with pytest.raises(errors.LimitError) as caught:
            za.KVCache(device, SMALL, 2, tokens - 1, "f16", 16)  # in whole pages, as many as ``tokens``
        assert str(caught.value) == (
            f"capacity: {tokens - 1:,} tokens need {tokens * 128:,} bytes per KV head, {name} takes at most {limit:,} "
            "in one storage buffer; use a smaller capacity or dtype"
        )
    with pytest.raises(errors.ArgumentError) as wrong:
        za.KVCache(device, SMALL, 2, 0)
    assert str(wrong.value) == "capacity: got 0, expected an int from 1 to 16777216"
    kept = za.KVCache(device, SMALL, 2, 64, "f16", 16)
    seq, attn = kept.new_sequence(), za.Attention(kept)
    real = libvulkan.Vulkan.heaps
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *args: [heap._replace(free=1000) for heap in real(*args)])
    message = "buffer: 65,536 bytes are needed, {} has 1,000 free; close other buffers or programs, or ask for less"
    with pytest.raises(errors.DeviceMemoryError) as caught_memory:
        za.KVCache(device, SMALL, 2, 64, "f16", 16)
    assert str(caught_memory.value) == message.format(name)
    with pytest.raises(errors.DeviceMemoryError, match="1,000 free"):
        attn(q_(20), seq, 0, k=k_(20), v=k_(20))
    assert kept.free_tokens == 64 and seq.lengths == (0, 0) and kept.largest == (0, 0)
    monkeypatch.undo()
    same(attn(q_(20), seq, 0, k=k_(20), v=k_(20), return_lse=True), reference.emulate(q_(20), k_(20), k_(20)))
    kept.close()


@pytest.mark.skipif(not FULL, reason="2.7 GB: the long run")
def test_131072_tokens_of_ten_layers(device: za.Device, record_property: Any) -> None:
    tokens, layers, chunk = 131072, 10, 4096
    if machine.memory_budget(device.info.index)[1] < 4 << 30:
        pytest.skip("needs 4 GiB of device memory")
    cache = za.KVCache(device, SHAPE, layers, tokens, "f16")
    assert cache.nbytes == tokens * 20480 and cache.bytes_per_token == 20480
    seq, attn, rng = cache.new_sequence(), za.Attention(cache), np.random.default_rng(0)
    base = new_rows(rng, chunk, SHAPE, "f16")
    picked = 7

    def rows_at(begin: int, layer: int) -> Pair:  # cheap, and different everywhere
        shift = begin // chunk * 131 + layer
        return np.roll(base[0], shift, axis=0), np.roll(base[1], -shift, axis=2)

    for begin in range(0, tokens, chunk):
        for layer in range(layers):
            cache.append(seq, layer, *rows_at(begin, layer))
    assert len(seq) == tokens and cache.free_tokens == 0
    q = new_q(rng, 1, SHAPE)
    outs = [attn(q, seq, layer, return_lse=True) for layer in range(layers)]
    parts = [rows_at(begin, picked) for begin in range(0, tokens, chunk)]
    k, v = (np.concatenate([p[i][:, 1:] for p in parts]) for i in (0, 1))
    want = reference.emulate(q[:, 8:], k, v)  # KV head 1 of one layer
    same([x[:, 8:] for x in outs[picked]], want, "131072 tokens")
    assert len({out.tobytes() for out, _ in outs}) == layers
    with pytest.raises(CapacityError):
        cache.append(seq, 0, base[0][:1], base[1][:1])
    figure = f"{cache.nbytes:,} bytes of K and V in {buffer_count(cache.layers)} buffers"
    record_property("memory", figure)
    print(figure)
    cache.close()
