"""The proof without a device: its steps, those that fail, what a report leaves out and which restarts pass."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support import CPU, GPU

from zinc_attn.errors import ArgumentError
from zinc_attn.kernels.declarations import MATRIX
from zinc_attn.kernels.matrix import MatrixFacts, MatrixFragment
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import proof
from zinc_attn.tools.proof import ProofSpec

SHAPE = AttnShape(16, 2, 256)
FAKE_COMMAND = """
import json, os, signal, subprocess, sys, time
print("/home/lovelace/driver.so of lovelace on engine: hf_abcdef is bad", file=sys.stderr)
if sys.argv[1] == "sweep":
    raise RuntimeError("in /home/lovelace/code")
if sys.argv[1] == "bench":
    print('{"shape": "16/2', end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if "--graph" in sys.argv:
    print("child", open(os.environ["CHILD"], "w").write(str(subprocess.Popen(["sleep", "60"]).pid)), flush=True)
elif "--arithmetic" in sys.argv:
    sys.exit(print(json.dumps({"run": "d1"})))
print(json.dumps({"case": "9/3/64 f32 65", "status": "FAIL", "faults": [
    {"variation": "split 8", "text": "out[0]: got 1, expected 2"}]}), flush=True)
time.sleep(60)
"""
FAKE_MODEL = """
import json, os, sys
name, layers, quick = sys.argv[1:]
print(json.dumps({"case": name, "status": "FAIL", "faults": [{"variation": "one split", "text": "logits: got d2"}]}))
for back_end, speed in ("zinc_attn", 10.0), ("ggml-vulkan", 15.0), ("zinc_attn", 30.0):
    print(json.dumps({"model": name, "test": "pp512", "back_end": back_end, "tokens_s": speed}))
device = [os.environ[name] for name in ("ZINC_ATTN_DEVICE", "GGML_VK_VISIBLE_DEVICES")]
print(json.dumps({"model": name, "left_out": f"not on {device}"}))
sys.exit(1)
"""


@pytest.fixture
def kit(tmp_path):
    (tmp_path / "llama_kit.py").write_text(FAKE_MODEL)
    (tmp_path / "expected.json").write_text('{"small 1": {}, "small 4": {}, "large 2": {}}')
    return tmp_path / "expected.json"


def test_the_steps(kit, monkeypatch, tmp_path):
    def lines(info, **options):
        steps = ProofSpec(info, "kompute", [SHAPE], [64, 8192], **options).steps()
        return [" ".join((step.tool, *step.words)).replace(" --json", "") for step in steps]

    def checks(on, first="check"):
        more = (f"check --quick --arithmetic {name} {on}" for name in ("fused", "integer"))
        return [f"{first} {on}", *more, f"check --graph {on.replace('kompute', 'vulkan')}"]

    timed, on = "--shape 16/2/256 --contexts 64,8192", "--device 1 --runtime kompute"
    assert lines(GPU) == [*checks(on), f"bench {timed} {on}", f"sweep {timed} {on}"]  # check's whole matrix
    assert lines(CPU)[:4] == checks("--device 0 --runtime kompute", "check --quick")
    assert lines(GPU, budget_s=60)[:4] == checks(on, "check --quick")
    timed += " --repeats 5 --no-picture"
    wanted = [*checks(on, "check --quick"), "llama small 1 quick", f"bench {timed} {on}", f"sweep {timed} {on}"]
    assert lines(GPU, quick=True, kit=kit, pictures=False) == wanted
    assert lines(GPU, kit=kit)[4:6] == ["llama small 4", "llama large 2"]
    fragment = MatrixFragment(16, 16, 16)
    monkeypatch.setattr(proof, "SPIRV", tmp_path)
    assert not any("matrix" in line for line in lines(replace(GPU, matrix=MatrixFacts(fragment, 65536, 1024))))
    (tmp_path / MATRIX.file).touch()  # a package that was built with units
    units = lines(replace(GPU, matrix=MatrixFacts(fragment, 65536, 1024), integer_dots=False), kit=kit)
    assert units[3:5] == [f"check --quick --arithmetic matrix {on}", f"bench --shape 16/2/256 --contexts 64,8192 {on}"]


def test_a_wrong_dispatcher_is_refused():
    """As $ZINC_ATTN_RUNTIME may name one."""
    with pytest.raises(ArgumentError, match=r"^runtime: got 'cuda', expected one of kompute, vulkan, cpu$"):
        ProofSpec(GPU, "cuda", [SHAPE], [64])


def test_failed_steps_are_in_a_report_that_names_nobody(tmp_path, monkeypatch, kit):
    """Checks that hang, a sweep that raises and a bench that crashes: all run, and all are reported."""
    (tmp_path / "fake_command.py").write_text(FAKE_COMMAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, value in {"HOME": "/home/lovelace", "USER": "lovelace", "HF_TOKEN": "hf_abcdef"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "engine")
    monkeypatch.setattr("platform.node", lambda: "engine")
    monkeypatch.setattr("platform.release", lambda: "6.12.3-of-lovelace")
    monkeypatch.setattr(proof, "COMMAND", "fake_command")
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    spec = ProofSpec(GPU, "vulkan", [SHAPE], [1024], restarts=1, timeout_s=2.0, kit=kit, quick=True)
    folder, ended = tmp_path / "made", list[str]()
    report = proof.prove(spec, folder, lambda step: ended.append(proof.outcome(step)))
    assert all(ended.pop(i).startswith("STOPPED after 2") for i in (3, 0))
    assert ended == ["ok", "ok", "WRONG output", "ENDED by signal 9", "WRONG output"]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"  # it ended with the check that started it
    text, data = (folder / "report.md").read_text(), (folder / "report.json").read_text()
    assert json.loads(data) == report | {"passed": False} and "Linux 6.12.3 |" in text
    assert "**NOT passed**: 7 of 7 steps ran, 5 of them are not ok" in text
    assert "| small | one split | logits: got d2 |" in text
    assert "| model | test | zinc_attn | ggml-vulkan |\n|---|---|---|---|\n| small | pp512 | 20 | 15 |" in text
    assert f"- small: not on {[GPU.name, '1']}" in text
    assert "| 9/3/64 f32 65 | split 8 | out[0]: got 1" in text
    for word in ("/home", "lovelace", "engine", "hf_abcdef", GPU.uuid, str(tmp_path)):
        assert word not in text + data, word


def test_no_step_begins_after_the_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "run_group", lambda *arguments: time.sleep(0.2) or limits.append(arguments[-1]) or 0)
    limits, spec = [], ProofSpec(GPU, "vulkan", [SHAPE], [1024], restarts=1, timeout_s=60, budget_s=0.1)
    assert not proof.passed(proof.prove(spec, tmp_path)) and [0 < limit <= 0.1 for limit in limits] == [True]
    text = (tmp_path / "report.md").read_text()
    assert text.count("NOT RUN: the time was up") == 5 and "1 of 6 steps ran, 0 of them are not ok" in text


def step(tool, *rows, exit_status=0):
    about = {"tool": tool, "shape": None if tool == "check" else "16/2/256", "command": tool}
    return {**about, "exit_status": exit_status, "seconds": 1.0, "rows": list(rows)}


def test_an_interrupt_leaves_a_report(tmp_path, monkeypatch):
    def interrupted(step_, *_):
        if step_.tool == "bench":
            raise KeyboardInterrupt
        return step("check")

    monkeypatch.setattr(proof, "run_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proof.prove(ProofSpec(GPU, "vulkan", [SHAPE], [1024]), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (len(report["steps"]), report["planned"], report["passed"]) == (4, 18, False)


@pytest.mark.parametrize(
    ("digest", "status"),
    [("d1", 0), ("d2", 0), (None, 0), ("d1", 1)],
    ids=["one digest", "another digest", "no digest", "a failed step"],
)
def test_which_restarts_pass(tmp_path, monkeypatch, digest, status):
    """The second of two, whose check ends with a digest and whose sweep with a status."""
    cases = {"case": "9/3/64 f32 65", "status": "pass", "faults": []}
    left = [step("check", cases, {"run": "d1"}), step("sweep"), step("bench")]
    left += [step("check", cases, *[{"run": digest}] * bool(digest)), step("sweep", exit_status=status), step("bench")]
    monkeypatch.setattr(ProofSpec, "steps", lambda _: [proof.Step("check", (), ())] * 3)
    monkeypatch.setattr(proof, "run_step", lambda *_: left.pop(0))
    report = proof.prove(ProofSpec(GPU, "vulkan", [SHAPE], [8192], restarts=2), tmp_path)
    passed = "**passed**: 6 of 6" in (tmp_path / "report.md").read_text()
    assert proof.passed(report) == passed == (digest == "d1" and not status)
