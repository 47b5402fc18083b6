"""The command line and the sweep's pure parts: no Vulkan device needed."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import records, refusal, run
from support import GPU

from zinc_attn.cache.rows import stored_values
from zinc_attn.cli import app as cli
from zinc_attn.cli import arguments, plan, terminal
from zinc_attn.cli import devices as devices_command
from zinc_attn.cli import llama as llama_command
from zinc_attn.errors import NoVulkanError
from zinc_attn.planning.splits import plan_splits
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.harness.inputs import NUMPY_DTYPES, Inputs
from zinc_attn.tools.harness.split_spec import SplitSpec
from zinc_attn.tools.measure import CallSpec, Row
from zinc_attn.tools.measure.rows import FIGURES

SHAPE = AttnShape(4, 2, 64)
SPEC = CallSpec(SHAPE, 10, [1024])
ROW = Row(SPEC, GPU, "vulkan", 1024, "auto", SplitSpec("auto").plan(1024, SHAPE, 64))


@pytest.mark.parametrize(("dtype", "array"), [("f16", "f16"), ("f32", "f32"), ("bf16", "f32"), ("q8_0", "f16")])
def test_normal_inputs(dtype, array):
    """Fewer tokens are a prefix of more; K, V and every sequence have values of their own, which a cache takes."""
    long, short = Inputs.normal(SHAPE, 40000, dtype), Inputs.normal(SHAPE, 100, dtype)
    stored_values("k", short.k, dtype)
    assert long.k.dtype == NUMPY_DTYPES[array]
    assert np.array_equal(long.k[:100], short.k) and np.array_equal(long.v[:100], short.v)
    assert not np.array_equal(short.k, short.v)
    assert not np.array_equal(short.k, Inputs.normal(SHAPE, 100, dtype, sequence=1).k)


def test_figures():
    """Of a call of 3 sequences with 2 rows each; and which figures a measure has."""
    row = replace(ROW, spec=replace(SPEC, dtype="q8_0", batch=3, q_len=2), seconds=(8e-5, 9e-5, 1e-4, 1.2e-4, 3e-4))
    assert (row.figures["median_us"], row.figures["iqr_us"]) == pytest.approx((100, 30))
    per_token = 2 * 2 * (64 + 2 * 2)  # K and V, KV heads, int8 values and two float16 scales
    assert row.figures["kv_gb_s"] == pytest.approx(3 * 1024 * per_token / 1e-4 / 1e9)
    assert (row.figures["attention_ms_per_step"], row.figures["tokens_s"]) == pytest.approx((1, 6000))
    assert set(ROW.figures) == set(FIGURES) and set(ROW.figures.values()) == {None}
    has = {"call": (1, 1), "device": (1, 0), "pass 1": (1, 0), "gap": (0, 0), "pass 2": (0, 0), "step": (1, 1)}
    rows = {measure: replace(row, verified="bits", measure=measure).figures for measure in has}
    assert {name: (row["kv_gb_s"] is not None, row["tokens_s"] is not None) for name, row in rows.items()} == has


def test_progress_without_a_terminal(monkeypatch, capsys):
    """A line where the same step goes on, once; nothing of steps that end before."""
    said = []

    def until(count):
        end = time.monotonic() + 60
        while len(said) < count and time.monotonic() < end:
            said.extend(capsys.readouterr().err.splitlines())
            time.sleep(0.001)

    with terminal.progress_bar():
        pass
    monkeypatch.setattr(terminal, "QUIET_S", 0.002)
    with terminal.progress_bar() as tell:
        until(1)
        tell("timing", 3, 9)
        until(2)
        time.sleep(0.02)
    assert said == ["starting …", "timing (3 of 9)"] and capsys.readouterr().err == ""


def patch_list_devices(monkeypatch, replacement):
    """Every module of the command line that lists devices calls ``replacement``."""
    for module in (devices_command, plan):
        monkeypatch.setattr(module, "list_devices", replacement)


@pytest.fixture
def devices(monkeypatch):
    """Two devices that do not exist."""
    cpu = replace(GPU, index=0, name="llvmpipe (LLVM [15])", kind="cpu", vendor="Mesa", compute_units=2)
    result = [cpu, GPU]
    patch_list_devices(monkeypatch, lambda: result)
    monkeypatch.delenv("ZINC_ATTN_DEVICE", raising=False)
    return result


def test_devices(devices, capsys):
    assert run("devices") == 0
    text = capsys.readouterr().out
    for piece in ("llvmpipe (LLVM [15])", "1*", "64 (VK_AMD_shader_core_properties2)", "32 GiB", "radv Mesa 25.2.0"):
        assert piece in text
    assert "canonical 30%, fused 19% (16/2/256, f16, modeled)" in text and text.count("issue/memory") == 1
    assert [(d["index"], d["kind"]) for d in records(capsys, "devices --json")] == [(0, "cpu"), (1, "discrete")]
    for info in devices:
        terminal.note_cpu(info)
    assert capsys.readouterr() == ("", "not a GPU: running on the CPU through llvmpipe (LLVM [15])\n")


def test_plan_is_pure(monkeypatch, capsys):
    patch_list_devices(monkeypatch, lambda: pytest.fail("plan asked for devices"))
    rows = records(capsys, "plan --json --model qwen3.6-35b-a3b --contexts 1k,128k --splits auto,1")
    assert [(r["context"], r["layout"]) for r in rows] == [(1024, "auto"), (1024, "1"), (131072, "auto"), (131072, "1")]
    want = plan_splits(131072, AttnShape(16, 2, 256), 64)
    assert rows[2]["fingerprint"] == want.fingerprint()
    assert (rows[2]["splits"], rows[2]["workgroups"]) == (want.num_splits, want.workgroups)
    assert rows[2]["workgroups_per_cu"] == want.workgroups / 64
    assert run("plan --shape 4/2/64 --context 1k --cu 8 --dtype q8_0/q4_0") == 0  # the begin of an option will do
    assert capsys.readouterr().out.startswith("shape 4/2/64, q8_0/q4_0, 8 compute units (discrete)\n")


def test_plan_for_a_device(devices, capsys):
    assert run("plan --shape 16/2/256 --contexts 8k --device R9700 --dtype q8_0") == 0
    assert "issue against memory, many keys: canonical 62%, fused 42%, integer 51%" in capsys.readouterr().out
    (row,) = records(capsys, "plan --json --shape 4/2/64 --contexts 8k --device llvm")
    assert row["issue_shares"] is None
    assert row["compute_units"] == 2 and row["fingerprint"] == plan_splits(8192, SHAPE, 1 << 24).fingerprint()


def failing(error):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (NoVulkanError("no driver"), 2, "zinc-attn: error: no driver\n"),
        (MemoryError(), 2, "zinc-attn: error: this machine has no memory for it: MemoryError\n"),
        (KeyboardInterrupt(), 130, "zinc-attn: interrupted\n"),
        (ZeroDivisionError(), 70, "ZeroDivisionError\nzinc-attn: this is a fault of zinc-attn; please report it\n"),
    ],
    ids=repr,
)
def test_how_a_command_ends(error, status, said, monkeypatch, capsys):
    patch_list_devices(monkeypatch, failing(error))
    assert run("devices") == status
    out, err = capsys.readouterr()
    assert not out and (err.endswith(said) if status == 70 else err == said)


def test_a_program_of_llama_cpp_takes_the_place_of_the_command(monkeypatch, capsys, tmp_path):
    """With the back end and the device, but for what the environment says otherwise."""
    program = tmp_path / "llama-server"
    program.touch(mode=0o755)
    monkeypatch.setattr(llama_command, "LIBRARIES", tmp_path)
    assert refusal(capsys, f"llama {program} -m a.gguf").startswith("this installation has no libggml-zinc.so; install")
    (tmp_path / "libggml-zinc.so").touch()
    assert refusal(capsys, "llama no-such").startswith("PROGRAM: got no-such, expected one on PATH, or a path")
    assert refusal(capsys, "llama").startswith("llama: got no PROGRAM, expected one of llama.cpp's")
    assert f"PROGRAM: {program}: Exec format error; expected a program" in refusal(capsys, f"llama {program}")
    started = []
    monkeypatch.setattr(os, "execve", lambda *command: started.append(command))
    monkeypatch.setenv("GGML_BACKEND_PATH", "another.so")
    monkeypatch.setenv("LLAMA_ARG_DEVICE", "ZINC_CPU")
    for name in ("LLAMA_ARG_N_GPU_LAYERS", "LLAMA_ARG_FLASH_ATTN"):
        monkeypatch.delenv(name, raising=False)
    run(f"llama {program} -m a.gguf --help")
    ((path, words, environment),) = started
    assert (path, words) == (str(program), [str(program), "-m", "a.gguf", "--help"])
    wanted = {"GGML_BACKEND_PATH": str(tmp_path / "libggml-zinc.so"), "LLAMA_ARG_DEVICE": "ZINC_CPU"}
    assert environment.items() >= {**wanted, "LLAMA_ARG_N_GPU_LAYERS": "99", "LLAMA_ARG_FLASH_ATTN": "on"}.items()


def test_missing_packages(devices, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else "here")
    assert refusal(capsys, "sweep --shape 4/2/64") == "this command needs matplotlib: pip install 'zinc-attn[cli]'"


COMMANDS = [command.__name__.rpartition(".")[2] for command in cli.COMMANDS]
ENTRY = Path(cli.__file__).parents[2] / "zinc_attn_cli.py"
PLAN = "plan --shape 4/2/64 --contexts 1k"
FULL = "error: stdout cannot be written: No space left on device; the results are incomplete"
STREAMS = [  # arguments, what stdout and stderr are, the status, and a piece of what stands on stderr
    (PLAN, "full", "", 74, FULL),
    (f"{PLAN} --json", "full", "", 74, FULL),
    (PLAN, "closed", "", 0, ""),
    (PLAN, "unread", "", 141, ""),
    (PLAN, "full", "full", 74, ""),
    (f"{PLAN} --json", "", "closed", 0, ""),
    ("plan", "", "closed", 2, ""),
    ("plan", "", "full", 2, ""),
    ("plan", "", "unread", 2, ""),
    ("export made", "closed", "", 0, "written: made/manifest.json"),
    ("export made --json", "full", "", 74, FULL),
    ("bench --model none", "full", "", 2, "none"),
]
TO = {"": "", "full": ">/dev/full", "closed": ">&-", "unread": "> >(:)"}  # bash's redirections


@pytest.mark.parametrize(
    ("unbuffered", "line", "out", "err", "status", "text"),
    [*(("", *row) for row in STREAMS), *(("1", *row) for row in STREAMS[:6])],
)
def test_broken_streams(tmp_path, unbuffered, line, out, err, status, text):
    command = f"{sys.executable} {ENTRY} {line} 1{TO[out] or '>/dev/null'} 2{TO[err] or '>said'}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=False)
    said = "" if err else (tmp_path / "said").read_text()
    assert ran.returncode == status, said
    assert (text in said if text else not said) and "Traceback" not in said, said


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_the_characters(encoding):
    argv = [sys.executable, ENTRY, *PLAN.split(), "--card", "r9700"]
    process = subprocess.run(argv, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True)
    assert (process.returncode, process.stderr) == (0, b"")
    assert ("µs" if encoding == "latin-1" else "?s").encode(encoding) in process.stdout


def test_json_keeps_what_a_terminal_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1", errors="replace"))
    terminal.print_json([{"name": "μ–"}])
    assert json.loads(raw.getvalue()) == {"name": "μ–"}


def test_an_interrupted_import(tmp_path):
    (tmp_path / "zinc_attn").mkdir()
    (tmp_path / "zinc_attn" / "__init__.py").write_text("raise KeyboardInterrupt")
    (tmp_path / ENTRY.name).write_bytes(ENTRY.read_bytes())
    process = subprocess.run([sys.executable, tmp_path / ENTRY.name, "devices"], capture_output=True)
    assert (process.returncode, process.stderr) == (130, b"zinc-attn: interrupted\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_help_has_an_example_and_the_statuses_once(command, capsys):
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    assert not command or f"example:\n  zinc-attn {command}" in shown
    statuses = "".join(f"  {status:<5}{text}\n" for status, text in arguments.STATUSES.items())
    assert shown.endswith(f"\n\nexit status:\n{statuses}") and shown.count("exit status") == 1
    assert max(map(len, shown.splitlines())) <= 110
