"""Storage types on a device: scales of heads, encoded rows, files, and shards."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cache_rows import SMALL, filled
from page_tables import largest
from support import FULL, row_bytes, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache.files import CacheFileError
from zinc_attn.cache.rows import decode, stored, stored_scales
from zinc_attn.canonical.partial import PartialStateError
from zinc_attn.checks import BFLOAT16
from zinc_attn.kernels.families import RDNA

NATIVE = True
SHAPE = za.AttnShape(4, 2, 64, 96)
RNG = np.random.default_rng(8)
Q = RNG.standard_normal((300, 4, 64), dtype=np.float32)
K = RNG.standard_normal((300, 2, 64), dtype=np.float32)
V = RNG.standard_normal((300, 2, 96), dtype=np.float32)
SCALES = np.array([[[0.1, 0.02], [0.5, 1]], [[3, 0.25], [0.03, 0.7]]], np.float32)  # (layers, K and V, KV heads)
FP8 = {"k_scale": SCALES[:, 0], "v_scale": SCALES[:, 1]}
ONE_DISPATCHER = True


@pytest.mark.of_drivers
def test_scales_are_a_heads_and_a_layers(device, tmp_path):
    """In prefill, steady decode, partial states, and a file."""
    with za.KVCache(device, SHAPE, 2, 1024, "fp8_e4m3", 64, **FP8) as cache:
        attn, first = za.Attention(cache), cache.new_sequence()
        want = {}
        for layer in (0, 1):
            cache.append(first, layer, K[:200], V[:200])
        for end in (203, 204, 205, 206):
            for layer in (0, 1):
                begin = len(K[:200]) if end == 203 else end - 1
                got = attn(Q[begin:end], first, layer, k=K[begin:end], v=V[begin:end], return_lse=True)
                keys, values = stored(K[:end], V[:end], "fp8_e4m3", scales=SCALES[layer])
                want[layer] = reference.emulate(Q[begin:end], keys, values)
                same(got, want[layer])
        same((za.fold([attn.partial(Q[205:206], first, 0)])), want[0])
        first.save(tmp_path / "one")
        with za.KVCache(device, SHAPE, 2, 1024, "fp8_e4m3", 16, **FP8) as other:
            back = other.load(tmp_path / "one")
            same(za.Attention(other)(Q[205:206], back, 1, return_lse=True), want[1])
        for scales in ({}, {"k_scale": SCALES[:, 0] * 2, "v_scale": SCALES[:, 1]}):
            other = za.KVCache(device, SHAPE, 2, 1024, "fp8_e4m3", 16, **scales)  # type: ignore[arg-type]
            with other, pytest.raises(CacheFileError, match=r"head_scales: got .*, the cache's"):
                other.load(tmp_path / "one")
        with pytest.raises(errors.ValueRangeError, match=r"k: .* in KV head 1, .* 0\.02; give a larger k_scale"):
            attn(Q[:1], first, 0, k=np.full((1, 2, 64), 9, np.float32), v=V[:1])
        with pytest.raises(errors.ValueRangeError, match=r"v: .* in KV head 0, .* 0\.5; give a larger v_scale"):
            cache.append(first, 0, K[:1] * 0, np.full((1, 2, 96), 225, np.float32))
        assert len(first) == 206


@pytest.mark.of_drivers
def test_integers_of_half_a_block_and_of_two_passes_over_v(device, rng):
    shape = za.AttnShape(8, 1, 80, 320)
    q, k, v = (
        rng.standard_normal((n, heads, dim), np.float32) for n, heads, dim in ((1, 8, 80), (300, 1, 80), (300, 1, 320))
    )
    v *= np.exp2(np.arange(320) / 32).astype(np.float32)  # blocks have other scales
    with filled(device, shape, k, v, "q8_0") as (cache, seq):
        got = za.Attention(cache, arithmetic="integer")(q, seq, 0, return_lse=True)
    want = reference.emulate(q, *stored(k, v, "q8_0"), arithmetic="integer", **stored_scales(k, v, "q8_0"))
    same(got, want)


@pytest.mark.of_drivers
def test_scales_where_heads_have_buffers_of_their_own(device, monkeypatch):
    """A layer's heads are cut over buffers where one would be beyond the device's limit."""
    monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=512 * 96))
    cache = za.KVCache(device, SHAPE, 2, 512, "fp8_e4m3", 64, **FP8)
    monkeypatch.undo()
    assert [one.heads for one in cache.layers[1].slices] == [1, 1]
    with cache:
        seq = cache.new_sequence()
        for layer in (0, 1):
            cache.append(seq, layer, K, V)
        got = za.Attention(cache)(Q[:2], seq, 1, return_lse=True)
    same(got, reference.emulate(Q[:2], *stored(K, V, "fp8_e4m3", scales=SCALES[1])))


def test_states_of_other_scales_do_not_fold(device):
    parts = []
    k, v = np.concatenate([K, K]), np.concatenate([V, V])
    for scale, nodes, mine in ((1.0, [0], slice(0, 512)), (0.125, [1], slice(512, 600))):
        with filled(device, SHAPE, k[mine], v[mine], "fp8_e4m3", k_scale=scale) as (cache, seq):
            parts.append(za.Attention(cache).partial(Q[:1], seq, 0, nodes=nodes, tokens=600))
    with pytest.raises(PartialStateError):
        za.fold(parts)


def test_a_file_whose_filling_is_no_number_is_refused(device, tmp_path, monkeypatch):
    """The kernels multiply it by 0."""
    shape = za.AttnShape(2, 1, 20)
    with filled(device, shape, *np.ones((2, 3, 1, 20), np.float16)) as (cache, seq):
        seq.save(tmp_path / "fine")
        held = cache.read_pages(seq.pages, 0, 0, 3)
        held.view(np.float16)[1, 0, 20] = np.nan
        monkeypatch.setattr(cache, "read_pages", lambda *_: held)
        seq.save(tmp_path / "bad")
        cache.load(tmp_path / "fine")
        with pytest.raises(CacheFileError, match="a value that no cache stores"):
            cache.load(tmp_path / "bad")


def test_scales_of_shards(device):
    devices = [device, device]
    with za.ShardedKVCache(devices, SHAPE, 2, 4096, "q8_0/fp8_e4m3", 64, weights=[1, 1], v_scale=SCALES[:, 1]) as cache:
        seq, k, v, q = cache.new_sequence(), *(np.tile(x, (4, 1, 1)) for x in (K, V, Q))
        for layer in (0, 1):
            cache.append(seq, layer, k, v)
        got = za.ShardedAttention(cache)(q[-2:], seq, 1, return_lse=True)
    scales = np.stack([np.ones(2, np.float32), SCALES[1, 1]])
    same(got, reference.emulate(q[-2:], *stored(k, v, "q8_0/fp8_e4m3", scales=scales)))


@pytest.mark.of_drivers
def test_encoded_rows_on_a_driver(device):
    test_encoded_rows_are_attended_as_their_values(device, "q5_1/iq4_nl")


@pytest.mark.parametrize("pair", ["q8_0/q4_0", "q5_1/iq4_nl", "f16/q5_0", "fp8_e4m3/q4_1", "f32/f16"])
def test_encoded_rows_are_attended_as_their_values(device, pair):
    """The bytes of another cache, between appended values."""
    k_type, v_type = pair.split("/")
    k, v = (x.astype(np.float16).astype(np.float32) for x in (K, V))
    with filled(device, SHAPE, k[:33], v[:33], pair, 512, 1, round_rows=True, kv_layout="NHD") as (cache, seq):
        cache.append_encoded(seq, 0, row_bytes(k[33:290], k_type), row_bytes(v[33:290], v_type))
        got = za.Attention(cache)(Q[:2], seq, 0, k=k[290:], v=v[290:], return_lse=True)
        same(got, reference.emulate(Q[:2], *stored(k, v, pair, True)))
        before = len(seq), largest(cache)
        bad = row_bytes(k[:2], k_type)
        bad[1, 1, :2] = 0xFF, 0x7F
        if k_type != "f32":
            with pytest.raises(errors.ValueRangeError, match="k"):
                cache.append_encoded(seq, 0, bad, row_bytes(v[:2], v_type))
        with pytest.raises(errors.ShapeError, match="v: got shape"):
            cache.append_encoded(seq, 0, row_bytes(k[:2], k_type), row_bytes(v[:1], v_type))
        assert (len(seq), largest(cache)) == before


PAIRS = ["q8_0/q4_0", "q4_1/q5_0", "iq4_nl/q5_1", "fp8_e4m3/bf16"]
WITH_LAYOUTS = [(PAIRS[0], "NHD"), (PAIRS[3], "tiles")]  # gfx1201 executes the kernels of all types
if FULL:
    WITH_LAYOUTS = [*itertools.product([*PAIRS, *("/".join(x.split("/")[::-1]) for x in PAIRS)], ("tiles", "NHD"))]


@pytest.mark.parametrize("any_device", [("swiftshader", "vulkan")], indirect=True, ids=["swiftshader"])
@pytest.mark.parametrize(("pair", "kv_layout"), WITH_LAYOUTS)
def test_the_values_of_a_gpu(any_device, pair, kv_layout, monkeypatch):
    """The steps that make values on a card, on a device that says it is one; scales down to subnormal float16."""
    monkeypatch.setattr(any_device.runtime, "info", replace(any_device.info, kind="discrete", layout=RDNA))
    sizes = np.exp2(RNG.integers(-20, 3, (300, 2, 1))).astype(np.float32)
    k, v = K * sizes, V * sizes
    want = reference.emulate(Q[:1], *stored(k, v, pair, True))
    with filled(any_device, SHAPE, k, v, pair, round_rows=True, kv_layout=kv_layout) as (cache, seq):
        # eight waves, or one of the loop build: the default run has each of them in a layout
        for splits in (None, 1) if FULL else ((None, 1)[PAIRS.index(pair) // 2],):
            same(za.Attention(cache, num_splits=splits)(Q[:1], seq, 0, return_lse=True), want)


@pytest.mark.of_drivers
def test_latent_caches(device):
    """V is part of K: it has K's scales, and none of its own, and encoded rows are those of K."""
    shape = za.AttnShape(4, 2, 96, 64, latent=True)
    q, rows = (x.repeat(2, axis=2)[..., :96] for x in (Q[:1], K[:100]))
    with za.KVCache(device, shape, 1, 512, "fp8_e4m3", 64, k_scale=[0.1, 0.02]) as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        got = attn(q, seq, 0, k=rows, return_lse=True)
        seq.keep(range(0, 50, 3), 50)
        kept = attn(q, seq, 0, return_lse=True)
        held = stored(rows, rows[..., :64], "fp8_e4m3", latent=True, scales=cache.scales_of(0))
    same(got, reference.emulate(q, *held))
    same(kept, reference.emulate(q, *(x[[*range(50), *range(50, 100, 3)]] for x in held)))
    with za.KVCache(device, shape, 1, 512, "q5_0", 64) as cache:
        seq, given = cache.new_sequence(), row_bytes(rows, "q5_0")
        cache.append_encoded(seq, 0, given)
        got = za.Attention(cache)(q, seq, 0, return_lse=True)
        for append, x in ((cache.append_encoded, given), (cache.append, rows)):
            with pytest.raises(errors.ArgumentError, match="v: got an array, expected None"):
                append(seq, 0, x, x)
    same(got, reference.emulate(q, *stored(rows, rows[..., :64], "q5_0", latent=True)))
    with pytest.raises(errors.ArgumentError, match="v_scale: got one for a latent shape"):
        za.KVCache(device, shape, 1, 512, "fp8_e4m3", 64, v_scale=0.1)


