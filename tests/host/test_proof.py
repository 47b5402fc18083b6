"""The proof kit without a device: sensors, what a report leaves out, failing steps, a report of canned rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import CPU, GPU

from zinc_attn.cli import app as cli
from zinc_attn.errors import ArgumentError
from zinc_attn.planning.splits import plan_splits
from zinc_attn.runtime.protocol import DeviceInfo
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import cost
from zinc_attn.tools.check.record import RECORD, load_record
from zinc_attn.tools.harness.split_spec import SplitSpec
from zinc_attn.tools.proof import ProofSpec, Scrubber, Sensors, Setting, Step, StepResult, kit, make_report, markdown
from zinc_attn.tools.proof import steps as proof_steps
from zinc_attn.tools.proof.sensors import Watch
from zinc_attn.tools.proof.steps import judge_step

PCI = "0000:03:00.0"
SHAPE = AttnShape(16, 2, 256)
NOTHING = Scrubber(environment={}, home=Path("/nowhere"), names={})


# --- sensors -----------------------------------------------------------------------------------------------


def write_files(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def fake_drm(folder: Path) -> Path:
    """An amdgpu card, a card that shows nothing but its clock, and a connector."""
    write_files(
        folder / "card0" / "device",
        uevent=f"DRIVER=amdgpu\nPCI_SLOT_NAME={PCI}\n",
        hwmon__hwmon3__temp1_input="51000\n",
        hwmon__hwmon3__temp1_label="edge\n",
        hwmon__hwmon3__temp2_input="not now\n",
        hwmon__hwmon3__freq1_input="2910000000\n",
        hwmon__hwmon3__freq1_label="sclk\n",
        pp_dpm_sclk="0: 500Mhz\n1: 2400Mhz *\n",
        gpu_busy_percent="97\n",
    )
    write_files(folder / "card1" / "device", hwmon__hwmon0__freq1_input="300000000\n")
    write_files(folder / "card0-DP-1", status="connected\n")
    return folder


def fake_smi(folder: Path, line: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!{sys.executable}\nprint({line!r})\n")
    path.chmod(0o755)
    return str(path)


def test_sensors_of_the_matched_card(tmp_path: Path) -> None:
    sensors = Sensors(PCI, fake_drm(tmp_path), nvidia_smi="")
    found = sensors.read()
    assert [(one.card, one.pci, one.name, one.value, one.unit) for one in found] == [
        ("card0", PCI, "temperature edge", 51.0, "°C"),
        ("card0", PCI, "clock sclk", 2910.0, "MHz"),
        ("card0", PCI, "busy", 97.0, "%"),
        ("card0", PCI, "clock pp_dpm_sclk", 2400.0, "MHz"),
    ]
    assert sensors.matched(found) and sensors.absent(found) == []


@pytest.mark.parametrize("pci", [None, "0000:99:00.0"])
def test_sensors_of_every_card(tmp_path: Path, pci: str | None) -> None:
    smi = fake_smi(tmp_path, "00000000:01:00.0, 45, 210, [N/A], 3")
    sensors = Sensors(pci, fake_drm(tmp_path / "drm"), nvidia_smi=smi)
    found = sensors.read()
    assert {one.card for one in found} == {"card0", "card1", "nvidia-smi 0"} and not sensors.matched(found)
    mine = [(one.pci, one.name, one.value) for one in found if one.card == "nvidia-smi 0"]
    assert mine == [("0000:01:00.0", "temperature", 45.0), ("0000:01:00.0", "clock sm", 210.0),
                    ("0000:01:00.0", "busy", 3.0)]  # fmt: skip


def test_absent_sensors(tmp_path: Path) -> None:
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\nexit 9\n")
    broken.chmod(0o755)
    for smi in ("", "/nowhere/nvidia-smi", str(broken)):
        sensors = Sensors(PCI, tmp_path / "none", nvidia_smi=smi)
        with Watch(sensors) as watch:
            pass
        assert sensors.read() == [] == watch.summary()
        assert sensors.absent([]) == ["temperature", "clock", "load"]


def test_watch(tmp_path: Path) -> None:
    class Rising(Sensors):
        value = 40.0

        def read(self) -> list[Any]:
            self.value += 1.0
            return [one._replace(value=self.value) for one in super().read()]

    write_files(tmp_path / "card0" / "device", hwmon__hwmon0__temp1_input="1\n")
    with Watch(Rising(None, tmp_path, nvidia_smi=""), every_s=0.001) as watch:
        while len(watch.during) < 3:
            pass
    (one,) = watch.summary()
    assert (one["card"], one["name"], one["unit"], one["before"]) == ("card0", "temperature temp1", "°C", 41.0)
    assert one["during_min"] == 42.0 <= one["during_median"] < one["during_max"] < one["after"]
    assert one["samples"] == len(watch.during)


# --- privacy -----------------------------------------------------------------------------------------------


def test_scrubber() -> None:
    environment = {"HOME": "/home/ada", "USER": "ada", "HF_TOKEN": "hf_abcdef", "SECRET_FLAG": "1", "PATH": "/usr/bin"}
    scrub = Scrubber(
        {Path("/home/ada/proof"): "."}, environment=environment, names={"ada": "[user]", "engine": "[host]"}
    )
    for text, wanted in (
        ("/home/ada/proof/restart-1/check", "./restart-1/check"),
        ('File "/home/ada/venv/x.py", line 1', 'File "[home]/venv/x.py", line 1'),
        ("/home/bob/mesa and /Users/eve/x", "[home]/mesa and [home]/x"),
        ("ada@engine: ada_backup, adage", "[user]@[host]: [user]_backup, adage"),
        ("token hf_abcdef, flag 1", "token [secret], flag 1"),
        ("AMD Radeon, /usr/bin/x", "AMD Radeon, /usr/bin/x"),
    ):
        assert scrub.text(text) == wanted
    assert scrub.value({"ada": ["ada", 1, None, {"x": "engine"}]}) == {"ada": ["[user]", 1, None, {"x": "[host]"}]}


def test_words_of_the_report_are_no_names() -> None:
    scrub = Scrubber(environment={"USER": "ok"}, home=Path("/home/ok"))
    assert scrub.value(["ok", {"status": "ok"}, "/home/ok/x"]) == ["ok", {"status": "ok"}, "[home]/x"]


# --- steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "exit_status", "rows", "status", "note"),
    [
        ("sweep", 0, [{"status": "ok"}], "ok", ""),
        ("sweep", 0, [{"status": "ok"}, {"status": "refused", "error": "no room"}], "refused",
         "1 of 2 rows were refused: no room"),
        ("sweep", 1, [{"status": "failed", "error": "out[0]"}], "failed", "wrong output in 1 of 1 rows: out[0]"),
        ("check", 2, [{"status": "refused", "refused": "no room"}], "refused", "1 of 1 rows were refused: no room"),
        ("check", 1, [{"status": "FAIL"}, {"made_by": {}}], "failed", "wrong output in 1 of 1 rows"),
        ("check", 2, [], "refused", "check ended with exit status 2"),
        ("bench", 0, [{"status": "ok"}, {"status": "refused", "layout": "baseline"}], "ok", ""),
        ("bench", 70, [{"status": "ok"}], "failed", "bench ended with exit status 70"),
        ("bench", -11, [{"status": "ok"}], "failed", "ended by signal 11"),
        ("bench", None, [{"status": "ok"}], "failed", "did not end within 9 s and was stopped"),
        ("bench", 0, [], "failed", "bench printed no rows"),
    ],
)  # fmt: skip
def test_judged_steps(
    command: str, exit_status: int | None, rows: Sequence[dict[str, Any]], status: str, note: str
) -> None:
    assert judge_step(command, exit_status, rows, 9.0) == (status, note)


def test_contexts_that_the_memory_holds() -> None:
    wide = AttnShape(32, 8, 128)
    assert ProofSpec(GPU, "vulkan", [wide]).contexts_of(wide) == [1024, 8192, 32768, 131072]
    tight = ProofSpec(GPU, "vulkan", [wide], free_bytes=300 << 20)  # 128 MiB at 32k
    assert tight.contexts_of(wide) == [1024, 8192, 32768]
    assert ProofSpec(replace(GPU, max_buffer_bytes=1 << 24), "vulkan", [wide]).contexts_of(wide) == [1024, 8192]
    assert ProofSpec(CPU, "vulkan", [wide]).contexts_of(wide) == [1024, 8192]
    assert ProofSpec(CPU, "vulkan", [wide], quick=True).contexts_of(wide) == [1024, 4096]
    assert ProofSpec(CPU, "vulkan", [wide], [1 << 20]).contexts_of(wide) == [1 << 20]  # as asked


def test_planned_steps() -> None:
    steps = ProofSpec(GPU, "kompute", [SHAPE], [64], restarts=2, quick=True).steps()
    names = ["check", "sweep-16-2-256", "bench-16-2-256"]
    assert [(step.restart, step.name) for step in steps] == [(n, name) for n in (1, 2) for name in names]
    assert " ".join(steps[2].words) == (
        "bench --shape 16/2/256 --contexts 64 --dtype f16 --device 1 --repeats 5 --json --runtime kompute"
    )
    assert ProofSpec(GPU, "vulkan", [SHAPE]).check == ()  # the whole matrix
    assert ProofSpec(CPU, "vulkan", [SHAPE]).check == ("--quick",)
    with pytest.raises(ArgumentError, match="restarts: got 0"):
        ProofSpec(GPU, "vulkan", [SHAPE], restarts=0)


FAKE_COMMAND = """
import json, os, signal, sys, time
print("/home/lovelace/driver.so of lovelace on engine: hf_abcdef is bad", file=sys.stderr)
if sys.argv[1] == "sweep":
    raise RuntimeError("in /home/lovelace/code")
