"""The resident cache gives ``reference.emulate``'s bits, whatever happened to a sequence before.

``test_fuzz.py`` does everything to small caches of one KV head in any order; here are more heads, longer contexts,
pages in shuffled order, every dtype and the head sizes. ``scripts/test --full`` goes on for longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_rows import DTYPES, SHAPE, SMALL, STEPS, Twin, grown, new_q, new_rows, same, together
from support import FULL

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows

# What happens to a sequence before the next chunk of its tokens.
DETOURS = ("tokens", "batch", "fork", "rollback", "file", "none", "batch", "fork") * (12 if FULL else 1)


@pytest.mark.parametrize("page_size", (16, 64, 256))
def test_bits_on_every_way_to_a_context(any_device: za.Device, page_size: int, tmp_path: Any) -> None:
    slow = "SwiftShader" in any_device.info.name  # with the pipelines of test_bits_of_every_dtype
    if slow and not FULL and page_size != 16:
        pytest.skip("one page size is enough on a slow driver")
    shape = SHAPE if FULL and not slow else SMALL
    most, capacity, path = 512 if FULL else 40, 16384 if FULL else 2048, tmp_path / "half.safetensors"
    sizes = page_size, {16: 256, 64: 16, 256: 64}[page_size]
    caches = [
        za.KVCache(any_device, shape, 2, capacity, "f16", size, page_order=rng_order(capacity // size))
        for size in sizes
    ]
    attention, loader = (za.Attention(cache) for cache in caches)
    one, rng = Twin(attention, page_size), np.random.default_rng(page_size)
    others = [Twin(attention, seed) for seed in range(3)]
    for way in DETOURS[:2] if slow and not FULL else DETOURS:
        n = int(rng.integers(1, most))
        if way == "tokens":
            for _ in range(70):  # over the end of a leaf
                one.step(1)
        elif way == "batch":
            batch = [(one, n), *zip(others, (1, 5, 33), strict=True)]
            twins, counts = zip(*(batch[i] for i in rng.permutation(4)), strict=True)
            together(twins, counts, [min(count, 20) for count in counts])
        elif way == "fork":  # within a page, nearly always
            forks = one, one.fork()
            one, left = (forks[i] for i in rng.permutation(2))
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


def rng_order(pages: int) -> list[int]:
    return np.random.default_rng(pages).permutation(pages).tolist()


# --- dtypes, layouts, shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_every_dtype(any_device: za.Device, dtype: str) -> None:
    slow = "SwiftShader" in any_device.info.name and any_device.runtime.name == "kompute"
    grown(any_device, SMALL, 2, 256, dtype, 16, steps=STEPS[:3] if slow and not FULL else STEPS)


LAYOUTS = ({"num_splits": 1}, {"num_splits": 3}, {"split_size": 100}, {})
SHAPES = ("3/1/64", "7/1/80", "6/2/96", "9/1/112", "2/2/128", "3/1/192", "1/1/256", "4/2/512")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    # float16 subnormals, q8_0 scales that are subnormal or 0, and what is flushed on entry
    *(("4/2/64", dtype, {"scale": s, "steps": ((20, 20), (1, 1))}) for dtype in DTYPES for s in (2.0**-21, 2.0**-41)),
    *(
        ("6/2/64", dtype, {**one, "steps": ((700, 20), (1, 1), (30, 20))})
        for dtype in ("f16", "f32")
        for one in LAYOUTS
    ),
    *(
        (shape, dtype, {"steps": ((67, 3), (1, 1))})
        for dtype in (DTYPES if FULL else ("f16", "q8_0"))
        for shape in (SHAPES if FULL or dtype == "f16" else ("6/2/96", "7/1/80"))
    ),
]


@pytest.mark.parametrize(("shape", "dtype", "options"), CASES)
def test_bits_of_small_values_layouts_head_dims_and_groups(
    device: za.Device, shape: str, dtype: str, options: dict[str, Any]
) -> None:
    grown(device, za.AttnShape.parse(shape), 1, 1024, dtype, 16, **options)


def test_rows_of_a_chunk_have_the_bits_of_decode(device: za.Device) -> None:
    """Of one row for each token, and of more rows than tokens, of which some see no key; an empty sequence, too."""
    rng = np.random.default_rng(1)
    k, v = new_rows(rng, 150, SMALL, "f16")
    q = new_q(rng, 150, SMALL)
    with za.KVCache(device, SMALL, 1, 1024, "f16", 16) as cache:
        attn, one, many = za.Attention(cache), cache.new_sequence(), cache.new_sequence()
        out, lse = attn(q, many, 0, k=k, v=v, return_lse=True)
        for at in range(150):
            same(attn(q[at], one, 0, k=k[at], v=v[at], return_lse=True), (out[at], lse[at]), at)
        same((out, lse), reference.emulate(q, k, v), "the chunk")
        q = q[-1:].repeat(200, axis=0)
        more = attn(q, many, 0, return_lse=True, allow_empty=True)
        same(more, reference.emulate(q, k, v), "rows before the first key")
        assert np.isneginf(more[1][:50]).all() and not more[0][:50].any()
        for layout, n in (({}, 1), ({}, 3), ({"num_splits": 3}, 1)):
            empty = za.Attention(cache, **layout)(q[:n], cache.new_sequence(), 0, return_lse=True, allow_empty=True)
            assert not empty[0].view(np.uint32).any() and np.isneginf(empty[1]).all()
        assert attn([], [], 0) == []


def test_q8_0_accuracy_against_float64(device: za.Device, record_property: Any) -> None:
    """|x - stored| <= d / 2 + max|x| * 2**-11, d = max|x| / 127: half a step, and the float16 rounding of the step.

    Scores move by at most e = scale * max|q (k - stored k)|, so weights p by a factor within exp(+-2 e), and the
    output by at most (exp(2 e) - 1) * sum p |v - out| + sum p |v - stored v| * exp(2 e).
    """
    tokens, rng = 1000, np.random.default_rng(8)
    k, v = new_rows(rng, tokens, SHAPE, "q8_0")
    q = new_q(rng, 1, SHAPE)
    with za.KVCache(device, SHAPE, 1, 1024, "q8_0") as cache:
        out, lse = za.Attention(cache)(q, cache.new_sequence(), 0, k=k, v=v, return_lse=True)
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
