"""``zinc-attn decode`` on a device: it verifies what it times, and says where a step stalled."""

import json
from typing import Any

import pytest
from commands import run

import zinc_attn as za
from zinc_attn.tools.measure import CallSpec, decode_steps, stalls, steps

SHAPE = za.AttnShape(4, 2, 64)


def test_the_command(capsys, tmp_path):
    assert run(f"decode --shape {SHAPE} --layers 2 --tokens 70 --runtime vulkan --out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "shape 4/2/64, f16, 2 layers, 70 steps of one token\nvulkan: prepared in " in out
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
    rows = decode_steps([device], [spec], prepare=False)
    assert [row.context for row in rows] == list(spec.contexts)
    assert [(row.context, row.figures["attention_ms_per_step"]) for row in stalls(rows)] == [(21, pytest.approx(101))]
    assert [row.context for row in rows if row.verified] == [1, 40]
    right: Any = steps.oracle
    monkeypatch.setattr(steps, "oracle", lambda q, k, v, *rest: right(q, k, 2 * v, *rest))
    wrong = [row for row in decode_steps([device], [spec], prepare=False) if row.status == "failed"]
    assert [row.context for row in wrong] == [1, 40]
    assert all("got" in str(row.error) and not row.seconds for row in wrong)
