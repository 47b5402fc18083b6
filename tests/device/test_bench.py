"""The benchmark on a device: dispatchers, the passes by its clock, decode steps; a quick proof."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from commands import on, records, refusal
from commands import run as main
from support import NATIVE as HAS_NATIVE

import zinc_attn as za
from zinc_attn.planning import duration
from zinc_attn.runtime.cpu import library as native
from zinc_attn.tools import proof
from zinc_attn.tools.measure import CallSpec, decode_steps, measure_calls, stalls, steps
from zinc_attn.tools.measure.calls import pass_times

NATIVE = True
SHAPE = za.AttnShape(6, 2, 64)
PASSES = {"device", "pass 1", "gap", "pass 2"}


def run(devices, contexts, *dtypes):
    specs = [CallSpec(SHAPE, 1, contexts, page_size=None, repeats=2, dtype=dtype) for dtype in dtypes]
    return list(measure_calls(devices, specs))


@pytest.mark.of_drivers
def test_rows(device):
    rows = run([device], [100, 700], "f16", "q8_0/q4_0", "fp8_e4m3")
    timed = PASSES if device.info.timestamp_period_ns else set[str]()
    calls = {(r.context, r.spec.dtype, r.layout) for r in rows}
    assert len(calls) == 2 * 3 * 2
    for call in calls:
        measured = {r.measure: r for r in rows if (r.context, r.spec.dtype, r.layout) == call}
        assert {"call"} | (timed & {"device", "pass 1"}) <= set(measured) <= {"call"} | timed
        assert {(r.status, r.verified, len(r.seconds)) for r in measured.values()} == {("ok", "bits", 2)}
        nbytes = call[0] * SHAPE.kv_bytes_per_token(call[1])
        assert measured["call"].figures["kv_gb_s"] == pytest.approx(
            nbytes / measured["call"].figures["median_us"] / 1e3
        )
        if timed:
            times = [measured[measure].figures["median_us"] for measure in ("pass 1", "device", "call")]
            assert times == sorted(times)
            assert measured["device"].latency_mode == "device timestamps; median"
    assert not timed or {r.measure for r in rows if (r.context, r.layout) == (700, "auto")} == {"call", *PASSES}


@pytest.mark.of_drivers
def test_a_call_of_several_submissions_is_timed_whole(device, monkeypatch):
    """As one is on a GPU whose context is so long that a submission would take seconds."""
    monkeypatch.setattr(duration, "work_bound", lambda facts, by_matrix=False: 600 * duration.key_work(facts))
    rows = run([device], [1500], "f16")
    assert {(r.measure, r.status, r.verified, len(r.seconds)) for r in rows} == {("call", "ok", "bits", 2)}


def test_the_times_of_the_passes():
    assert pass_times([(1.0, 3.0)]) == {"device": 2.0, "pass 1": 2.0}
    assert pass_times([(1.0, 3.0), (3.5, 7.5)]) == {"device": 6.5, "pass 1": 2.0, "gap": 0.5, "pass 2": 4.0}


@pytest.mark.of_drivers
def test_two_runtimes_share_a_run():
    pytest.importorskip("kp")
    with za.Device.open(runtime="kompute") as one, za.Device.open(one.info.index, runtime="vulkan") as other:
        rows = run([one, other], [200], "f16")
    assert {(r.runtime, r.status) for r in rows} == {("kompute", "ok"), ("vulkan", "ok")}


def test_command(device, tmp_path, capsys):
    words = f"bench {on(device)} --shape 6/2/64,2/1/64 --contexts 100,1k --repeats 1 --dtype f16,q8_0 --out"
    assert main(words, tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert printed.count(" bits ") == 2 * 2 * 2 * 2 and "pass 1" in printed
    assert (tmp_path / "a" / "bench.png").read_bytes().startswith(b"\x89PNG")
    rows = records(capsys, words.replace(",2/1/64", ""), tmp_path / "b", "--json")
    assert rows == [json.loads(line) for line in (tmp_path / "b" / "bench.jsonl").read_text().splitlines()]
    assert {row["measure"] for row in rows} == {"call", *PASSES}


def test_the_command_of_a_model_against_others(device, tmp_path, capsys):
    """Times in turns, and every error against float64; the model's layers make a step."""
    pytest.importorskip("torch")
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 7}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    words = f"bench {on(device)} --model {tmp_path / 'tiny.json'} --contexts 300 --repeats 2 --splits auto --json"
    rows, ours = records(capsys, words, "--dtype f16,q8_0 --against torch,numpy --out", tmp_path), device.runtime.name
    calls = {(row["dtype"], row["runtime"]): row for row in rows if row["measure"] == "call"}
    others = [("f16", "torch float32"), ("f16", "torch float16"), ("f16", "numpy float32")]
    others += [("q8_0", "torch float32"), ("q8_0", "numpy float32")]
    assert list(calls) == [("f16", ours), *others[:3], ("q8_0", ours), *others[3:]]
    for (_, runtime), row in calls.items():
        exact = runtime == ours
        assert (row["verified"], row["device"] == "this CPU", row["repeats"]) == (
            "bits" if exact else None,
            not exact,
            2,
        )
        assert 1e-9 < row["relative_error"] < (1e-2 if runtime == "torch float16" else 2e-6)
        assert row["attention_ms_per_step"] == pytest.approx(row["median_us"] * 7 / 1e3, rel=1e-4)
        assert row["model"] == "tiny" and row["shape"] == "4/2/64"


