"""Branches of one context: a batch of a sequence and its forks, each with new rows of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import differing

import zinc_attn as za
from zinc_attn import reference

SHAPE, LAYERS = za.AttnShape(4, 2, 64), 2


def made(rng: np.random.Generator, n: int) -> Any:
    return rng.standard_normal((2, n, 2, 64)).astype(np.float16)


@pytest.mark.parametrize("forks", [1, 3])
def test_a_batch_of_all_forks_fits_where_the_calls_one_by_one_do(device: za.Device, forks: int) -> None:
    rng, pages = np.random.default_rng(forks), 2 + forks
    common = [made(rng, 20) for _ in range(LAYERS)]
    with za.KVCache(device, SHAPE, LAYERS, pages * 16, "f16", 16) as cache:
        seqs, attention = [cache.new_sequence()], za.Attention(cache)
        for layer, (k, v) in enumerate(common):
            cache.append(seqs[0], layer, k, v)
        seqs += [seqs[0].fork() for _ in range(forks)]
        seqs[1].truncate(18)  # the longer ones write behind it
        lengths = [len(seq) for seq in seqs]
        for layer in (1, 0):
            new, q = [made(rng, 2) for _ in seqs], rng.standard_normal((1 + forks, 4, 64)).astype(np.float32)
            outs = attention(list(q), seqs, layer, k=[k for k, _ in new], v=[v for _, v in new])
            for one, n, rows, out in zip(q, lengths, new, outs, strict=True):
                k, v = np.concatenate([common[layer][:, :n], rows], axis=1).astype(np.float32)
                assert not differing(out, reference.emulate(one, k, v)[0])
        assert cache.free_tokens == 0
        cache.pool.check([seq.pages for seq in seqs])
