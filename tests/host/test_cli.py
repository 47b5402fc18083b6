"""The command line and the sweep's pure parts: no Vulkan device needed."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import records, refusal, run
from support import GPU

from zinc_attn.cli import app as cli
from zinc_attn.cli import arguments, plan, terminal
from zinc_attn.cli import devices as devices_command
from zinc_attn.cli import llama as llama_command
from zinc_attn.errors import NoVulkanError
from zinc_attn.planning.splits import plan_splits
from zinc_attn.shapes import AttnShape

SHAPE = AttnShape(4, 2, 64)


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


def test_plan_for_a_device(devices, capsys):
    assert run("plan --shape 16/2/256 --contexts 8k --device R9700 --dtype q8_0") == 0
    assert "issue against memory, many keys: canonical 62%, fused 42%, integer 51%" in capsys.readouterr().out
    (row,) = records(capsys, "plan --json --shape 4/2/64 --contexts 8k --device llvm")
    assert row["issue_shares"] is None
    assert row["compute_units"] == 2 and row["fingerprint"] == plan_splits(8192, SHAPE, 1 << 24).fingerprint()


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
    def fail():
        raise error

    patch_list_devices(monkeypatch, fail)
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
    (f"{PLAN} --json", "", "closed", 0, ""),
    ("plan", "", "closed", 2, ""),
    ("plan", "", "full", 2, ""),
    ("plan", "", "unread", 2, ""),
    ("export made", "closed", "", 0, "written: made/manifest.json"),
    ("export made --json", "full", "", 74, FULL),
    ("plan --shape 4/2/64 --contexts 128k --splits many", "", "", 2, "splits: got 'many', expected auto"),
]
DRIVER = """
import json, os, sys
from zinc_attn.cli import app as cli

found = []
for line, *streams in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:  # ends as a process of its own does, with the interpreter's own flush of both streams
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for descriptor, name, kind in zip((1, 2), ("stdout", "stderr"), streams):
            if kind == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
            if kind == "unread":
                ends = os.pipe()
                os.dup2(ends[1], descriptor)
                os.close(ends[0])
            if kind == "closed":
                os.close(descriptor)
                setattr(sys, name, None)
        sys.exit(cli.main(line.split()))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found.append((status, open("said").read()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_broken_streams(tmp_path, unbuffered):
    argv = [sys.executable, "-c", DRIVER, json.dumps([row[:3] for row in STREAMS])]
    environment = os.environ | {"PYTHONPATH": str(ENTRY.parent), "PYTHONUNBUFFERED": unbuffered}
    ran = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, check=True)
    result = json.loads(ran.stdout)
    for (*case, status, text), (got, said) in zip(STREAMS, result, strict=True):
        assert (case, got) == (case, status), said
        assert (text in said if text else not said) and "Traceback" not in said, (case, said)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_the_characters(encoding):
    argv = [sys.executable, ENTRY, *PLAN.split(), "--card", "r9700"]
    process = subprocess.run(argv, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True)
    assert (process.returncode, process.stderr) == (0, b"")
    assert ("µs" if encoding == "latin-1" else "?s").encode(encoding) in process.stdout


def test_an_interrupted_import(tmp_path):
    (tmp_path / "zinc_attn").mkdir()
    (tmp_path / "zinc_attn" / "__init__.py").write_text("raise KeyboardInterrupt")
    (tmp_path / ENTRY.name).write_bytes(ENTRY.read_bytes())
    process = subprocess.run([sys.executable, tmp_path / ENTRY.name, "devices"], capture_output=True)
    assert (process.returncode, process.stderr) == (130, b"zinc-attn: interrupted\n")


def test_json_keeps_what_a_terminal_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1"))
    terminal.print_json([{"name": "μ–"}])
    sys.stdout.flush()
    assert json.loads(raw.getvalue()) == {"name": "μ–"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_help_has_an_example_and_the_statuses_once(command, capsys):
    assert run(command, "--help") == 0
    shown = capsys.readouterr().out
    assert not command or f"example:\n  zinc-attn {command}" in shown
    statuses = "".join(f"  {status:<5}{text}\n" for status, text in arguments.STATUSES.items())
    assert shown.endswith(f"\n\nexit status:\n{statuses}") and shown.count("exit status") == 1
    assert max(map(len, shown.splitlines())) <= 110
