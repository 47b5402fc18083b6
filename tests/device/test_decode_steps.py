"""``zinc-attn decode`` on a device: it verifies what it times, and says where a step stalled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zinc_attn as za
from zinc_attn.cli import app as cli
from zinc_attn.tools.measure import DecodeSpec, decode_run, steps

SHAPE = za.AttnShape(4, 2, 64)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["decode", "--shape", str(SHAPE), "--layers", "2", "--tokens", "70", "--out", str(tmp_path)]
    assert cli.main([*words, "--runtime", "vulkan"]) == 0
    out = capsys.readouterr().out
    assert "2 layers of 4/2/64, f16, one token a step, 70 steps" in out and "3 equal" in out
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["context"] for row in rows] == list(range(1, 71)) and all(row["prepared"] for row in rows)
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main([*words, "--tokens", "0"]) == 2
    assert "tokens: got 0" in capsys.readouterr().err


def test_stalls_and_wrong_bits_are_seen(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(steps, "perf_counter", lambda: (n := next(clock)) * 1e-3 + 0.1 * (n >= 2 + 2 * 20 + 1))
    spec = DecodeSpec(SHAPE, 1, 40, prepare=False)
    run = decode_run(device, spec)
    assert [row.context for row in run.rows if row.stall] == [21]
    assert (run.rows[20].ms, run.rows[20].neighbors_ms) == (pytest.approx(101), pytest.approx(1))
    assert (run.compared, run.differ) == (2, 0)
    wrong: Any = steps.oracle
    monkeypatch.setattr(steps, "oracle", lambda q, k, v, *rest: wrong(q, k, 2 * v, *rest))
    assert decode_run(device, spec).differ == 2
