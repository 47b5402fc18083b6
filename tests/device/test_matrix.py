"""Arithmetic "matrix": its bits on one device depend on q, k and v alone, and its error stays within the bound.

lavapipe has matrix units from Mesa 26 on. Where no device has them, the tests skip and say so; what is refused for lack
of them is in tests/host/test_matrix_tools.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support import FULL, differing, same

import zinc_attn as za
from zinc_attn.cache.rows import decode
from zinc_attn.canonical.matrix_bound import matrix_bound
from zinc_attn.errors import ValueRangeError
from zinc_attn.planning import call, inputs, whole_context
from zinc_attn.planning.splits import plan_splits

F32 = NDArray[np.float32]
SHAPES = ("16/2/256", "32/8/128", "9/3/64", "20/1/576/512/latent", "71/1/64", "4/4/20/12", "6/2/64/256")


def make(rng: np.random.Generator, shape: za.AttnShape, rows: int, tokens: int) -> tuple[F32, Any, Any]:
    q = rng.standard_normal((rows, shape.q_heads, shape.head_dim), np.float32)
    k = rng.standard_normal((tokens, shape.kv_heads, shape.head_dim), np.float32).astype(np.float16)
    v = rng.standard_normal((tokens, shape.kv_heads, shape.v_head_dim), np.float32).astype(np.float16)
    return q, k, k[..., : shape.v_head_dim] if shape.latent else v


@contextmanager
def filled(
    device: za.Device, shape: za.AttnShape, k: Any, v: Any, dtype: str = "f16", page_size: int = 64, **options: Any
) -> Iterator[tuple[za.KVCache, za.Sequence]]:
    """A cache with a sequence of these rows."""
    with za.KVCache(device, shape, 1, 4096, dtype, page_size, **options) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, k, None if shape.latent else v)
        yield cache, seq


def attend(device: za.Device, shape: za.AttnShape, q: F32, k: Any, v: Any, **options: Any) -> tuple[F32, F32]:
    """out, lse by matrix units; options of the cache and of Attention together."""
    held = {name: options.pop(name) for name in ("dtype", "page_size", "round_rows") if name in options}
    each = {name: options.pop(name) for name in ("mask", "causal") if name in options}
    with filled(device, shape, k, v, **held) as (cache, seq):
        out, lse = za.Attention(cache, arithmetic="matrix", **options)(q, seq, 0, return_lse=True, **each)
        return out, lse


def check_bound(got: tuple[F32, F32], q: F32, k: Any, v: Any, **options: Any) -> None:
    """out and lse lie within the bound, and out much nearer than that on average."""
    want = za.reference.attention(q, k, v, **options)
    for one, right, bound in zip(got, want, matrix_bound(q, k, v, **options), strict=True):
        finite = np.isfinite(right)
        assert np.array_equal(np.isfinite(one), finite)
        assert np.all(np.abs(one[finite] - right[finite]) <= bound[finite])
    assert np.linalg.norm(got[0] - want[0]) <= 2e-3 * np.linalg.norm(want[0])


@pytest.mark.parametrize("text", SHAPES)
def test_error_layouts_chunks_and_pages(matrix_device, rng, text):
    """Also rows alone, which have other neighbors in their tile, and none at all."""
    shape, tokens, rows = za.AttnShape.parse(text), 700, 37
    q, k, v = make(rng, shape, rows, tokens)
    want = attend(matrix_device, shape, q, k, v)
    check_bound(want, q, k, v)
    gpu = [
        lambda n, q_len, window, units=units: plan_splits(n, shape, units, "f16", q_len, "gpu", window)
        for units in (8, 64)
    ]
    for options in ({"num_splits": 1}, {"split_size": 64}, {"page_size": 16}, *({"plan": plan} for plan in gpu)):
        same(attend(matrix_device, shape, q, k, v, **options), want, options)
    with za.KVCache(matrix_device, shape, 1, 4096, "f16", 256) as cache:
        attention, seq = za.Attention(cache, arithmetic="matrix"), cache.new_sequence()
        cache.append(seq, 0, k[: tokens - rows], None if shape.latent else v[: tokens - rows])
        begin = 0
        for count in (1, 16, 3, 17):
            part, new = slice(begin, begin + count), slice(tokens - rows + begin, tokens - rows + begin + count)
            out = attention(q[part], seq, 0, k=k[new], v=None if shape.latent else v[new])
            assert not differing(out, want[0][part])
            begin += count


@pytest.mark.parametrize("options", ({}, {"window": 600}, {"sinks": np.linspace(-2, 3, 8, dtype=np.float32)}))
@pytest.mark.parametrize("text", ("8/2/64", "8/1/40/72"))
def test_walks(matrix_device, rng, monkeypatch, text, options):
    """Workgroups that attend their rows' whole context have the bits of partial states; more rows fit a submission."""
    shape, tokens, rows = za.AttnShape.parse(text), 1700, 150
    q, k, v = make(rng, shape, rows, tokens)
    want = attend(matrix_device, shape, q, k, v, num_splits=2, **options)
    every, some = (
        1 << 27,
        4 * 8 * (shape.v_dim + 2) * whole_context.ROOM * 64,
    )  # room for all rows; for 64 that have no splits
    planned: list[bool] = []

    def observe(one: Any, _: object) -> None:
        planned.append(one.key.whole_context)

    with filled(matrix_device, shape, k, v) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix", observer=observe, **options)
        for workgroups, room, submissions in ((1, every, 1), (1, some, 3), (10**6, every, 1)):
            monkeypatch.setattr(whole_context, "WORKGROUPS", workgroups)
            monkeypatch.setattr(inputs, "SCRATCH_BYTES", room)
            planned.clear()
            same(attention(q, seq, 0, return_lse=True), want)
            assert planned == [workgroups == 1] * submissions


