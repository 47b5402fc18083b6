"""Arithmetic "fused": the oracle's bits, whichever way a device rounds a product and its sum once, and refusals.

test_fuzz.py has caches, with sinks, a cap and partial states, and test_check.py keys that rows share.
"""

import numpy as np
import pytest
from broken_shaders import break_kernels
from support import make_inputs, same

import zinc_attn as za
from zinc_attn.errors import WrongResultError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.runtime import multiply_add

SHAPE = za.AttnShape(4, 2, 64)
FUSED = {"arithmetic": "fused"}


def emulate(q, k, v, **options):
    return za.reference.emulate(q, k, v, arithmetic="fused", **options)


@pytest.mark.one_driver  # test_every_way_has_the_bits has the others
@pytest.mark.parametrize("kind", ["normal", "extreme", "equal", "zeros", "subnormal", "cancelling"])
def test_bits_of_every_kind_of_values(any_device, kind):
    """On one leaf and on several nodes; the canonical bits are others where products are rounded."""
    for context, dtype in ((50, "f16"), (1100, "f32")):
        q, k, v = make_inputs(SHAPE, context, dtype, kind)
        for num_splits in (None, 2):
            got = za.attention(q, k, v, any_device, num_splits, return_lse=True, **FUSED)
            same(got, emulate(q, k, v), (context, num_splits))
    if kind == "normal":
        assert np.any(got[0] != za.reference.emulate(q, k, v)[0])


def test_every_way_has_the_bits(any_device, monkeypatch):
    """Of the ways that a device has, attention by the best one and by each behind it; emulation is everybody's."""
    q, k, v = make_inputs(SHAPE, 300, "f16", "cancelling")
    ways = multiply_add.ways_of(any_device.runtime)
    for way in ways[ways.index(any_device.fused_way()) :]:
        monkeypatch.setattr(multiply_add, "ways_of", lambda _, way=way: (way,))
        with za.Device.open(any_device.info.index, runtime=any_device.runtime.name) as other:
            assert other.fused_way() == way
            same(za.attention(q, k, v, other, return_lse=True, **FUSED), emulate(q, k, v), way)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uintBitsToFloat(bits + step * inexact)", "tail"),  # the last parts are added to nearest, not to odd
        ("rest = rest - other;", ""),  # a quarter of the product is left out
        ("bits + step * inexact", "bits - step * inexact"),  # to odd, away from what was lost
    ],
)
def test_a_device_without_a_way_is_refused(device, tmp_path, monkeypatch, old, new):
    """The question finds an emulation that is not exact; canonical calls are as they were."""
    monkeypatch.setattr(multiply_add, "ways_of", lambda _: ("emulated",))
    break_kernels(monkeypatch, tmp_path, ("attend/multiply_add.glsl", old, new), kernels.MULTIPLY_ADD.name)
    q, k, v = make_inputs(SHAPE, 50, "f16")
    with za.Device.open(device.info.index, runtime=device.runtime.name) as other:
        with pytest.raises(WrongResultError, match="no product and sum with one rounding"):
            za.attention(q, k, v, other, **FUSED)
        same([za.attention(q, k, v, other)], [za.reference.emulate(q, k, v)[0]])
