"""A driver that computes a float function otherwise is refused before it attends anything."""

import numpy as np
import pytest
from broken_shaders import break_kernels

import zinc_attn as za
from zinc_attn.errors import WrongResultError
from zinc_attn.kernels.declarations import PRIMITIVES
from zinc_attn.runtime.device import load_spirv
from zinc_attn.runtime.primitives import check_primitives

SHAPE = za.AttnShape(4, 2, 64)
# What a driver may do to the kernel, and the function in which it shows.
DRIVERS = {
    "denormal float16 are 0": (
        ("attend/primitives.comp", "RESULT_LOW, low", "RESULT_LOW, abs(low) < 6e-5 ? 0.0 : low"),
        "the float32 of a float16, many of them denormal (low",
    ),
    "denormal float16 are 0 before a product": (
        ("attend/primitives.comp", "unpackHalf2x16((word ^ 0x80u) & 0xFFu).x, scale", "0.0, scale"),
        "an int8, read as a denormal float16, times a float32 (fused",
    ),
    "a step is left out": (
        ("floats.glsl", "i < 3; ++i", "i < 2; ++i"),
        "a reciprocal by Newton steps (reciprocal",
    ),
    "an exponent has one digit less": (
        ("floats.glsl", "max(d, CUTOFF)) + 127)", "max(d, CUTOFF)) + 127 & ~1)"),
        "a power of two by a polynomial (weight",
    ),
    "a comparison is of another number": (
        ("floats.glsl", "size < TANH_SMALL", "size < 0.75"),
        "a hyperbolic tangent by polynomials (tanh",
    ),
    "nothing is written": (
        ("attend/primitives.comp", "    results[gl_", "    if (x > 1e38) results[gl_"),
        "0xFFFFFFFF",
    ),
}


def test_every_driver_gives_the_results(any_device):
    check_primitives(any_device.runtime, load_spirv(PRIMITIVES))


@pytest.mark.parametrize("what", DRIVERS)
def test_another_result_is_a_refusal(device, tmp_path, monkeypatch, what):
    change, said = DRIVERS[what]
    break_kernels(monkeypatch, tmp_path, change, PRIMITIVES.name)
    with za.Device.open(device.info.index, runtime=device.runtime.name) as other:
        cache = za.KVCache(other, SHAPE, 1, 64)
        seq = cache.new_sequence()
        one = np.ones((1, 2, 64), np.float16)
        for _ in range(2):  # the second attempt is refused as well
            with pytest.raises(WrongResultError, match=r"the driver computes .* expected 0x") as refused:
                cache.append(seq, 0, one, one)
            assert said in str(refused.value)
        assert seq.lengths == (0,)
