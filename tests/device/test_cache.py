"""The resident cache gives ``reference.emulate``'s bits, whatever happened to a sequence before.

``test_fuzz.py`` does everything to small caches of one KV head in any order; here are more heads, pages in shuffled
order and every dtype; test_grid.py has the head sizes. ``scripts/test --full`` goes on for longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_rows import DTYPES, SMALL, Twin, grown, together
from support import FULL

import zinc_attn as za

# What happens to a sequence before the next chunk of its tokens.
DETOURS = ("tokens", "batch", "fork", "rollback", "file", "none", "batch", "fork") * (12 if FULL else 1)


@pytest.mark.one_driver
@pytest.mark.parametrize("page_size", (1, 16, 256))
def test_bits_on_every_way_to_a_context(any_device: za.Device, page_size: int, tmp_path: Any) -> None:
    most, capacity, path = 512 if FULL else 40, 16384 if FULL else 2048, tmp_path / "half.safetensors"
    rng = np.random.default_rng(page_size)
    caches = [
        za.KVCache(
            any_device, SMALL, 2, capacity, "f16", size, page_order=rng.permutation(capacity // size), kv_layout=lies
        )
        for size, lies in {
            1: ((1, "tiles"), (16, "NHD")),
            16: ((16, "NHD"), (1, "NHD")),
            256: ((256, "tiles"), (2, "tiles")),
        }[page_size]
    ]
    attention, loader = (za.Attention(cache) for cache in caches)
    one, others = Twin(attention, page_size), [Twin(attention, seed) for seed in range(3)]
    for way in DETOURS:
        n = int(rng.integers(1, most))
        if way == "tokens":
            for _ in range(70):  # over the end of a leaf
                one.step(1)
        elif way == "batch":
            batch = [(one, n), *zip(others, (1, 5, 33), strict=True)]
            twins, counts = zip(*(batch[i] for i in rng.permutation(4)), strict=True)
            together(twins, counts, [min(count, 20) for count in counts])
        elif way == "fork":  # within a page, nearly always
            one, left = (one, one.fork()) if rng.random() < 0.5 else (one.fork(), one)
            left.step(20, 3)
            one.step(n, min(n, 20))
            left.look()
            left.sequence.free()
        elif way == "rollback":
            for cut in (len(one), len(one) * 2 // 3):
                one.step(n, 3)
                one.truncate(cut)
        elif way == "file":
            one.sequence.save(path)
            one.other(loader.cache.load(path), loader).step(n)
            one.sequence.free()
            one = one.other(attention.cache.load(path))
            one.look()  # the rows that came from the file, on their own
        one.step(n, min(n, 20))
    for twin in (one, *others):
        twin.look()
        twin.sequence.free()
    assert caches[0].pool.used_pages == 0 and not caches[0].sequences
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype(any_device: za.Device, dtype: str) -> None:
    if "SwiftShader" in any_device.info.name and not FULL and dtype in ("f16", "f32"):
        pytest.skip("the kernels of these types are compiled there in test_check.py and test_bits.py")
    grown(any_device, SMALL, 2, 256, dtype, 16)
