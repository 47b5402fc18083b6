"""Matrix units. Arithmetic "matrix": its bits on one device depend on q, k and v alone, and its error stays within the
bound. Arithmetic "integer": its many rows have the oracle's bits.

``check`` is the judge of most of it, and test_slips.py of ``check``. lavapipe has matrix units from Mesa 26 on.
Where no device has them, the tests skip and say so; what is refused for lack of them is in host/test_matrix_tools.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache_rows import filled
from commands import refusal
from numpy.typing import NDArray
from support import FULL, differing, same

import zinc_attn as za
from zinc_attn.canonical.matrix_bound import matrix_bound
from zinc_attn.errors import ValueRangeError
from zinc_attn.planning import duration, inputs
from zinc_attn.tools import check
from zinc_attn.tools.check import Case
from zinc_attn.tools.harness.split_spec import parse_split_specs
from zinc_attn.tools.measure import CallSpec, measure_calls

F32 = NDArray[np.float32]


@pytest.fixture
def on_units(matrix_device, monkeypatch):
    """A CPU's units attend, too; whether those of an arithmetic have attended since the test began."""
    monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    seen, dispatch = set(), matrix_device.dispatch

    def noted(call: Any, buffers: Any) -> Any:
        seen.add(call.decl.name)
        return dispatch(call, buffers)

    monkeypatch.setattr(matrix_device, "dispatch", noted)
    return lambda arithmetic: {"matrix": "attend_matrix", "integer": "attend_units"}[arithmetic] in seen


def make(rng: np.random.Generator, shape: za.AttnShape, rows: int, tokens: int) -> tuple[F32, Any, Any]:
    q = rng.standard_normal((rows, shape.q_heads, shape.head_dim), np.float32)
    k = rng.standard_normal((tokens, shape.kv_heads, shape.head_dim), np.float32).astype(np.float16)
    v = rng.standard_normal((tokens, shape.kv_heads, shape.v_head_dim), np.float32).astype(np.float16)
    return q, k, k[..., : shape.v_head_dim] if shape.latent else v


def attend(device: za.Device, shape: za.AttnShape, q: F32, k: Any, v: Any, **options: Any) -> tuple[F32, F32]:
    """out, lse by matrix units; options of the cache and of Attention together."""
    held = {name: options.pop(name) for name in ("dtype", "page_size", "round_rows") if name in options}
    each = {name: options.pop(name) for name in ("mask", "causal") if name in options}
    with filled(device, shape, k, v, **held) as (cache, seq):
        attention = za.Attention(cache, **{"arithmetic": "matrix", **options})
        out, lse = attention(q, seq, 0, return_lse=True, **each)
        return out, lse


COARSE = "9/3/64 f16 1290 rows=40 coarse"  # values that f16, bf16 and q8_0 hold alike
SHAPES = ("16/2/256", "32/8/128", "20/1/576/512/latent", "71/1/64", "4/4/20/12", "6/2/64/256")
WORDS = ("window=100", "softcap=20", "sinks", "alibi", "noncausal", "mask=random", "mask=f16", "scale=1")
CASES = (
    *(COARSE, "9/3/64 q8_0 577 rows=16 cancelling", "8/2/64 f16 1", "9/3/64 q4_0/fp8_e4m3 333 rows=21"),
    *(f"{shape} f16 700 rows=37" for shape in SHAPES),
    *(f"9/3/64 f16 333 rows=21 {words}" for words in WORDS),
)
PAIRS = ("q8_0/q4_0", "q4_0/iq4_nl", "iq4_nl/q5_0", "q5_0/q8_0")
INTEGER_CASES = (
    "9/3/64 q8_0 577 rows=16 cancelling",
    *(f"{shape} q8_0 700 rows=37" for shape in SHAPES),
    *(f"9/3/64 {pair} 333 rows=21 {words}" for pair, words in zip(PAIRS * 2, WORDS, strict=True)),
)


@pytest.mark.parametrize(
    ("arithmetic", "text"), [*(("matrix", text) for text in CASES), *(("integer", text) for text in INTEGER_CASES)]
)
def test_every_property_holds(matrix_device, on_units, arithmetic, text):
    """Layouts, batches, chunks, pages, shared keys, shards and storage types, of every shape and option."""
    (outcome,) = check.check([matrix_device], [Case.parse(text, arithmetic)], parse_split_specs("1,auto,size:64"))
    assert outcome.status == "pass", [outcome.line(fault) for fault in outcome.faults]
    assert outcome.verified.startswith("bound (" if arithmetic == "matrix" else "oracle")
    assert text != COARSE or {*range(1, 10), 11} <= set(outcome.shown)
    assert on_units(arithmetic)


