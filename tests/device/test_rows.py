"""Several query rows of a sequence, laid out as on a GPU: a split per node, and the rows of a node side by side."""

from __future__ import annotations

import numpy as np
import pytest
from support import differing

import zinc_attn as za
from zinc_attn.planning.splits import SplitPlan, plan_splits


@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize("rows", (2, 5, 8, 70))
@pytest.mark.parametrize("shape", ("3/1/64", "4/1/128"))
def test_rows_have_the_bits_of_single_rows(
    device: za.Device, rng: np.random.Generator, shape: str, rows: int, window: int | None
) -> None:
    """And the oracle's, in one call and with keys that rows share attended together or apart."""
    parsed, n = za.AttnShape.parse(shape), 1200
    q = rng.standard_normal((rows, parsed.q_heads, parsed.head_dim), np.float32)
    k, v = rng.standard_normal((2, n, parsed.kv_heads, parsed.head_dim), np.float32).astype(np.float16)
    want = za.reference.emulate(q, k, v, window=window)
    builds: set[str] = set()

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return plan_splits(tokens, parsed, 64, "f16", q_len, "gpu", window)

    with za.KVCache(device, parsed, 1, 4096, "f16", 256) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, k, v)
        for cascade in (None, True, False):
            attention = za.Attention(
                cache,
                plan=plan,
                window=window,
                cascade=cascade,
                observer=lambda submission, workspace: builds.add(submission.key.build),
            )
            for got, right in zip(attention(q, seq, 0, return_lse=True), want, strict=True):
                assert not differing(got, right)
        single = za.Attention(cache, plan=plan, window=window)
        for row in (0, rows - 1):
            alone = cache.new_sequence()
            cache.append(alone, 0, k[: n - rows + row + 1], v[: n - rows + row + 1])
            for got, right in zip(single(q[row], alone, 0, return_lse=True), want, strict=True):
                assert not differing(got, right[row])
            alone.free()
    assert builds == {"node"}
