"""The accepted path of a tree of tokens, of types that test_fuzz.py lacks. Its pages are in test_pages_model.py."""

from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL
from support import differing

import zinc_attn as za

LAYERS = 2


SCALES = {"k_scale": np.array([0.5, 3.0]), "v_scale": 2.0}
CASES: dict[str, tuple[str, za.AttnShape, dict[str, Any]]] = {
    "fp8_e4m3": ("fp8_e4m3", SMALL, SCALES),
    "q4_1, f32": ("q4_1/f32", za.AttnShape(2, 2, 40, 24), {}),
    "latent": ("f16", za.AttnShape(4, 1, 96, 64, True), {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kept", [[0, 1, 3], [*range(3), *range(7, 60, 5)], [*range(4)], []], ids=len)
def test_what_is_kept_is_as_if_nothing_else_had_been_appended(device: za.Device, case: str, kept: list[int]) -> None:
    dtype, shape, options = CASES[case]
    rng, context, tree = np.random.default_rng(len(kept)), 39, 60
    x = rng.uniform(-4, 4, (LAYERS, context + tree, shape.kv_heads, shape.head_dim)).astype(np.float16)
    path = [*range(context), *(context + row for row in kept)]
    with za.KVCache(device, shape, LAYERS, 512, dtype, 16, **options) as cache:
        attention, want = za.Attention(cache), cache.new_sequence()

        def append(seq: Any, rows: Any) -> None:
            for layer in range(LAYERS):
                v = None if shape.latent else x[layer, rows, :, : shape.v_head_dim]
                cache.append(seq, layer, x[layer, rows], v)

        append(want, path)
        seq = cache.new_sequence()
        append(seq, np.arange(context + 10))
        fork = seq.fork()
        append(seq, np.arange(context + 10, context + tree))
        seq.keep(kept, tree)
        assert (len(seq), len(fork)) == (len(path), context + 10)
        cache.pool.check([one.pages for one in (want, seq, fork)])
        q = rng.standard_normal((shape.q_heads, shape.head_dim), dtype=np.float32)
        append(fork, np.arange(context + 10, context + tree))  # as if the other had kept all
        for layer in range(LAYERS):
            rows = cache.read_rows(fork, layer, 0, context + tree)
            assert np.array_equal(cache.read_rows(seq, layer, 0, len(path)), rows[path])
            assert not differing(*attention([q, q], [seq, want], layer))
        append(seq, [0])
        assert np.array_equal(cache.read_rows(seq, 1, 0, len(path)), rows[path])