@pytest.mark.parametrize("options", ({}, {"window": 600}, {"sinks": np.linspace(-2, 3, 8, dtype=np.float32)}))
@pytest.mark.parametrize(
    ("text", "arithmetic", "dtype"),
    (("8/2/64", "matrix", "f16"), ("8/1/40/72", "matrix", "f16"), ("8/1/40/72", "integer", "q8_0")),
)
def test_walks(matrix_device, on_units, rng, monkeypatch, text, arithmetic, dtype, options):
    """Workgroups that attend their rows' whole context have the bits of partial states; more rows fit a submission."""
    shape, tokens, rows = za.AttnShape.parse(text), 1700, 150
    q, k, v = make(rng, shape, rows, tokens)
    options = {"arithmetic": arithmetic, **options}
    want = attend(matrix_device, shape, q, k, v, num_splits=2, dtype=dtype, **options)
    every, some = 1 << 27, 4 * 8 * (shape.v_dim + 2) * duration.ROOM * 64  # room for all rows; for 64 unsplit ones
    planned, built = list[bool](), inputs.matrix_workgroup
    options = {"observer": lambda submission, _: planned.append(submission.key.whole_context), **options}
    with filled(matrix_device, shape, k, v, dtype) as (cache, seq):
        attention = za.Attention(cache, **options)
        for workgroups, room, submissions in ((1, every, 1), (1, some, 3), (10**6, every, 1)):
            enough = partial(lambda walks, *facts: built(*facts)._replace(walks=walks), workgroups)
            monkeypatch.setattr(inputs, "matrix_workgroup", enough)
            monkeypatch.setattr(inputs, "SCRATCH_BYTES", room)
            planned.clear()
            same(attention(q, seq, 0, return_lse=True), want)
            assert planned == [workgroups == 1] * submissions
    assert on_units(arithmetic)


def test_exact_products_have_the_canonical_bits(matrix_device, rng):
    """Equal scores weigh 1, and small integers are summed exactly in any order: the bound would hide a small slip."""
    shape, tokens = za.AttnShape(8, 2, 64), 1100
    k, v = (rng.integers(-most, most + 1, (tokens, 2, 64)).astype(np.float16) for most in (2, 8))
    q = np.zeros((20, 8, 64), np.float32)
    same(attend(matrix_device, shape, q, k, v), za.reference.emulate(q, k, v, causal=True))


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


@pytest.mark.parametrize(
    ("text", "options"),
    (
        ("4/1/80/72", {}),
        ("4/1/80/72", {"arithmetic": "integer", "dtype": "q4_0/q8_0"}),
        *((("2/1/136/8", {}), ("4/1/272/8", {"arithmetic": "integer", "dtype": "q8_0"})) if FULL else ()),
    ),
)
def test_the_unrolled_program(matrix_device, on_units, rng, monkeypatch, text, options):
    """GPUs run it; its bits are those of the program with loops, with q in registers and in shared memory."""
    shape = za.AttnShape.parse(text)
    q, k, v = make(rng, shape, 5, 200)
    want = attend(matrix_device, shape, q, k, v, **options)
    built = inputs.matrix_workgroup

    def unrolled(*arguments: Any) -> Any:
        workgroup = built(*arguments)
        return workgroup and workgroup._replace(unrolled=True)

    monkeypatch.setattr(inputs, "matrix_workgroup", unrolled)
    same(attend(matrix_device, shape, q, k, v, **options), want)
    assert on_units(options.get("arithmetic", "matrix"))


TINY = (("v", 1e-8), ("k", 3e-8), ("q", 1e-7))  # bfloat16 holds such numbers with all its digits, float16 hardly


