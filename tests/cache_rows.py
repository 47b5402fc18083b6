"""Rows for a KVCache, and a sequence that grows by them with the oracle's bits at each step."""

from __future__ import annotations

from typing import Any

import numpy as np

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows

SHAPE, SMALL = za.AttnShape(16, 2, 256), za.AttnShape(4, 2, 64)
DTYPES = ("f16", "f32", "bf16", "q8_0")
STEPS = ((5, 5), (1, 1), (70, 70), (60, 2), (1, 1), (1, 1))  # new rows, query rows
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


def grown(*made: Any, steps: Any = STEPS, **options: Any) -> list[Pair]:
    """``grow`` on a KVCache of its own."""
    with za.KVCache(*made) as cache:
        return grow(cache, steps, **options)
