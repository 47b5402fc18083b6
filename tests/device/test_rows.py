"""Several query rows of a sequence, laid out as on a GPU: a split per node, and the rows of a node side by side."""

from __future__ import annotations

import pytest
from cache_rows import Twin

import zinc_attn as za
from zinc_attn.planning.splits import SplitPlan, plan_splits


@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize("rows", (2, 5, 8, 70))
@pytest.mark.parametrize("shape", ("3/1/64", "4/1/128"))
def test_rows_have_the_oracles_bits(device: za.Device, shape: str, rows: int, window: int | None) -> None:
    """In one call, with keys that rows share attended together or apart, and each row on its own."""
    parsed, builds = za.AttnShape.parse(shape), set[str]()

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return plan_splits(tokens, parsed, 64, "f16", q_len, "gpu", window)

    options = {"plan": plan, "window": window, "observer": lambda submission, _: builds.add(submission.key.build)}
    with za.KVCache(device, parsed, 1, 4096, "f16", 256) as cache:
        one = Twin(za.Attention(cache, **options), window=window)
        one.append(1200)
        for cascade in (None, True, False):
            one.look(rows, za.Attention(cache, cascade=cascade, **options))
        one.look()
        one.truncate(1201 - rows)
        one.look()
    assert builds == {"node"}
