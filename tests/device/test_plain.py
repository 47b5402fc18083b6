"""The kernel to learn from has the bits of the oracle, and so of the fast kernels."""

from contextlib import ExitStack, closing

import numpy as np
import pytest
from numpy.typing import NDArray

import zinc_attn as za
from zinc_attn.canonical.constants import LOG2E
from zinc_attn.kernels.declarations import PLAIN, float_bits
from zinc_attn.runtime.device import load_spirv
from zinc_attn.runtime.protocol import Dispatch, Use


@pytest.mark.one_driver("1153")
@pytest.mark.parametrize(("text", "keys"), (("4/2/64", 1), ("6/2/72/40", 600), ("3/1/64", 1153)))
def test_plain_has_the_bits_of_the_fast_kernels(any_device, text, keys, rng):
    shape = za.AttnShape.parse(text)
    q = 2 * rng.standard_normal((shape.q_heads, shape.head_dim), np.float32)
    k = rng.standard_normal((keys, shape.kv_heads, shape.head_dim), np.float32)
    v = rng.standard_normal((keys, shape.kv_heads, shape.v_head_dim), np.float32)
    runtime, heads, dim = any_device.runtime, shape.q_heads, shape.v_head_dim
    scale = float_bits(LOG2E / np.sqrt(shape.head_dim))
    kernel = runtime.kernel(PLAIN, load_spirv(PLAIN), (dim // 8, shape.head_dim, shape.group, keys, scale))
    operands: list[NDArray[np.float32]] = [q, *(np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))]
    with ExitStack() as made:
        inputs = [made.enter_context(closing(runtime.buffer(x.nbytes, Use.INPUT))) for x in operands]
        out = made.enter_context(closing(runtime.buffer(4 * heads * (dim + 1), Use.OUTPUT)))
        recording = made.enter_context(closing(runtime.record([Dispatch(kernel, (*inputs, out), (heads, 1, 1))])))
        for buffer, x in zip(inputs, operands, strict=True):
            runtime.write(buffer, x.reshape(-1).view(np.uint32))
        runtime.run(recording)
        result = runtime.read(out)
    want, lse = za.reference.emulate(q, k, v)
    assert np.array_equal(result[: heads * dim], want.reshape(-1).view(np.uint32))
    assert np.array_equal(result[heads * dim :], lse.reshape(-1).view(np.uint32))
