"""Partial states: whatever the ranges, their order and who folds, the bits are those of one device."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support import differing

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.canonical import reference
from zinc_attn.canonical.reference import PartialState, PartialStateError
from zinc_attn.errors import ArgumentError

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 700},
    {"softcap": 20.0, "sinks": np.linspace(-3, 9, 6, dtype=np.float32)},
)


@pytest.mark.parametrize("some", OPTIONS, ids=("plain", "window", "softcap and sinks"))
@pytest.mark.parametrize("dtype", ("f16", "q8_0"))
@pytest.mark.parametrize("tokens", (1, 512, 1300, 3000))
def test_ranges_fold_to_a_calls_bits(any_device: za.Device, tokens: int, dtype: str, some: dict[str, Any]) -> None:
    shape, rng = za.AttnShape(6, 2, 64), np.random.default_rng(tokens)
    k, v = (rng.standard_normal((tokens, 2, 64)).astype(np.float16) for _ in "kv")
    exact_k, exact_v = rows.stored(k, v, dtype)
    with za.KVCache(any_device, shape, 1, 4096, dtype) as cache:
        attn, seq = za.Attention(cache, **some), cache.new_sequence()
        cache.append(seq, 0, k, v)
        for q_len in (1, 5):
            q = rng.standard_normal((min(q_len, tokens), 6, 64)).astype(np.float32)
            want = reference.emulate(q, exact_k, exact_v, **some)
            nodes = -(-tokens // 512)
            cuts = sorted({0, 1, nodes // 2, nodes})
            parts = [attn.partial(q, seq, 0, within=pair) for pair in pairwise(cuts)]
            parts = [PartialState.from_bytes(parts[i].to_bytes()) for i in rng.permutation(len(parts))]
            for got, expected in zip(za.fold(parts), want, strict=True):
                assert not differing(got, expected)
            for got, expected in zip(za.fold([attn.partial(q, seq, 0)]), want, strict=True):
                assert not differing(got, expected)


def test_shards_of_a_sequence(any_device: za.Device) -> None:
    """Nodes dealt to three caches; new tokens go to the one that owns the tail."""
    shape, rng = za.AttnShape(6, 2, 64), np.random.default_rng(0)
    k, v = (rng.standard_normal((2600, 2, 64)).astype(np.float32) for _ in "kv")
    caches = [za.KVCache(any_device, shape, 1, 2048, "f32", page_size) for page_size in (16, 64, 256)]
    attns, seqs = [za.Attention(cache, window=2000) for cache in caches], [cache.new_sequence() for cache in caches]
    owner = [0, 2, 1, 1, 0, 2]
    held: list[list[int]] = [[], [], []]
    at = 0
    for n in (1000, 500, 60, 1, 600, 1, 438):
        q = rng.standard_normal((min(n, 40), 6, 64)).astype(np.float32)
        end, parts = at + n, {}
        while at < end:  # one piece per node
            node, stop = at // 512, min(end, (at // 512 + 1) * 512)
            mine = owner[node]
            if not held[mine] or held[mine][-1] != node:
                held[mine].append(node)
            caches[mine].append(seqs[mine], 0, k[at:stop], v[at:stop])
            at = stop
        parts = [attns[i].partial(q, seqs[i], 0, nodes=held[i], tokens=at) for i in (2, 0, 1)]
        want = reference.emulate(q, k[:at], v[:at], window=2000)
        for got, expected in zip(za.fold(parts), want, strict=True):
            assert not differing(got, expected), at
    for cache in caches:
        cache.close()


def test_a_partial_call_appends(device: za.Device) -> None:
    shape, rng = za.AttnShape(2, 1, 64), np.random.default_rng(3)
    k, v = (rng.standard_normal((700, 1, 64)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((2, 64)).astype(np.float32)
    with za.KVCache(device, shape, 1, 2048, "f32") as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        for begin, end in ((0, 511), (511, 512), (512, 700)):
            got = za.fold([attn.partial(q, seq, 0, k[begin:end], v[begin:end])])
            assert not differing(got[0], reference.emulate(q, k[:end], v[:end])[0])
        assert len(seq) == 700
        with pytest.raises(ArgumentError, match=r"^nodes, tokens: got 1 nodes of a sequence of 700 tokens, "):
            attn.partial(q, seq, 0, k[:1], v[:1], nodes=[0], tokens=700)
        assert len(seq) == 700


def test_what_cannot_be_folded(device: za.Device) -> None:
    shape, rng = za.AttnShape(2, 1, 64), np.random.default_rng(3)
    k = rng.standard_normal((1500, 1, 64)).astype(np.float32)
    q = rng.standard_normal((2, 64)).astype(np.float32)
    with za.KVCache(device, shape, 1, 2048, "f32") as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        cache.append(seq, 0, k, k)
        a, b, c = (attn.partial(q, seq, 0, within=(i, i + 1)) for i in range(3))
        foreign = attn.partial(2 * q, seq, 0, within=(2, 3))
        for parts, text in (
            ([], "partial states: got none"),
            ([a, c], r"partial states: node 1 is missing \(1 in all\), expected every node from 0 to 2"),
            ([a, b, c, b], "partial states: got node 1 more than once"),
            ([a, b, foreign], "partial states: got parts of different calls"),
        ):
            with pytest.raises(PartialStateError, match=f"^{text}"):
                za.fold(parts)
        for data in (b"", b"x" * 100, a.to_bytes()[:-8], a.to_bytes().replace(b"partial state", b"martial state")):
            with pytest.raises(PartialStateError, match=r"^partial state: got "):
                PartialState.from_bytes(data)
        with pytest.raises(PartialStateError, match=r"^partial state: got sinks \(3,\), expected \(2,\)"):
            PartialState.from_bytes(replace(a, sinks=np.zeros(3, np.float32)).to_bytes())
        with pytest.raises(PartialStateError, match=r"^partial state: got [\d,]+ bytes, expected [\d,]+$"):
            PartialState.from_bytes(a.to_bytes() + b"\0")
        bad = {"m": (np.nan, 0.5), "l": (np.inf, -1.0), "o": (np.nan, -np.inf)}
        for name, value in ((name, value) for name, values in bad.items() for value in values):
            array = getattr(a, name).copy()
            array.flat[-1] = value
            wrong = replace(a, **{name: array})
            with pytest.raises(PartialStateError, match=rf"^partial state: got (an )?{name} "):
                PartialState.from_bytes(wrong.to_bytes())
            with pytest.raises(PartialStateError, match=rf"^partial state: got (an )?{name} "):
                za.fold([wrong, b, c])
        for parts, given in ((a, "one PartialState"), ([a, 1], "PartialState, int"), ([], "none")):
            with pytest.raises(PartialStateError, match=rf"^partial states: got {given}, expected a list"):
                za.fold(parts)
        for within in (3, (1,), (2, 1), (-1, 2), ("a", 2)):
            with pytest.raises(za.errors.ArgumentError, match=r"^within"):
                attn.partial(q, seq, 0, within=within)
        assert reference.gather([c, a, b]).nodes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("span", "held", "missing", "count"),
    (
        ((0, 10**12), [], 0, 10**12),
        ((0, 10**12), [0, 1, 2, 7], 3, 10**12 - 4),
        ((5, 10**30), [5, 6], 7, 10**30 - 7),
        ((-(10**30), 4), [3], -(10**30), 10**30 + 3),
    ),
)
def test_a_span_costs_what_its_nodes_do(span: tuple[int, int], held: list[int], missing: int, count: int) -> None:
    """Whatever the bytes from another process say."""
    n = len(held)
    m = np.zeros((1, n, 2), np.float32)
    state = PartialState(np.array(held, np.int64), m, m, np.zeros((1, n, 2, 8), np.float32), span, "call")
    parts = [PartialState.from_bytes(state.to_bytes())]
    tracemalloc.start()
    with pytest.raises(PartialStateError, match=rf"^partial states: node {missing} is missing \({count} in all\), "):
        reference.gather(parts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
