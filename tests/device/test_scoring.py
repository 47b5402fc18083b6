"""Window, softcap, sinks and scale: the oracle's bits in every layout, on every driver, alone and from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache_rows import Twin, same, together
from support import FULL, differing, make_inputs

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache.rows import checked_values
from zinc_attn.decode.contiguous import ContiguousKV, RecordedCall
from zinc_attn.decode.scoring import Scoring, check_scale, check_sinks
from zinc_attn.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from zinc_attn.planning.splits import SplitPlan, plan_splits

SHAPES = ("2/2/256", "9/3/64", "8/2/80") + (("16/2/256", "64/8/64", "5/1/512", "16/1/128") if FULL else ())
CONTEXTS = (0, 1, 63, 64, 65, 129, 700, 1500)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 128},
    "window of 1": {"window": 1},
    "wide window": {"window": 600},
    "window beyond": {"window": 5000},
    "softcap": {"softcap": 0.7},
    "softcap 50": {"softcap": 50.0, "scale": 0.3},
    "sinks": {"sinks": True},
    "all": {"window": 200, "softcap": 30.0, "sinks": True, "scale": 1.7},
}


def options(name: str, q_heads: int) -> dict[str, Any]:
    """Keyword arguments; sinks from far below to far above every score."""
    found = dict(OPTIONS[name])
    if "sinks" in found:
        found["sinks"] = np.linspace(-150, 150, q_heads, dtype=np.float32) ** 3 / 2e4
    return found


@pytest.mark.parametrize(
    ("text", "name"),
    [(text, name) for text in SHAPES for name in OPTIONS if FULL or text != SHAPES[0] or name in ("window", "all")],
)
def test_every_layout_gives_the_oracles_bits(any_device: za.Device, text: str, name: str) -> None:
    shape = za.AttnShape.parse(text)
    some = options(name, shape.q_heads)
    scoring = Scoring(
        check_scale(some.get("scale"), shape.head_dim),
        some.get("window"),
        some.get("softcap"),
        check_sinks(some.get("sinks"), shape.q_heads),
    )
    slow = any_device.info.name.startswith("SwiftShader") or any_device.runtime.name == "kompute"
    for context in (65, 700) if slow and not FULL else CONTEXTS:
        q, k, v = make_inputs(shape, context, "f16", "sharp")
        out, lse = reference.emulate(q, k, v, **some)
        window = some.get("window")
        kv = ContiguousKV(any_device, k, checked_values("v", v)[0])
        plans = [SplitPlan.fixed(context, shape, num_splits=n, window=window) for n in (1, 2, 7, 1000)]
        plans += [SplitPlan.fixed(context, shape, split_size=n, window=window) for n in (100, 2048)]
        plans += [plan_splits(context, shape, 64, kind=kind, window=window) for kind in ("gpu", "cpu")]
        for plan in plans[-1:] if slow and not FULL else plans:
            step = RecordedCall(kv, plan, scoring=scoring)
            step.write_q(q[None])
            step.poison()
            step.run()
            got = step.result()
            step.close()
            same([x[0] for x in got], (out, lse), (context, plan))
        kv.close()


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("name", ("window", "all"))
def test_rows_of_a_prompt(device: za.Device, name: str, causal: bool) -> None:
    some, rng = options(name, 4) | {"causal": causal}, np.random.default_rng(5)
    for tokens, q_len in ((5, 9), (300, 300), (700, 33)):
        k, v = rng.standard_normal((2, tokens, 2, 64), np.float32)
        q = rng.standard_normal((q_len, 4, 64), np.float32)
        want = reference.emulate(q, k, v, **some)
        for splits in (None, 1, 9):  # the first four of nine rows are before the first key
            got = za.attention(q, k, v, device, splits, return_lse=True, allow_empty=True, **some)
            same(got, want, (tokens, q_len, splits))


@pytest.mark.parametrize("page_size", (16, 256) if FULL else (256,))
def test_layers_of_a_cache_score_differently(device: za.Device, page_size: int) -> None:
    """Windows and sinks per layer; tokens one by one, in chunks and in a batch; every step has the oracle's bits."""
    shape, rng = za.AttnShape(6, 2, 64), np.random.default_rng(9)
    sinks = [rng.standard_normal(6).astype(np.float32), None, rng.standard_normal(6).astype(np.float32) * 9]
    some = {"window": [128, None, 3], "softcap": 5.0, "sinks": sinks}
    with za.KVCache(device, shape, 3, 2048, "f16", page_size) as cache:
        attn, fixed = (za.Attention(cache, **some, **layout) for layout in ({}, {"num_splits": 3}))
        twins = [Twin(attn, seed, **some) for seed in (0, 1)]
        for lengths in ((100, 7), (1, 1), (1, 1), (260, 62), (1, 1), (1, 1), (1, 1), (513, 1), (1, 1)):
            together(twins, lengths)
            for one in twins:
                one.look(attention=fixed)


def test_a_window_reads_only_its_keys(device: za.Device) -> None:
    """Keys outside it are not touched: a cache full of NaN there does not show."""
    shape = za.AttnShape(2, 1, 64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((4000, 1, 64), np.float32) for _ in "kv")
    q = rng.standard_normal((2, 64), np.float32)
    want = reference.emulate(q, k, v, window=130)
    begin = (4000 - 130) // 64 * 64
    k[:begin], v[:begin] = np.nan, np.nan
    kv = ContiguousKV(device, k, v)
    for plan in (SplitPlan.fixed(4000, shape, num_splits=2, window=130), plan_splits(4000, shape, window=130)):
        step = RecordedCall(kv, plan, scoring=Scoring(check_scale(None, 64), 130))
        step.write_q(q[None])
        step.run()
        assert not differing(step.result()[0][0], want[0])
        step.close()
    kv.close()


@pytest.mark.parametrize("kind", ("normal", "sharp", "extreme"))
@pytest.mark.parametrize("text", ("16/2/256" if FULL else "2/2/256", "9/3/64"))  # one head compiles faster than 8
def test_close_to_float64(device: za.Device, text: str, kind: str) -> None:
    shape = za.AttnShape.parse(text)
    for name in OPTIONS:
        some = options(name, shape.q_heads)
        q, k, v = make_inputs(shape, 1000, "f32", kind)
        out, lse = za.attention(q, k, v, device, return_lse=True, **some)
        exact_out, exact_lse = reference.attention(q, k, v, **some)
        assert np.abs(out - exact_out).max() <= 2e-5 * max(1.0, np.abs(v).max()), name
        assert np.abs(lse - exact_lse).max() <= 6e-7 * max(4.0, np.abs(exact_lse).max()), name


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
