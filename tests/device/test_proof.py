"""A quick proof of the machine's device: every command in a process of its own, both reports, and the exit status."""

import json

from commands import run

from zinc_attn.tools import proof

SMALL = ("--cases", "9/3/64 f32 65", "--splits", "1,auto")  # a case of the record


def test_quick_proof(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(proof, "QUICK_CHECK", SMALL)
    out = tmp_path / "made"
    assert run("proof --quick --shape 4/2/64 --contexts 130 --out", out) == 0
    assert "passed" in capsys.readouterr().out.splitlines()
    text, report = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert report["passed"] and [one["tool"] for one in report["steps"]] == ["check", "sweep", "bench"]
    ((_, digest, cases),) = proof.checks_of(report)
    assert digest and [one["status"] for one in cases] == ["pass"] and digest in text
    assert text.count("\n| 4/2/64 | 130 | auto | bits | ") == 2
    assert str(tmp_path) not in text + json.dumps(report)
