"""A quick proof of the machine's device: every step in a process of its own, both reports, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zinc_attn as za
from zinc_attn.cli import app as cli
from zinc_attn.runtime.devices import pci_address
from zinc_attn.tools.proof import spec

SMALL = ("--shapes", "9/3/64", "--dtypes", "f32", "--contexts", "65", "--layouts", "1,auto")  # a case of the record
KEYS = {"format", "made", "ended", "passed", "zinc_attn", "spirv", "arguments", "device", "machine", "card", "compiler",
        "steps_planned", "steps", "bits", "sweep", "bench", "sensors"}  # fmt: skip


def test_quick_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(spec, "QUICK_CHECK", SMALL)
    out = tmp_path / "made"
    assert cli.main(["proof", "--quick", "--shapes", "4/2/64", "--contexts", "130", "--out", str(out)]) == 0
    assert "passed" in capsys.readouterr().out.splitlines()
    report = json.loads((out / "report.json").read_text())
    assert set(report) == KEYS and report["passed"] and report["ended"] == "finished"
    assert [(one["step"], one["status"]) for one in report["steps"]] == [
        ("check", "ok"), ("sweep-4-2-64", "ok"), ("bench-4-2-64", "ok"),
    ]  # fmt: skip
    assert report["bits"]["agree"] and report["bits"]["equals_committed"] and report["bits"]["cases"] == 1
    assert [(one["layout"], one["verified"]) for one in report["sweep"]] == [("auto", "bits"), ("1", "bits")]
    assert all(one["pass1_us"] > 0 and one["pass2_us"] > 0 for one in report["bench"])
    text = (out / "report.md").read_text()
    assert all(f"\n## {title}\n" in text for title in ("Device", "Steps", "Bits", "Sweep", "Bench"))
    assert str(tmp_path) not in text + json.dumps(report)
    assert {path.name for path in out.glob("restart-1/*")} == {"check", "sweep-4-2-64", "bench-4-2-64"}


def test_pci_address() -> None:
    for info in za.list_devices():
        address = pci_address(info.index)
        assert address is None if info.kind == "cpu" else address is None or len(address) == 12