@pytest.mark.parametrize(
    ("which", "size", "scale"),
    (*(("none", 1, None), ("extreme", 1, None), ("subnormal", 1, None)), *((*x, y) for x in TINY for y in (None, 1e3))),
)
def test_edges(matrix_device, rng, which, size, scale):
    """No key, logits of about +-200, and small numbers, for which the bound counts the rounding to float16."""
    shape, count = za.AttnShape(8, 2, 64), 0 if which == "none" else 130
    arrays = {name: x.astype(np.float32) for name, x in zip("qkv", make(rng, shape, 3, 130), strict=True)}
    if which == "extreme":
        arrays["q"][:], arrays["k"][:] = 25.0, np.where(rng.random((130, 2)) < 0.5, 1.0, -1.0)[..., None]
    elif which == "subnormal":
        arrays["v"] *= np.float32(2.0**-22)
    elif which in arrays:
        arrays[which] *= np.float32(size)
    dtype, stored = ("f16", np.float16) if size == 1 else ("bf16", ml_dtypes.bfloat16)
    q, (k, v) = arrays["q"], (arrays[name][:count].astype(stored) for name in "kv")
    with za.KVCache(matrix_device, shape, 1, 1024, dtype) as cache:
        seq = cache.new_sequence()
        if count:
            cache.append(seq, 0, k, v)
        attention = za.Attention(cache, arithmetic="matrix", scale=scale)
        got = attention(q, seq, 0, return_lse=True, allow_empty=True)
    want = za.reference.attention(q, k, v, scale=scale)
    for one, right, bound in zip(got, want, matrix_bound(q, k, v, scale=scale), strict=True):
        finite = np.isfinite(right)
        assert np.array_equal(np.isfinite(one), finite)
        assert np.all(np.abs(one[finite] - right[finite]) <= bound[finite])
    assert size < 1 or np.linalg.norm(got[0] - want[0]) <= 2e-3 * np.linalg.norm(want[0])


@pytest.mark.parametrize("name", "qkv")
def test_beyond_float16(matrix_device, rng, name):
    """Refused in the cache or in q, and among new rows, after which the cache's largest values are as before."""
    shape = za.AttnShape(8, 2, 64)
    arrays = dict(zip("qkv", (x.astype(np.float32) for x in make(rng, shape, 3, 40)), strict=True))
    beyond = {name: arrays[name].copy()}
    beyond[name].reshape(-1)[5] = 70000.0
    q, k, v = (arrays | beyond).values()
    with filled(matrix_device, shape, k, v, "bf16", round_rows=True) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        with pytest.raises(ValueRangeError, match=rf"^{name}: got .* with arithmetic='matrix', expected at most 65504"):
            attention(q, seq, 0)
        za.Attention(cache)(q, seq, 0)
    with filled(matrix_device, shape, arrays["k"], arrays["v"], "bf16", round_rows=True) as (cache, seq):
        attention = za.Attention(cache, arithmetic="matrix")
        want = attention(arrays["q"], seq, 0)
        with pytest.raises(ValueRangeError, match=rf"^{name}: got a.* magnitude of 70"):
            attention(q, seq, 0, k=k, v=v)
        assert len(seq) == 40 and not differing(attention(arrays["q"], seq, 0), want)


# --- the tools -------------------------------------------------------------------

TOOL_SHAPE = za.AttnShape(4, 2, 64)


@pytest.fixture
def without_units(device):
    if device.info.matrix.fragment is not None:
        pytest.skip(f"{device.info.name} has matrix units")
    return device


@pytest.mark.parametrize("page_size", [256, None])
def test_a_sweep_is_within_the_bound_and_finds_what_is_not(matrix_device, page_size):
    spec = CallSpec(TOOL_SHAPE, 1, [200], q_len=9, page_size=page_size, repeats=2, arithmetic="matrix")
    rows = list(measure_calls([matrix_device], [spec]))
    assert {(row.status, row.verified, row.record()["arithmetic"]) for row in rows} == {("ok", "bound", "matrix")}

    def off(call, by):
        def result():
            got = call.result()
            got.out[0, -1, -1, -1] += by
            return got

        return replace(call, result=result)

    first, second = measure_calls([matrix_device], [spec], wrap_call=lambda call: off(call, 0.5))
    assert first.status == second.status == "failed" and "within" in str(first.error)
    calls = iter((0.0, 1e-6))  # the second layout has another bit
    *first, second = measure_calls([matrix_device], [spec], wrap_call=lambda call: off(call, next(calls)))
    assert {row.status for row in first} == {"ok"}
    assert second.status == "failed" and str(second.error).startswith("unlike layout auto: ")


@pytest.mark.parametrize("command", ("sweep --shape 4/2/64 --contexts 100", "check --cases '4/2/64 f16 100 matrix'"))
def test_a_command_is_refused_without_units(without_units, command, capsys):
    line = refusal(capsys, command, "--arithmetic matrix")
    assert line.startswith("arithmetic: got 'matrix', but ")
    assert "VK_KHR_cooperative_matrix" in line and line.endswith("use arithmetic 'canonical'")
