"""The accepted path of a tree of tokens, of types that test_fuzz.py lacks. Its pages are in test_pages_model.py."""

from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL
from support import differing

import zinc_attn as za
from zinc_attn.cache.pages import CapacityError, StepError

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


def test_rows_that_cannot_be_kept(device: za.Device) -> None:
    with za.KVCache(device, SMALL, LAYERS, 32, "f16", 16) as cache:
        seq, (k, v) = cache.new_sequence(), np.ones((2, 20, 2, 64), np.float16)
        for layer in range(LAYERS):
            cache.append(seq, layer, k, v)
        for rows, last, text in (
            ([0], 21, "last: got 21, expected an int from 0 to 20"),
            ([3], 3, "rows: got 3, expected numbers of the last 3 rows, from 0 on"),
            ([0, 2, 2], 3, "rows: got 2 after 2, expected ascending numbers, each once"),
            ([-1], 3, "rows: got -1, expected numbers of the last 3 rows, from 0 on"),
            (np.array(1), 3, "rows: got int64 of shape (), expected a list of row numbers"),
            ([True, False, True], 3, "rows: got bool of shape (3,), expected a list of row numbers"),
        ):
            with pytest.raises(za.errors.ArgumentError) as info:
                seq.keep(rows, last)
            assert str(info.value) == text
        with pytest.raises(CapacityError, match=r"^keep: got 1 rows that move to token 18 and behind, expected 1 "):
            seq.keep([1], 2)
        seq.keep([0, 1], 3)  # nothing moves, so that no page is needed
        assert seq.lengths == (19, 19)
        cache.append(seq, 0, k[0], v[0])
        with pytest.raises(StepError, match=r"^keep: layer 0 has length 20, layer 1 has length 19, expected equal "):
            seq.keep([1], 2)
        seq.free()
        with pytest.raises(za.errors.ClosedError):
            seq.keep([], 0)
