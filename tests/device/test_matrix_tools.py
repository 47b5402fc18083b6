"""Matrix arithmetic beyond ``Attention``: one-shot calls, shards, the sweep, the benchmark, and a transformers cache.

The tests of bits need a device with VK_KHR_cooperative_matrix, and skip where there is none.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_rows import filled
from commands import records, refusal
from support import same

import zinc_attn as za
from zinc_attn.errors import DTypeError, UnsupportedError, ValueRangeError
from zinc_attn.planning import call as planning
from zinc_attn.tools.harness.bits import Output, compare, truth
from zinc_attn.tools.harness.inputs import Inputs
from zinc_attn.tools.measure import CallSpec, measure_calls

SHAPE = za.AttnShape(4, 2, 64)
MASKING: dict[str, Any] = {"window": 90, "softcap": 20.0, "sinks": np.array([1, -1, 0.5, 2], np.float32)}


@pytest.fixture
def without_units(device):
    if device.info.matrix.tile is not None:
        pytest.skip(f"{device.info.name} has matrix units")
    return device


def test_one_shot_calls_have_the_caches_bits(matrix_device):
    data = Inputs.normal(SHAPE, 600, "f16", q_len=19)
    call = {"arithmetic": "matrix", "return_lse": True, **MASKING}
    want = za.attention(data.q, data.k, data.v, matrix_device, **call)
    same(za.attention(data.q, data.k, data.v, matrix_device, num_splits=1, **call), want)
    same(za.attention(data.q[-1], data.k, data.v, matrix_device, **call), (want[0][-1], want[1][-1]))
    assert compare(Output(*want), truth(data.q, data.k, data.v, "f16", None, MASKING)) is None
    with filled(matrix_device, SHAPE, data.k, data.v) as (cache, seq):
        same(za.Attention(cache, arithmetic="matrix", **MASKING)(data.q, seq, 0, return_lse=True), want)
    with za.ShardedKVCache([matrix_device, matrix_device], SHAPE, 1, 1024, "f16", 256) as sharded:
        parts = sharded.new_sequence()
        sharded.append(parts, 0, data.k, data.v)
        split = za.ShardedAttention(sharded, arithmetic="matrix", **MASKING)
        same(split(data.q, parts, 0, return_lse=True), want)


def test_one_shot_refusals(matrix_device):
    data = Inputs.normal(SHAPE, 20, "f16", q_len=8)
    k, v = data.k.astype(np.float32), data.v.astype(np.float32)
    with pytest.raises(DTypeError, match=r"K or V in f32.*or float16 arrays"):
        za.attention(data.q, k, v, matrix_device, arithmetic="matrix")
    with pytest.raises(ValueRangeError, match=r"q: got a magnitude of .*, expected at most 65504"):
        za.attention(data.q * 1e5, data.k, data.v, matrix_device, arithmetic="matrix")


@pytest.mark.parametrize("page_size", [256, None])
def test_a_sweep_is_within_the_bound_and_finds_what_is_not(matrix_device, page_size):
    spec = CallSpec(SHAPE, 1, [200], q_len=9, page_size=page_size, repeats=2, arithmetic="matrix")
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


@pytest.fixture(scope="module")
def on_a_model(tmp_path_factory):
    """The words of a command by matrix units on a small random checkpoint."""
    for name in ("transformers", "torch"):
        pytest.importorskip(name)
    from tiny_models import TEXT, saved

    folder = tmp_path_factory.mktemp("model")
    model = saved(folder / "llama")
    (folder / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    return lambda words: (words.format(folder / "text.txt"), "--arithmetic matrix --runtime vulkan --model", model)


MODEL_COMMANDS = {
    "generate": "generate --json --prompt-ids 1,2,3 --max-new-tokens 3 --dtype f16",
    "validate": "validate --json --contexts 70 --splits 8 --dtype f16",
    "perplexity": "perplexity --json --text {} --context 70 --dtype f16",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODEL_COMMANDS)
def test_a_models_attention(matrix_device, on_a_model, name, monkeypatch, capsys):
    planned, workgroup = [], planning.matrix_workgroup
    monkeypatch.setattr(planning, "matrix_workgroup", lambda *given: planned.append(given) or workgroup(*given))
    last = records(capsys, *on_a_model(MODEL_COMMANDS[name]))[-1]
    assert planned
    if name == "validate":
        assert (last["what"], last["status"]) == ("oracle", "in bound") and "% of the bound, 2 layers" in last["text"]
    elif name == "perplexity":
        assert last["arithmetic"] == "matrix" and 0 < last["kl"] < 1e-2


COMMANDS = {
    "sweep": "sweep --shape 4/2/64 --contexts 100",
    "bench": "bench --runtime vulkan --shape 4/2/64 --contexts 100",
    "check": "check --cases '4/2/64 f16 100 matrix'",
}


@pytest.mark.parametrize("name", [*MODEL_COMMANDS, *COMMANDS])
def test_a_command_is_refused_without_units(without_units, request, name, capsys):
    if name in COMMANDS:
        line = refusal(capsys, COMMANDS[name], "--arithmetic matrix")
    else:
        line = refusal(capsys, *request.getfixturevalue("on_a_model")(MODEL_COMMANDS[name]))
    assert line.startswith("arithmetic: got 'matrix', but ")
    assert "VK_KHR_cooperative_matrix" in line and line.endswith("use arithmetic 'canonical'")


@pytest.fixture
def made():
    """Makes a ZincCache for a small config."""
    transformers = pytest.importorskip("transformers")
    from zinc_attn.integrations import transformers as hf

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    return lambda device, dtype=None, arithmetic="matrix": hf.ZincCache(
        config, 64, device=device, dtype=dtype, arithmetic=arithmetic
    )


def test_a_transformers_cache_is_refused_without_units(without_units, made):
    with pytest.raises(za.errors.ArgumentError, match="arithmetic: got 'x'"):
        made(without_units, arithmetic="x")
    with made(without_units) as cache, pytest.raises(UnsupportedError, match="VK_KHR_cooperative_matrix"):
        cache.allocate(pytest.importorskip("torch").float16)


def test_a_transformers_cache_tells_how_to_round(matrix_device, made):
    float32 = pytest.importorskip("torch").float32
    refused = pytest.raises(DTypeError, match=r"ZincCache\(dtype='f16'\) rounds a model's float32 keys and values")
    with made(matrix_device) as cache, refused:
        cache.allocate(float32)
    with made(matrix_device, "f16") as cache:
        cache.allocate(float32)