@pytest.mark.parametrize("text", ("16/2/256", "9/3/64"))
def test_a_row_is_alone_in_its_tile(matrix_device, rng, text):
    """Permuted rows of all keys have permuted bits, and what else a tile holds, up to huge numbers, changes none."""
    shape, rows = za.AttnShape.parse(text), 16
    q, k, v = make(rng, shape, rows, 200)
    order = rng.permutation(rows)
    with filled(matrix_device, shape, k, v) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        want = attention(q, seq, 0, causal=False)
        assert not differing(attention(q[order], seq, 0, causal=False), want[order])
        foreign = q.copy()
        foreign[1::2] = np.float32(60000.0) * np.sign(foreign[1::2])
        assert not differing(attention(foreign, seq, 0, causal=False)[::2].copy(), want[::2].copy())


@pytest.mark.parametrize(
    "options",
    (
        {"window": 100},
        {"softcap": 20.0},
        {"sinks": np.linspace(-2, 3, 9, dtype=np.float32)},
        {"alibi": np.linspace(0.05, 1, 9, dtype=np.float32)},
        {"causal": False},
        {"mask": "bool"},
        {"mask": "float"},
        {"scale": 1.0},
    ),
    ids=lambda options: next(iter(options)),
)
def test_options(matrix_device, rng, options):
    shape, rows, tokens = za.AttnShape(9, 3, 64), 21, 333
    q, k, v = make(rng, shape, rows, tokens)
    if options.get("mask") == "bool":
        options = {"mask": rng.random((rows, 150)) < 0.6}
    elif options.get("mask") == "float":
        mask = rng.standard_normal((rows, 150)).astype(np.float32)
        options = {"mask": np.where(rng.random(mask.shape) < 0.8, mask, -np.inf).astype(np.float32)}
    out, lse = attend(matrix_device, shape, q, k, v, **options)
    check_bound((out, lse), q, k, v, **options)
    same(attend(matrix_device, shape, q, k, v, **options, num_splits=3), (out, lse))


def test_exact_products_have_the_canonical_bits(matrix_device, rng):
    """Equal scores weigh 1, and small integers are summed exactly, whatever the order: no bit may differ."""
    shape, tokens = za.AttnShape(16, 2, 256), 1100
    q = np.zeros((20, 16, 256), np.float32)
    k = rng.integers(-2, 3, (tokens, 2, 256)).astype(np.float16)
    v = rng.integers(-8, 9, (tokens, 2, 256)).astype(np.float16)
    want = za.reference.emulate(q, k, v, causal=True)
    same(attend(matrix_device, shape, q, k, v), want)


