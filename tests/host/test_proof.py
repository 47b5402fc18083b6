"""The proof without a device: its commands, steps that fail, what a report leaves out, and a report of canned rows."""

import json

import pytest
from support import CPU, GPU

from zinc_attn.errors import ArgumentError
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import proof
from zinc_attn.tools.proof import ProofSpec

SHAPE = AttnShape(16, 2, 256)
FAKE_COMMAND = """
import json, os, signal, sys, time
print("/home/lovelace/driver.so of lovelace on engine: hf_abcdef is bad", file=sys.stderr)
if sys.argv[1] == "sweep":
    raise RuntimeError("in /home/lovelace/code")
if sys.argv[1] == "bench":
    print('{"shape": "16/2', end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({"case": "9/3/64 f32 65", "status": "FAIL", "faults": [
    {"variation": "split 8", "text": "out[0]: got 1, expected 2"}]}), flush=True)
time.sleep(60)
"""


def test_commands():
    def lines(info, **options):
        return [" ".join(words) for words in ProofSpec(info, "kompute", [SHAPE], [64, 8192], **options).commands()]

    timed, on = "--shape 16/2/256 --contexts 64,8192", "--device 1 --runtime kompute --json"
    assert lines(GPU) == [f"check {on}", f"sweep {timed} {on}", f"bench {timed} {on}"]  # check's whole matrix
    assert lines(CPU)[0] == "check --quick --device 0 --runtime kompute --json"
    timed += " --repeats 5"
    assert lines(GPU, quick=True) == [f"check --quick {on}", f"sweep {timed} {on}", f"bench {timed} {on}"]


def test_a_wrong_dispatcher_is_refused():
    """As $ZINC_ATTN_RUNTIME may name one."""
    with pytest.raises(ArgumentError, match="runtime: got 'cuda', expected one of kompute, vulkan"):
        ProofSpec(GPU, "cuda", [SHAPE], [64])


def test_failed_steps_are_in_a_report_that_names_nobody(tmp_path, monkeypatch):
    """A check that hangs, a sweep that raises and a bench that crashes: all run, and all are reported."""
    (tmp_path / "fake_command.py").write_text(FAKE_COMMAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, value in {"HOME": "/home/lovelace", "USER": "lovelace", "HF_TOKEN": "hf_abcdef"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "engine")
    monkeypatch.setattr("platform.node", lambda: "engine")
    monkeypatch.setattr("platform.release", lambda: "6.12.3-of-lovelace")
    monkeypatch.setattr(proof, "COMMAND", "fake_command")
    spec = ProofSpec(GPU, "vulkan", [SHAPE], [1024], restarts=1, timeout_s=2.0)
    folder, ended = tmp_path / "made", list[str]()
    report = proof.prove(spec, folder, lambda step: ended.append(proof.outcome(step)))
    assert ended[0].startswith("STOPPED after 2") and ended[1:] == ["WRONG output", "ENDED by signal 9"]
    text, data = (folder / "report.md").read_text(), (folder / "report.json").read_text()
    assert json.loads(data) == report | {"passed": False} and "Linux 6.12.3 |" in text
    assert "**NOT passed**: 3 of 3 steps ran, 3 of them are not ok" in text
    assert "| 9/3/64 f32 65 | split 8 | out[0]: got 1" in text
    for word in ("/home", "lovelace", "engine", "hf_abcdef", GPU.uuid, str(tmp_path)):
        assert word not in text + data, word


def test_an_interrupt_leaves_a_report(tmp_path, monkeypatch):
    def interrupted(words, *_):
        if words[0] == "sweep":
            raise KeyboardInterrupt
        return step("check")

    monkeypatch.setattr(proof, "run_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proof.prove(ProofSpec(GPU, "vulkan", [SHAPE], [1024]), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (len(report["steps"]), report["planned"], report["passed"]) == (1, 9, False)


def step(tool, *rows, exit_status=0):
    about = {"tool": tool, "shape": None if tool == "check" else "16/2/256", "command": tool}
    return {**about, "exit_status": exit_status, "seconds": 1.0, "rows": list(rows)}


def timed(us, **more):
    about = {"context": 8192, "layout": "auto", "status": "ok", "verified": "bits", "measure": "call"}
    return {**about, "median_us": us, "kv_gb_s": us and 8e3 / us, **more}


def canned(tmp_path, monkeypatch, steps):
    """A report of these steps, three in each of two restarts."""
    left = list(steps)
    monkeypatch.setattr(proof, "run_step", lambda *_: left.pop(0))
    spec = ProofSpec(GPU, "vulkan", [SHAPE], [8192], restarts=2)
    return proof.prove(spec, tmp_path)


def restart(digest, *more, scale=1.0, status=0):
    cases = [{"case": "9/3/64 f32 65", "status": "pass", "faults": []}]
    bench = [timed(scale * us, measure=name) for name, us in {"call": 60.0, "pass 1": 35.0}.items()]
    return [
        step("check", *cases, *([{"run": digest}] if digest else [])),
        step("sweep", timed(50.0 * scale), *more, exit_status=status),
        step("bench", *bench),
    ]


def test_report_of_a_card(tmp_path, monkeypatch):
    refused = timed(None, context=131072, status="refused", error="no room | at all")
    report = canned(tmp_path, monkeypatch, [*restart("d1", refused), *restart("d1", refused, scale=1.1)])
    assert proof.passed(report)
    text = (tmp_path / "report.md").read_text()
    for piece in (
        "**passed**: 6 of 6 steps ran, 0 of them are not ok",
        "| 2 | d1 | 1 | 0 | 0 |",
        "| 16/2/256 | 131,072 | auto | REFUSED: no room \\| at all | – | – / – |",
        "| 16/2/256 | 8,192 | auto | bits | 228.6 | 60 / 66 | 35 / 38.5 |",
    ):
        assert piece in text, piece


@pytest.mark.parametrize(
    ("digest", "status"), [("d2", 0), (None, 0), ("d1", 1)], ids=["another digest", "no digest", "a failed step"]
)
def test_what_does_not_pass(tmp_path, monkeypatch, digest, status):
    report = canned(tmp_path, monkeypatch, [*restart("d1"), *restart(digest, status=status)])
    assert not proof.passed(report) and "**NOT passed**: 6 of 6" in (tmp_path / "report.md").read_text()