def test_against_a_program_that_is_missing(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if name != "torch" else None)
    said = refusal(capsys, "bench --against torch")
    assert said == "against: torch is not installed; pip install torch, or leave it out"


def test_the_command_of_steps(device, capsys, tmp_path):
    assert main(f"decode {on(device)} --shape {SHAPE} --layers 2 --tokens 70 --out", tmp_path) == 0
    out = capsys.readouterr().out
    assert f"shape {SHAPE}, f16, 2 layers, 70 steps of one token\n{device.runtime.name}: prepared in " in out
    assert out.endswith("; 3 outputs compared, all equal\n")
    rows = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    assert [row["context"] for row in rows] == list(range(71))
    assert [row["measure"] for row in rows] == ["prepare"] + ["step"] * 70
    assert all(row["attention_ms_per_step"] == pytest.approx(row["median_us"] / 500, rel=1e-4) for row in rows[1:])
    assert (tmp_path / "decode.png").read_bytes()[:4] == b"\x89PNG"


def test_stalls_and_wrong_bits_are_seen(device, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(steps, "perf_counter", lambda: (n := next(clock)) * 1e-3 + 0.1 * (n >= 2 * 20 + 1))
    spec = CallSpec(SHAPE, 1, range(1, 41))
    rows = list(decode_steps([device], [spec], prepare=False))
    assert [row.context for row in rows] == list(spec.contexts)
    assert [(row.context, row.figures["attention_ms_per_step"]) for row in stalls(rows)] == [(21, pytest.approx(101))]
    assert [row.context for row in rows if row.verified] == [1, 40]
    right: Any = steps.oracle
    result = decode_steps([device], [spec], prepare=False, judge=lambda q, k, v, *rest: right(q, k, 2 * v, *rest))
    wrong = [row for row in result if row.status == "failed"]
    assert [row.context for row in wrong] == [1, 40]
    assert all("got" in str(row.error) and not row.seconds for row in wrong)


SMALL = ("--cases", "9/3/64 f32 65", "--splits", "1,auto")  # a case of the record


def test_quick_proof(tmp_path, monkeypatch, capsys):
    """Every command in a process of its own, both reports, and the exit status."""
    # no empty cache: the processor's kernels take a compiler a minute
    cache = Path(native.library()._name).parents[1] if HAS_NATIVE else tmp_path
    monkeypatch.setattr(proof.tempfile, "TemporaryDirectory", lambda **_: nullcontext(str(cache)))
    monkeypatch.setattr(proof, "QUICK_CHECK", SMALL)
    monkeypatch.setattr(proof, "MORE_CHECKS", ())
    monkeypatch.setattr(proof, "GRAPH_CHECK", ("--graph", "q8_0"))
    out = tmp_path / "made"
    assert main("proof --quick --shape 4/2/64 --contexts 130 --out", out) == 0
    assert "passed" in capsys.readouterr().out.splitlines()
    text, report = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert report["passed"] and [one["tool"] for one in report["steps"]] == ["check", "check", "bench", "sweep"]
    for _, _, digest, cases in proof.checks_of(report):
        assert digest and [case["status"] for case in cases] == ["pass"] and digest in text
    assert text.count("\n| 4/2/64 | 130 | auto | bits | ") == 2
    assert str(tmp_path) not in text + json.dumps(report)