def test_storage_types_of_the_same_values(matrix_device, rng):
    """float16 holds what these rows of q8_0, q4_0, bf16 and fp8_e4m3 hold, and so no type shows in the bits."""
    shape, rows = za.AttnShape(8, 2, 64), 12
    q, _, _ = make(rng, shape, rows, 0)
    k, v = (rng.integers(-7, 8, (300, 2, 64)).astype(np.float16) for _ in range(2))
    k[..., ::32] = v[..., ::32] = -8  # the scale of a q4_0 block is then 1
    want = attend(matrix_device, shape, q, k, v)
    for dtype, given in (("bf16", ml_dtypes.bfloat16), ("q4_0", np.float32), ("fp8_e4m3", np.float32)):
        same(attend(matrix_device, shape, q, k.astype(given), v.astype(given), dtype=dtype), want, dtype)
    k[..., ::32] = v[..., ::32] = 127  # and that of a q8_0 block
    wide = k.astype(np.float32), v.astype(np.float32)
    same(attend(matrix_device, shape, q, *wide, dtype="q8_0"), attend(matrix_device, shape, q, k, v))


def test_quantized_rows_stay_within_the_bound(matrix_device, rng):
    shape = za.AttnShape(8, 2, 64)
    q, k, v = make(rng, shape, 12, 300)
    with filled(matrix_device, shape, k.astype(np.float32), v.astype(np.float32), "q8_0") as (cache, seq):
        got = za.Attention(cache, arithmetic="matrix")(q, seq, 0, return_lse=True)
        check_bound(got, q, *decode(cache.read_rows(seq, 0, 0, 300), shape, "q8_0", None))


def test_batches_prefixes_and_partial_states(matrix_device, rng):
    shape, tokens, rows = za.AttnShape(9, 3, 64), 1300, 18
    q, k, v = make(rng, shape, rows, tokens)
    with filled(matrix_device, shape, k, v) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        want = attention(q, seq, 0, return_lse=True)
        other, twin = cache.new_sequence(), seq.fork()
        cache.append(other, 0, k[:77], v[:77])
        outs, lses = attention([q[:5], q, q], [other, twin, seq], 0, return_lse=True)
        same((outs[1], lses[1], outs[2]), (*want, want[0]))
        for cascade in (True, False):
            got = za.Attention(cache, arithmetic="matrix", cascade=cascade)([q, q], [seq, twin], 0)
            assert not differing(got[1], want[0])
        parts = [attention.partial(q, seq, 0, within=within) for within in ((0, 1), (1, 3))]
        same(za.fold(parts), want)


def test_shards(matrix_device, rng):
    shape, tokens, rows = za.AttnShape(9, 3, 64), 1300, 18
    q, k, v = make(rng, shape, rows, tokens)
    want = attend(matrix_device, shape, q, k, v, window=700)
    with za.ShardedKVCache([matrix_device] * 2, shape, 1, 2048, "f16", 64) as cache:
        seq = cache.new_sequence()
        attention = za.ShardedAttention(cache, window=700, arithmetic="matrix")
        same(attention(q, seq, 0, k=k, v=v, return_lse=True), want)


def test_matrix_prefill_is_chosen_by_request(matrix_device, rng):
    """16 vectors of a KV head go to the matrix units, fewer have the canonical bits, also side by side in a batch."""
    shape = za.AttnShape(8, 2, 64)
    q, k, v = make(rng, shape, 4, 400)
    with filled(matrix_device, shape, k, v) as (cache, seq):
        matrix, canonical = (za.Attention(cache, arithmetic=name) for name in ("matrix", "canonical"))
        mixed, twin = za.Attention(cache, arithmetic="matrix-prefill"), seq.fork()
        assert not differing(mixed(q, seq, 0), matrix(q, seq, 0))
        assert not differing(mixed(q[:3], seq, 0), canonical(q[:3], seq, 0))
        long, short = mixed([q, q[:3]], [seq, twin], 0)
        assert not differing(long, matrix(q, seq, 0)) and not differing(short, canonical(q[:3], seq, 0))
        assert differing(mixed(q, seq, 0), canonical(q, seq, 0))