if sys.argv[1] == "bench":
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({"case": "9/3/64 f32 65", "status": "FAIL", "faults": [
    {"variation": "split 8", "text": "out[0]: got 1, see /home/lovelace/x"}]}), flush=True)
time.sleep(60)
"""


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A user and a machine; the words that no report may have."""
    monkeypatch.setenv("HOME", "/home/lovelace")
    monkeypatch.setenv("USER", "lovelace")
    monkeypatch.setenv("LOGNAME", "lovelace")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setattr("socket.gethostname", lambda: "engine")
    return ["/home/lovelace", "lovelace", "engine", "hf_abcdef", GPU.uuid]


def test_failed_steps_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, somebody: list[str]) -> None:
    """A check that hangs, a sweep that raises and a bench that crashes: all run, all are reported, nobody is named."""
    (tmp_path / "fake_command.py").write_text(FAKE_COMMAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(proof_steps, "COMMAND", "fake_command")
    monkeypatch.setattr(kit, "pci_address", lambda index: PCI)
    folder = tmp_path / "made"
    spec = ProofSpec(GPU, "vulkan", [SHAPE], [1024], restarts=1, timeout_s=2.0)
    ended: list[str] = []
    report = kit.prove(spec, folder, sensors=Sensors(PCI, fake_drm(tmp_path / "drm"), ""),
                       on_end=lambda result: ended.append(result.status))  # fmt: skip
    assert not report["passed"] and ended == ["failed"] * 3
    check, sweep, bench = report["steps"]
    assert check["note"].startswith("did not end within 2 s and was stopped; [home]/driver.so of [user] on [host]")
    assert (sweep["exit_status"], bench["note"][:17]) == (1, "ended by signal 9")
    assert "RuntimeError: in [home]/code" in sweep["note"]
    assert report["bits"]["faults"][0]["text"] == "out[0]: got 1, see [home]/x"
    text, data = (folder / "report.md").read_text(), (folder / "report.json").read_text()
    assert json.loads(data) == report and "**NOT passed**: 3 of 3 steps ran, 3 of them failed" in text
    said = "".join(path.read_text() for path in folder.rglob("stderr.txt"))
    for word in somebody:
        for where in (text, data, said):
            assert word not in where, word
    with pytest.raises(ArgumentError, match="which is not empty, expected a new or an empty folder"):
        kit.prove(spec, folder)


def test_interrupt_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> StepResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(kit.Runner, "run", interrupted)
    monkeypatch.setattr(kit, "pci_address", lambda index: None)
    with pytest.raises(KeyboardInterrupt):
        kit.prove(ProofSpec(GPU, "vulkan", [SHAPE], [1024]), tmp_path / "made", sensors=Sensors(None, tmp_path, ""))
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert (report["ended"], report["passed"]) == ("interrupted in check of restart 1", False)


# --- the report --------------------------------------------------------------------------------------------

CASE = "9/3/64 f32 65"


def sweep_row(us: float | None, status: str = "ok") -> dict[str, Any]:
    plan = SplitSpec.parse("auto").plan(8192, SHAPE, GPU.layout_facts, "f16")
    row = {"device": GPU.name, "device_kind": GPU.kind, "driver": GPU.driver, "runtime": "vulkan",
           "compute_units": 64, "q_heads": 16, "kv_heads": 2, "head_dim": 256, "v_head_dim": 256, "dtype": "f16",
           "batch": 1, "q_len": 1, "ranks": 1, "context": 8192, "layout": "auto", "plan": plan.fingerprint(),
           "num_splits": plan.num_splits, "build": "node", "status": status, "verified": "bits" if us else None,
           "error": None if us else "no room", "repeats": 5, "iqr_us": 1.5}  # fmt: skip
    return row | {"median_us": us, "kv_gb_s": us and 16777216 / us / 1e3}


def bench_rows(scale: float) -> list[dict[str, Any]]:
    plan = SplitSpec.parse("auto").plan(8192, SHAPE, GPU.layout_facts, "f16")
    about = {"device": GPU.name, "device_kind": GPU.kind, "driver": GPU.driver, "runtime": "vulkan",
             "shape": "16/2/256", "dtype": "f16", "context": 8192, "layout": "auto", "plan": plan.fingerprint(),
             "status": "ok", "note": None, "kv_gb_s": None, "compute_units": 64}  # fmt: skip
    times = {"call": 60.0, "device": 40.0, "pass 1": 35.0, "gap": 3.0, "pass 2": 2.0}
    rows = [about | {"measure": name, "median_us": scale * us} for name, us in times.items()]
    read = about | {"measure": "device", "median_us": 27.0, "layout": "read", "plan": None, "kv_gb_s": 600.0}
    torch = about | {"measure": "call", "layout": "baseline", "status": "refused", "median_us": None}
    return [*rows, read, torch, about | {"context": 0, "measure": "call", "median_us": 5.0}]


def result(restart: int, words: str, rows: Sequence[dict[str, Any]], status: str = "ok") -> StepResult:
    step = Step(restart, words.split(maxsplit=1)[0], tuple(words.split()))
    sensor = {"card": "card0", "pci": PCI, "name": "temperature edge", "unit": "°C", "before": 40.0,
              "during_min": 50.0, "during_median": 55.0, "during_max": 60.0, "after": 58.0, "samples": 3}  # fmt: skip
    return StepResult(step, status, 0, 1.0, "", rows, [sensor])


def canned(info: DeviceInfo, tmp_path: Path, digest: str | None = None) -> dict[str, Any]:
    """A report of two restarts, in the second of which everything takes a tenth longer."""
    committed = next(digests[CASE] for digests in load_record(RECORD).values() if CASE in digests)
    results = []
    for restart, scale in ((1, 1.0), (2, 1.1)):
        found = digest if digest and restart == 2 else committed
        outcome = {"case": CASE, "status": "pass", "digest": found, "faults": []}
        results.append(result(restart, "check", [outcome, {"made_by": {}, "run": "", "cases": {CASE: found}}]))
        results.append(result(restart, "sweep", [sweep_row(50.0 * scale)]))
        results.append(result(restart, "bench", bench_rows(scale)))
    spec = ProofSpec(info, "vulkan", [SHAPE], [8192], restarts=2)
    sensors = Sensors(PCI, fake_drm(tmp_path / "drm"), "")
    return make_report(Setting(spec, PCI, sensors, sensors.read(), NOTHING), results, "finished")


def test_report_of_a_card(tmp_path: Path) -> None:
    report = canned(GPU, tmp_path)
    assert report["passed"] and report["bits"]["agree"] and report["bits"]["equals_committed"]
    assert "uuid" not in report["device"] and report["device"]["pci"] == PCI
    assert (report["card"]["title"], report["card"]["by"]) == ("Radeon AI PRO R9700", "the device's name")
    modeled = cost.predict(plan_splits(8192, SHAPE, 64), cost.find_card("r9700"))
    (sweep,), (bench,) = report["sweep"], report["bench"]
    assert [one["median_us"] for one in sweep["restarts"]] == pytest.approx([50.0, 55.0])
    assert (sweep["median_us"], sweep["spread"]) == pytest.approx((52.5, 1.1))
    assert sweep["same_plan"] and sweep["ratio"] == pytest.approx(52.5 / modeled.total_us, rel=1e-3)
    assert bench["ratio"] == pytest.approx(42.0 / modeled.total_us, rel=1e-3)
    assert bench["pass1_ratio"] == pytest.approx(36.75 / modeled.pass1_us, rel=1e-3)
    assert bench["merge_ratio"] == pytest.approx(5.25 / modeled.merge_us, rel=1e-3)
    assert (bench["gap_us"], bench["read_gb_s"], bench["clock"]) == (3.15, 600.0, "device")
    assert report["compiler"] == cost.prediction_compilers()
    text = markdown(report)
    for piece in ("**passed**: 6 of 6 steps", "64 (VK_AMD_shader_core_properties2)", "50 (1.5), 55 (1.5)",
                  "temperature edge °C | 40 | 50/55/60 | 58", "by its PCI address", "16/2/256 at 8,192"):  # fmt: skip
        assert piece in text, piece


def test_report_of_other_devices(tmp_path: Path) -> None:
    for name, kind, card in (("AMD Radeon Graphics", "discrete", "64 compute units like an R9700's"),
                             ("llvmpipe", "cpu", None)):  # fmt: skip
        report = canned(replace(GPU, name=name, kind=kind), tmp_path)
        assert (report["card"] and report["card"]["title"]) == card
        assert (report["sweep"][0]["ratio"] is None) == (card is None)
        assert markdown(report)


def test_report_of_bits_that_differ(tmp_path: Path) -> None:
    report = canned(GPU, tmp_path, digest="0" * 64)
    bits = report["bits"]
    assert (report["passed"], bits["agree"], bits["equals_committed"]) == (False, False, False)
    assert bits["committed"] == bits["restarts"][0]["digest"] != bits["restarts"][1]["digest"]


def test_report_of_a_refused_point(tmp_path: Path) -> None:
    spec = ProofSpec(GPU, "vulkan", [SHAPE], [8192], restarts=1)
    sensors = Sensors(None, tmp_path, "")
    steps = [result(1, "sweep", [sweep_row(None, "refused")], "refused")]
    report = make_report(Setting(spec, None, sensors, [], NOTHING), steps, "finished")
    assert not report["passed"] and report["sweep"][0]["status"] == "refused"
    text = markdown(report)
    assert "REFUSED: no room" in text and "absent: no temperature, clock or load of a card can be read" in text


# --- the command -------------------------------------------------------------------------------------------


def test_proof_says_what_a_report_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["proof", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "public bug report. It has no name of the user or the host, no path of a home folder" in said
