"""Window, softcap, sinks and scale: the oracle's bits in every layout, on every driver; check has caches of them."""

from typing import Any

import numpy as np
import pytest
from support import FULL, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows
from zinc_attn.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 128},
    "window of 1": {"window": 1},
    "softcap 50": {"softcap": 50.0, "scale": 0.3},
    "all": {"window": 200, "softcap": 30.0, "sinks": True, "scale": 1.7},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_gives_the_oracles_bits(any_device: za.Device, name: str) -> None:
    """Of rows of which some are before the first key; and the oracle is near float64. check has caches and shapes."""
    some, rng = dict(OPTIONS[name]), np.random.default_rng(5)
    if "sinks" in some:  # from far below to far above every score
        some["sinks"] = np.linspace(-150, 150, 9, dtype=np.float32) ** 3 / 2e4
    slow = "SwiftShader" in any_device.info.name or any_device.runtime.name == "kompute"
    cases = (5, 9, True), (65, 1, True), (129, 2, False), (700, 3, True), (1500, 1, True)
    for tokens, q_len, causal in cases[:2] if slow and not FULL else cases:
        k, v = rng.standard_normal((2, tokens, 3, 64), np.float32).astype(np.float16)
        q = rng.standard_normal((q_len, 9, 64), np.float32) * 8
        out, lse = reference.emulate(q, k, v, causal=causal, **some)
        exact_out, exact_lse = reference.attention(q, k, v, causal=causal, **some)
        seen = np.isfinite(exact_lse)
        assert np.abs(out - exact_out).max() <= 2e-5 * max(1.0, np.abs(v).max()), tokens
        assert np.abs(lse[seen] - exact_lse[seen]).max() <= 6e-7 * max(4.0, np.abs(exact_lse[seen]).max()), tokens
        call = {"causal": causal, "return_lse": True, "allow_empty": True, **some}
        for splits in (None,) if slow and not FULL else (None, 1, 7, 1000):
            same(za.attention(q, k, v, any_device, splits, **call), (out, lse), (tokens, q_len, splits))


def test_a_window_reads_only_its_keys(device: za.Device) -> None:
    """Keys outside it are not touched: a cache full of NaN there does not show."""
    shape = za.AttnShape(2, 1, 64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((4000, 1, 64), np.float32) for _ in "kv")
    q = rng.standard_normal((2, 64), np.float32)
    want = reference.emulate(q, k, v, window=130)
    begin = (4000 - 130) // 64 * 64
    with za.KVCache(device, shape, 1, 4096, "f32") as cache:
        sequence = cache.new_sequence()
        cache.append(sequence, 0, k, v)
        cache.mover.append(
            0, np.arange(begin), sequence.table(), rows.encode(*[np.full_like(k[:begin], np.nan)] * 2, shape, "f32")
        )
        for layout in ({"num_splits": 2}, {}):
            same(za.Attention(cache, window=130, **layout)(q, sequence, 0, return_lse=True), want)


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    (
        ({"window": 0}, ArgumentError, "window: got 0, expected an int from 1 to "),
        ({"window": 1 << 63}, ArgumentError, "window: got 9223372036854775808, expected an int from 1 to "),
        ({"window": 2.5}, ArgumentError, "window: got 2.5, expected an int"),
        ({"softcap": 0.0}, ValueRangeError, "softcap: got 0, expected a number from"),
        ({"softcap": float("nan")}, ValueRangeError, "softcap: got nan, expected a number from"),
        ({"softcap": "high"}, ArgumentError, "softcap: got 'high', expected a number from"),
        ({"sinks": np.zeros(3, np.float32)}, ShapeError, r"sinks: got shape \(3,\), expected \(4,\)"),
        ({"sinks": np.zeros(4, np.int32)}, DTypeError, "sinks: got dtype int32, expected float32"),
        ({"sinks": np.full(4, np.inf, np.float32)}, ValueRangeError, r"sinks\[0\]"),
        *(({"scale": scale}, ArgumentError, "scale: got ") for scale in (1e39, 1e300, "abc", [1], np.array([1, 2]))),
    ),
)
def test_refusals(device: za.Device, bad: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k = np.ones((4, 64), np.float32), np.ones((5, 2, 64), np.float32)
    with pytest.raises(error, match=f"^{text}"):
        za.attention(q, k, k, device, **bad)
    with za.KVCache(device, za.AttnShape(4, 2, 64), 2, 100, "f32") as cache:
        with pytest.raises(error, match=f"^{text}"):
            za.Attention(cache, **bad)
        with pytest.raises(ArgumentError, match=r"^window: got 3 entries, expected an int, None or one per layer"):
            za.Attention(cache, window=[1, 2, 3])
        with pytest.raises(ArgumentError, match=r"^sinks: got 1 rows, expected \(4,\) or a row per layer \(2\)"):
            za.Attention(cache, sinks=np.zeros((1, 4), np.float32))