@pytest.mark.parametrize(("kind", "dtype"), (("f32", np.float32), ("bf16", BFLOAT16)))
def test_small_values_are_flushed(device, kind, dtype):
    small = np.full((10, 2, 64), 2.0**-41, np.float32)
    small[0, 0, 0] = 2.0**-40
    with filled(device, SMALL, small, small, kind) as (cache, appended):
        encoded = cache.new_sequence()
        cache.append_encoded(encoded, 0, *[small.astype(dtype).view(np.uint8)] * 2)
        for seq in (appended, encoded):
            keys, _ = decode(cache.read_rows(seq, 0, 0, 10), SMALL, kind)
            assert np.count_nonzero(keys) == 1 and keys[0, 0, 0] == 2.0**-40


@pytest.mark.parametrize(("dtype", "dims"), (("f16", (65, 67)), ("q4_0/q8_0", (96, 32))))
def test_a_cache_of_rows(device, tmp_path, dtype, dims):
    """Rows that share words with their neighbors are written in any order, copied, read back, and kept in a file;
    ``c_cases`` has rows where a host keeps them, in any order and apart."""
    shape, rng = za.AttnShape(6, 3, *dims), np.random.default_rng(5)
    k, v = (rng.standard_normal((90, 3, dim)).astype(np.float32) for dim in dims)
    q, options = rng.standard_normal((6, dims[0]), dtype=np.float32), {"round_rows": True, "kv_layout": "NHD"}
    with za.KVCache(device, shape, 1, 128, dtype, 2, page_order=rng.permutation(64), **options) as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        cache.append(seq, 0, k[:35], v[:35])
        fork = seq.fork()  # within a page, which is copied
        cache.append(fork, 0, k[40:50], v[40:50])
        cache.append(seq, 0, k[35:89], v[35:89])
        both = [np.concatenate([x[:35], x[40:50]]) for x in (k, v)]
        want = reference.emulate(q, *stored(k, v, dtype, True))
        same(attn(q, fork, 0, return_lse=True), reference.emulate(q, *stored(*both, dtype, True)))
        fork.keep(range(1, 45, 2), 45)
        same(attn(q, fork, 0, return_lse=True), reference.emulate(q, *stored(*(x[1::2] for x in both), dtype, True)))
        same(attn(q, seq, 0, k=k[89], v=v[89], return_lse=True), want)
        seq.save(tmp_path / "rows")
    with za.KVCache(device, shape, 1, 128, dtype, 64) as tiles:
        same(za.Attention(tiles)(q, tiles.load(tmp_path / "rows"), 0, return_lse=True), want)
