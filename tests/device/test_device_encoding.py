"""Rows that the device encodes have the bytes of the host's codec, which is the oracle."""

from dataclasses import replace

import numpy as np
import pytest
from cache_rows import filled
from numpy.typing import NDArray
from support import FULL, differing, raising

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import blocks, mover, rows
from zinc_attn.cache.rows import encode_into
from zinc_attn.kernels.declarations import Binding, KernelDecl
from zinc_attn.limits import BLOCK
from zinc_attn.runtime.primitives import answers
from zinc_attn.storage import IQ4_NL, STORAGE, storage_types

F32 = NDArray[np.float32]
TOKENS = 130  # rows of which 126 of a recording are surplus
SCALES = {"k": [0.3, 2.0**-31], "v": [1.7, 2.0**51]}  # of fp8_e4m3, by KV head
ONE_DISPATCHER = True


def block(rng: np.random.Generator, kind: int, most: float) -> NDArray[np.float64]:
    """32 values that a quantizer may get wrong, of magnitudes 2**-40 to ``most``, or 0."""
    normal, signs, any_one = rng.standard_normal(BLOCK), rng.choice([-1.0, 1.0], BLOCK), rng.integers(BLOCK)
    top = np.exp2(rng.uniform(-38, np.log2(most)))
    steps = int(rng.choice([8, 15, 16, 31, 127]))
    halves = rng.integers(-2 * steps, 2 * steps + 1, BLOCK) / 2  # what lies in the middle of two numbers
    if steps == -IQ4_NL[0]:
        halves[::2] = rng.choice(np.add(IQ4_NL[1:], IQ4_NL[:-1]) / 2, BLOCK // 2)
    halves[any_one], halves[any_one - 1] = steps * signs[0], -steps * signs[0]
    cancelling = np.repeat(rng.uniform(1, 3, BLOCK // 2), 2) * np.tile([1.0, -1.0 - 2.0**-23], BLOCK // 2)
    cancelling *= 2.0**-40  # sums of iq4_nl, before the largest value comes
    cancelling[-1] = signs[0] * np.exp2(rng.uniform(-30, -10))
    kinds = (
        normal * top / 4,
        signs * np.exp2(rng.uniform(-40, np.log2(top), BLOCK)),  # every value of a size of its own
        np.full(BLOCK, signs[0] * top),
        signs * 0.0,
        np.where(rng.random(BLOCK) < 0.3, signs * top, normal * top / 8),  # several of the largest, of both signs
        halves * np.exp2(np.floor(np.log2(top)) - 7),
        normal * np.exp2(rng.uniform(-28, -10)),  # a scale that is a subnormal float16, or less
        np.where(np.arange(BLOCK) == any_one, top, 0.0) * signs,
        cancelling,
        signs * rng.choice([most, 2.0**-40, 0.0], BLOCK),
    )
    return kinds[kind]


def values(rng: np.random.Generator, shape: tuple[int, int, int], kind: str, scales: list[float]) -> F32:
    """(tokens, kv_heads, dims) for a type of K or V."""
    tokens, heads, dims = shape
    most = {"f32": 2.0**59, "f16": 65504.0, "bf16": 2.0**59, "fp8_e4m3": 448.0}.get(kind, 0) or STORAGE[kind].most
    x = np.empty((tokens, heads, -(-dims // BLOCK), BLOCK))
    for at in np.ndindex(x.shape[:3]):
        x[at] = block(rng, int(rng.integers(10)), most)
    if kind != "fp8_e4m3":
        return np.clip(x.reshape(tokens, heads, -1)[..., :dims], -most, most).astype(np.float32)
    # numbers between two codes, and those next to them, times the head's scale
    codes = rng.integers(0, 0x7E, x.shape).astype(np.uint8)
    middle = (codes.view(blocks.FP8).astype(np.float64) + (codes + 1).astype(np.uint8).view(blocks.FP8)) / 2
    middle *= np.sign(x) * (1 + rng.integers(-2, 3, x.shape) * 2.0**-24)
    x = np.clip(np.where(rng.random(x.shape) < 0.5, x, middle), -most, most).reshape(tokens, heads, -1)[..., :dims]
    factor = np.float32(scales)[:, None]
    return np.clip((x * factor).astype(np.float32), -factor * np.float32(most), factor * np.float32(most))


CASES = [
    *(("2/2/64", name) for name, kind in STORAGE.items() if kind.quantized),
    ("2/2/64/96", "f16/q5_1"),
    ("2/2/40/64", "q4_0/f32"),
    ("2/2/96/40", "bf16/iq4_nl"),
    ("4/2/65/40", "q5_0/q4_1"),
    ("4/2/67/192", "fp8_e4m3/q8_0"),
    ("2/2/40/67", "q8_0/fp8_e4m3"),
    ("4/2/80/65/latent", "q5_1"),
    ("4/2/80/65/latent", "fp8_e4m3"),
    ("2/2/513/513/latent", "iq4_nl"),
]


@pytest.mark.one_driver("f16/q5_1", "fp8_e4m3/q8_0", "q5_0/q4_1", "513")
@pytest.mark.parametrize(("text", "dtype"), CASES, ids=lambda x: x)
def test_the_bytes_are_those_of_the_host(any_device, text, dtype):
    shape, rng = za.AttnShape.parse(text), np.random.default_rng(7)
    parts = [("k", shape.head_dim), ("v", shape.v_head_dim)][: 1 if shape.latent else 2]
    drawn, scales = {"v": None}, {}
    for (name, dims), kind in zip(parts, storage_types(dtype), strict=False):
        drawn[name] = values(rng, (TOKENS, shape.kv_heads, dims), kind.name, SCALES[name])
        if kind.head_scale:
            scales[f"{name}_scale"] = SCALES[name]
    k, v = drawn["k"], drawn["v"]
    with filled(any_device, shape, k, v, dtype, 256, 16, round_rows=True, **scales) as (cache, seq):
        stored_k, stored_v, _ = cache.check_rows(k, v, 0)
        want = rows.encode(stored_k, stored_v, shape, dtype, cache.scales_of(0))
        assert not differing(cache.read_rows(seq, 0, 0, TOKENS), want)


@pytest.mark.one_driver
def test_the_fitted_scales_of_iq4_nl(any_device):
    """A sum in another order changes the float16 of one scale in thousands."""
    shape, k = za.AttnShape(1, 1, 96), np.random.default_rng(5).standard_normal((2, 8192, 1, 96), np.float32)
    with filled(any_device, shape, *k, "iq4_nl", 8192) as (cache, seq):
        assert not differing(cache.read_rows(seq, 0, 0, 8192), rows.encode(*k, shape, "iq4_nl"))


SHAPE = za.AttnShape(4, 2, 64, 96)
RNG = np.random.default_rng(8)
K, V = RNG.standard_normal((300, 2, 64), np.float32), RNG.standard_normal((300, 2, 96), np.float32)
Q = RNG.standard_normal((300, 4, 64), np.float32)


@pytest.mark.parametrize("dtype", ["q8_0/q5_1", "fp8_e4m3"])
def test_a_prompt_is_encoded_on_the_device_and_a_token_by_the_host(device, dtype, monkeypatch):
    """In append, in a call of one sequence, and in a batch; the layers of an fp8_e4m3 cache have their own scales."""
    scales = np.array([[0.1, 0.02], [0.5, 1]], np.float32)
    given = {"k_scale": scales, "v_scale": scales[::-1]} if dtype == "fp8_e4m3" else {}
    with za.KVCache(device, SHAPE, 2, 2048, dtype, 64, **given) as cache:
        attn, (first, two, three, other) = za.Attention(cache), [cache.new_sequence() for _ in range(4)]
        with monkeypatch.context() as patch:
            patch.setattr(rows, "encode", raising(AssertionError))
            patch.setattr(rows, "encode_into", raising(AssertionError))
            for layer in (0, 1):
                cache.append(first, layer, K[:200], V[:200])
            out = [attn(Q[200:280], first, layer, k=K[200:280], v=V[200:280]) for layer in (0, 1)]
            batch = [
                attn([Q[:50], Q[:30]], [two, three], layer, [K[:50], K[:30]], [V[:50], V[:30]]) for layer in (0, 1)
            ]
            with pytest.raises(AssertionError, match="injected"):
                cache.append(first, 0, K[280:], V[280:])
            with pytest.raises(AssertionError, match="injected"):
                attn(Q[:1], first, 0, k=K[:1], v=V[:1])
            patch.undo()
            patch.setattr(mover, "encodes_on_device", lambda *_: False)
            for layer in (0, 1):
                cache.append(other, layer, K[:280], V[:280])
        for layer in (0, 1):
            factors = cache.scales_of(layer)
            k, v = rows.stored(K[:280], V[:280], dtype, scales=factors)
            assert not differing(out[layer], reference.emulate(Q[200:280], k, v)[0])
            assert not differing(batch[layer][0], reference.emulate(Q[:50], k[:50], v[:50])[0])
            for seq, count in ((first, 280), (two, 50), (three, 30), (other, 280)):
                got = cache.read_rows(seq, layer, 0, count)
                assert not differing(got, rows.encode(K[:count], V[:count], SHAPE, dtype, factors))


def test_many_rows_go_in_several_submissions(device, monkeypatch):
    """The last of them is for one row."""
    monkeypatch.setattr(mover, "ROWS_BYTES", 4 * 2 * (64 + 96) * 64)
    with filled(device, SHAPE, K[:10], V[:10], "q4_0") as (cache, seq):
        cache.append(seq, 0, K[10:139].astype(np.float16), V[10:139])
        want = rows.encode(np.concatenate([K[:10], K[10:139].astype(np.float16)]), V[:139], SHAPE, "q4_0")
        assert not differing(cache.read_rows(seq, 0, 0, 139), want)


def test_values_that_no_buffer_holds_are_encoded_by_the_host(device, monkeypatch):
    encoded = []
    monkeypatch.setattr(rows, "encode_into", lambda *arguments: (encoded.append(arguments), encode_into(*arguments)))
    with za.KVCache(device, SHAPE, 1, 512, "q8_0", 64) as cache:
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=64 * 2 * (64 + 96) * 4 - 4))
        seq = cache.new_sequence()
        out = za.Attention(cache)(Q[63:64], seq, 0, k=K[:64], v=V[:64])
    assert len(encoded) == 1
    assert not differing(out, reference.emulate(Q[63:64], *rows.stored(K[:64], V[:64], "q8_0"))[0])


# Values x[2 i], x[2 i + 1] to the quotient, its float16, and the e4m3 of 2**-8 times it.
PROBE = """#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"
#include "floats.glsl"
#include "narrow.glsl"
layout(local_size_x = 32) in;
layout(set = 0, binding = 0, std430) readonly buffer In { uint x[]; };
layout(set = 0, binding = 1, std430) buffer Out { uint y[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    uint quotient = divide(x[2u * i], x[2u * i + 1u]);
    y[3u * i] = quotient;
    y[3u * i + 1u] = to_float16(quotient, 0);
    y[3u * i + 2u] = to_e4m3(quotient, -8);
}
"""


def operands(rng: np.random.Generator, count: int) -> tuple[F32, F32]:
    """Dividends and divisors: any significands, near ones, simple ones, quotients next to the middle of two floats, and
    next to whole numbers of 25 bits."""
    shape = 4, count // 4
    a, b = (rng.integers(1 << 23, 1 << 24, shape).astype(np.float64) for _ in range(2))
    b[1] = np.clip(a[1] + rng.integers(-3, 4, shape[1]), 1 << 23, (1 << 24) - 1)
    b[2] = (1 << 23) + rng.integers(0, 9, shape[1]) * rng.choice([1, 1 << 20, (1 << 20) - 1], shape[1])
    middle = (1 << 24) + 2 * rng.integers(0, 1 << 23, shape[1]) + 1  # a 25-bit number whose last bit is the half
    a[3] = np.clip(np.rint(middle * b[3] / (1 << 24)), 1 << 23, (1 << 24) - 1)
    x, y = (np.ldexp(one * rng.choice([-1, 1], shape), rng.integers(-66, 37, shape)) for one in (a, b))
    x[0, :32] = np.tile([0.0, -0.0], 16)
    x[1, :2], y[1, :2] = (12331347, 11807155), (12961555, 12759259)  # whose first remainder is corrected by too much
    divisors = 2 * rng.integers(1 << 22, 1 << 23, 8192) + 1
    rests = [one + int(rest) for one, rest in zip(divisors, rng.choice([-1, 1, 3], 8192), strict=True)]
    result = [int(rest) * pow(1 << 25, -1, int(one)) % int(one) for one, rest in zip(divisors, rests, strict=True)]
    fits = np.array(result) >= 1 << 23  # 2**25 times it is next to a multiple of the divisor
    x[0, 32 : 32 + fits.sum()], y[0, 32 : 32 + fits.sum()] = np.array(result)[fits], divisors[fits]
    return x.reshape(-1).astype(np.float32), y.reshape(-1).astype(np.float32)


@pytest.mark.of_drivers
@pytest.mark.parametrize("count", [1 << 22 if FULL else 1 << 18])
def test_quotients_and_narrow_floats_are_rounded_to_nearest_even(any_device, count):
    from little_kernels import compiled  # skips the test where there is no compiler

    x, y = operands(np.random.default_rng(3), count)
    quotient = x / y
    small = np.abs(quotient) < 2.0**15  # what float16 holds
    x[~small], quotient = 0, np.where(small, quotient, 0 / y)
    decl = KernelDecl("probe", "", (Binding("x", "read"), Binding("y", "write")), ())
    kernel, given = any_device.runtime.kernel(decl, compiled(PROBE), ()), np.stack([x, y], axis=-1).reshape(-1)
    got = answers(any_device.runtime, kernel, given.view(np.uint32), 3 * count, count // 32).reshape(count, 3)
    assert not differing(got[:, 0], quotient.view(np.uint32))
    assert not differing(got[:, 1], quotient.astype(np.float16).view(np.uint16).astype(np.uint32))
    fp8 = (quotient / np.float32(256)).astype(blocks.FP8).view(np.uint8)
    assert not differing(got[:, 2], fp8.astype(np.uint32))
