"""The proof without a device: its commands, steps that fail, what a report leaves out and which restarts pass."""

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


def restart(digest, status=0):
    """The steps of one of two restarts."""
    cases = [{"case": "9/3/64 f32 65", "status": "pass", "faults": []}, *([{"run": digest}] if digest else [])]
    return [step("check", *cases), step("sweep", exit_status=status), step("bench")]


@pytest.mark.parametrize(
    ("digest", "status"),
    [("d1", 0), ("d2", 0), (None, 0), ("d1", 1)],
    ids=["one digest", "another digest", "no digest", "a failed step"],
)
def test_which_restarts_pass(tmp_path, monkeypatch, digest, status):
    left = [*restart("d1"), *restart(digest, status)]
    monkeypatch.setattr(proof, "run_step", lambda *_: left.pop(0))
    report = proof.prove(ProofSpec(GPU, "vulkan", [SHAPE], [8192], restarts=2), tmp_path)
    passed = "**passed**: 6 of 6" in (tmp_path / "report.md").read_text()
    assert proof.passed(report) == passed == (digest == "d1" and not status)
