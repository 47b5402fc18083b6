"""Caches of rows, ``kv_layout="NHD"``; ``c_cases`` has rows where a host keeps them, in any order and apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache.rows import stored

ONE_DISPATCHER = True


@pytest.mark.parametrize(("dtype", "dims"), (("f16", (65, 67)), ("q4_0/q8_0", (96, 32))))
def test_a_cache_of_rows(device, tmp_path, dtype, dims):
    """Rows that share words with their neighbors are written in any order, copied, read back, and kept in a file."""
    shape, rng = za.AttnShape(6, 3, *dims), np.random.default_rng(5)
    k, v = (rng.standard_normal((90, 3, dim)).astype(np.float32) for dim in dims)
    q, options = rng.standard_normal((6, dims[0]), dtype=np.float32), {"round_rows": True, "kv_layout": "NHD"}
    order = rng.permutation(64)
    with za.KVCache(device, shape, 1, 128, dtype, 2, page_order=order, **options) as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        cache.append(seq, 0, k[:35], v[:35])
        fork = seq.fork()  # within a page, which is copied
        cache.append(fork, 0, k[40:50], v[40:50])
        cache.append(seq, 0, k[35:89], v[35:89])
        both = (np.concatenate([x[:35], x[40:50]]) for x in (k, v))
        want = reference.emulate(q, *stored(k, v, dtype, True))
        same(attn(q, fork, 0, return_lse=True), reference.emulate(q, *stored(*both, dtype, True)))
        same(attn(q, seq, 0, k=k[89], v=v[89], return_lse=True), want)
        seq.save(tmp_path / "rows")
    with za.KVCache(device, shape, 1, 128, dtype, 64) as tiles:
        same(za.Attention(tiles)(q, tiles.load(tmp_path / "rows"), 0, return_lse=True), want)


@pytest.mark.parametrize("given", ("HND", "nhd", None, ["NHD"]))
def test_a_layout_of_another_name_is_refused(device, given: Any):
    with pytest.raises(errors.ArgumentError, match=r"kv_layout: got .*, expected 'tiles' or 'NHD'"):
        za.KVCache(device, za.AttnShape(1, 1, 8), 1, 16, kv_layout=given)