@pytest.mark.parametrize(("of", "size"), (("v", 1e-8), ("k", 3e-8), ("q", 1e-7)))
def test_numbers_that_float16_hardly_holds(matrix_device, rng, of, size):
    """bfloat16 holds them with all its digits; the bound counts what the rounding to float16 takes away."""
    shape = za.AttnShape(8, 2, 64)
    given = {name: x.astype(np.float32) for name, x in zip("qkv", make(rng, shape, 3, 130), strict=True)}
    given[of] *= np.float32(size)
    k, v = (given[name].astype(ml_dtypes.bfloat16) for name in "kv")
    for scale in (None, 1e3):
        got = attend(matrix_device, shape, given["q"], k, v, dtype="bf16", scale=scale)
        want = za.reference.attention(given["q"], k, v, scale=scale)
        for one, right, bound in zip(got, want, matrix_bound(given["q"], k, v, scale=scale), strict=True):
            assert np.all(np.abs(one - right) <= bound)


@pytest.mark.parametrize("text", ("4/1/80/72", "2/1/136/8") if FULL else ("4/1/80/72",))
def test_the_unrolled_program(matrix_device, rng, monkeypatch, text):
    """GPUs run it; its bits are those of the program with loops, with q in registers and in shared memory."""
    shape = za.AttnShape.parse(text)
    q, k, v = make(rng, shape, 5, 200)
    want = attend(matrix_device, shape, q, k, v)
    built = call.matrix_workgroup

    def unrolled(*arguments: Any) -> Any:
        made = built(*arguments)
        return made and made._replace(unrolled=True)

    monkeypatch.setattr(call, "matrix_workgroup", unrolled)
    same(attend(matrix_device, shape, q, k, v), want)


@pytest.mark.parametrize("kind", ("one key", "none", "extreme", "subnormal"))
def test_edges(matrix_device, rng, kind):
    shape = za.AttnShape(8, 2, 64)
    q, k, v = make(rng, shape, 3, 130)
    if kind == "extreme":  # logits of about +-200
        q[:], k[:] = 25.0, np.where(rng.random(k.shape[:2]) < 0.5, 1.0, -1.0)[..., None]
    elif kind == "subnormal":
        v = (v * np.float16(2.0**-22)).astype(np.float16)
    count = {"one key": 1, "none": 0}.get(kind, 130)
    with za.KVCache(matrix_device, shape, 1, 1024) as cache:
        seq = cache.new_sequence()
        if count:
            cache.append(seq, 0, k[:count], v[:count])
        got = za.Attention(cache, arithmetic="matrix")(q, seq, 0, return_lse=True, allow_empty=True)
    check_bound(got, q, k[:count], v[:count])


def test_steady_decode(matrix_device, rng):
    """Single rows are padded to a tile, are replayed like canonical ones, and have the bits of the whole prompt."""
    shape, tokens = za.AttnShape(16, 2, 64), 140
    q, k, v = make(rng, shape, tokens, tokens)
    want, _ = attend(matrix_device, shape, q, k, v, window=50)
    with za.KVCache(matrix_device, shape, 1, 1024) as cache:
        attention, seq = za.Attention(cache, arithmetic="matrix", window=50), cache.new_sequence()
        for i in range(tokens):
            assert not differing(attention(q[i], seq, 0, k=k[i], v=v[i]), want[i])


@pytest.mark.parametrize("name", "qkv")
def test_beyond_float16(matrix_device, rng, name):
    """Refused in the cache or in q, and among new rows, after which the cache's largest values are as before."""
    shape = za.AttnShape(8, 2, 64)
    given = dict(zip("qkv", (x.astype(np.float32) for x in make(rng, shape, 3, 40)), strict=True))
    beyond = {name: given[name].copy()}
    beyond[name].reshape(-1)[5] = 70000.0
    q, k, v = (given | beyond).values()
    with filled(matrix_device, shape, k, v, "bf16", round_rows=True) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        with pytest.raises(ValueRangeError, match=rf"^{name}: got .* with arithmetic='matrix', expected at most 65504"):
            attention(q, seq, 0)
        za.Attention(cache)(q, seq, 0)
    with filled(matrix_device, shape, given["k"], given["v"], "bf16", round_rows=True) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        want = attention(given["q"], seq, 0)
        with pytest.raises(ValueRangeError, match=rf"^{name}: got a.* magnitude of 70"):
            attention(q, seq, 0, k=k, v=v)
        assert len(seq) == 40 and not differing(attention(given["q"], seq, 0), want)
