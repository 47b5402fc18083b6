"""Command lines that are refused in one line, at once and without a device: messages, and whatever lies at a path."""

import argparse
import os
import re
import resource
import signal
import struct
from pathlib import Path

import pytest
from commands import refusal, run
from support import GPU

from zinc_attn import Device
from zinc_attn.cli import app as cli
from zinc_attn.cli import proof
from zinc_attn.dtypes import EXPECTED
from zinc_attn.files import MOST_BYTES
from zinc_attn.tools.check.record import RECORD
from zinc_attn.tools.cost import CARDS
from zinc_attn.tools.graph import check as graph
from zinc_attn.tools.models import PRESETS

COUNT, KEYS = "expected an int of at least 1", "expected an int from 1 to 16777216"
SHAPES = (
    "expected q_heads/kv_heads/head_dim, for example 16/2/256, with V's size where it differs, 32/8/192/128, and the "
    "word latent where V is the begin of K, 20/1/576/512/latent"
)
SPLITS = "expected auto, a number of splits (8) or size:KEYS (size:2048)"
CONTEXTS = "expected numbers such as 1k,32k,5000 (k = 1024)"
ONE_TYPE = "dtype: got q8_0/f16 for the latent shape 2/1/80/64/latent, expected one type, since its V is part of its K"
CASES = (
    "expected SHAPE DTYPE KEYS, then words, each once, of fused, integer, matrix, rising, falling, jumping, "
    "cancelling, fading, coarse, sinks, alibi, mask=random, mask=tree, mask=blind, mask=f32, mask=f16, noncausal and "
    "rows=N, window=KEYS, softcap=X, scale=X (9/3/64 f16 8k rising window=128+sinks)"
)
HELD = (
    f"{RECORD}: got 16/2/256 f16 1000, 16/2/256 q8_0 577, 32/8/128 f16 129, …, expected some of this run's "
    "cases; choose the file's with --arithmetic, --cases, --graph, --quick, or give one that has this run's"
)
WRONG_WORDS = "x", "window", "window=1.5", "sinks=1", "none", "sinks+sinks", "window=1+window=2", "mask=x", "up"

ROWS = "a sweep.jsonl of the same shape, layers and call"
PLAN, SWEEP = "plan --shape 4/2/64", "sweep --shape 4/2/64"
REFUSED = {
    "plan": "model: got none, expected --model or --shape, for example --model qwen3.6-35b-a3b",
    "plan --shape 4x2": f"shape: got '4x2', {SHAPES}",
    "plan --shape 4/2/577": "AttnShape.head_dim: got 577, expected an int from 1 to 576",
    f"{PLAN} --cu 0": "cu: got 0, expected an int from 1 to 65536",
    f"{PLAN} --cu {'9' * 17}": f"cu: got {'9' * 17}, expected an int from 1 to 65536",
    **{f"{PLAN} --splits {x}": f"splits: got '{x}', {SPLITS}" for x in ("x", "0", "size:", "size:0", ":8", "size:1:8")},
    f"{PLAN} --splits auto,": f"splits: got '', {SPLITS}",
    f"{PLAN} --card gtx480": f"card: got 'gtx480', expected one of {', '.join(CARDS)}",
    f"{PLAN} --rows 0": "rows: got 0, expected an int from 1 to 16777216",
    f"{SWEEP} --layers 0": f"layers: got 0, {COUNT}",
    **{f"{SWEEP} --contexts {x}": f"contexts: got '{x}', {CONTEXTS}" for x in ("8q", "k", "1.5k")},
    f"{SWEEP} --contexts 1k,": f"contexts: got '', {CONTEXTS}",
    f"{SWEEP} --contexts=-1": f"contexts: got '-1', {CONTEXTS}",
    f"{SWEEP} --contexts 17m": f"contexts: got 17825792, {KEYS}",
    f"{SWEEP} --repeats 0": f"repeats: got 0, {COUNT}",
    f"{SWEEP} --batch 0": f"batch: got 0, {COUNT}",
    f"{SWEEP} --rows 0": f"q_len: got 0, {COUNT}",
    f"{SWEEP} --rows 65 --contexts 1k,64": "contexts: got 64, expected at least 65, the call's own rows",
    f"{SWEEP} --contexts 0": f"contexts: got 0, {KEYS}",
    f"{SWEEP} --contexts 1m --batch 17": f"batch * contexts: got 17825792, {KEYS}",
    f"{SWEEP} --page-size 24": "page_size: got 24, expected a power of two from 1 to 65536",
    **{
        f"{command} --shape 4/1/72/40/latent": "shape: got 4/1/72/40/latent, expected one whose V is stored; use "
        "4/1/72/40, or plan, check, compilers and export, which take it"
        for command in ("sweep", "bench", "decode", "proof")
    },
    "proof --restarts 0": "restarts: got 0, expected an int from 1 to 100",
    "proof --timeout nan": "timeout: got nan, expected seconds above 0",
    "proof --minutes 0": "minutes: got 0, expected minutes above 0",
    "bench --shape 4/2/64 --dtype f16,f8": f"dtype: got 'f8', expected {EXPECTED}",
    "decode --shape 4/2/64 --tokens 0": f"tokens: got 0, {KEYS}",
    "compilers --shape 20/1/512/576/latent": "v_head_dim: got 576, expected at most head_dim = 512, since a latent "
    "shape's V is the begin of its K",
    "compilers --dtype f16": "dtype: got --dtype without --shape, expected both, or neither",
    "check --quick --splits 0": f"splits: got '0', {SPLITS}",
    "check --cases '4/2/64 f16 9 matrix'": "cases: got '4/2/64 f16 9 matrix', expected cases of --arithmetic "
    "canonical, or the other one",
    "check --cases '4/2/64 f16 9 rows=10'": "rows: got 10, expected an int from 1 to 9",
    "check --cases '4/2/64 f8 9'": f"dtype: got 'f8', expected {EXPECTED}",
    **{
        f"check --against {RECORD} {option}": HELD
        for option in ("--cases '4/2/64 f16 9'", "--arithmetic matrix", "--graph")
    },
    "check --graph q4": f"graph: got 'q4', expected some of {', '.join((*graph.CASES, *graph.CHOSEN))}",
    **{
        f"check --graph {option}": "--graph: got --arithmetic or --splits with it, expected neither: they are "
        "attention's"
        for option in ("--arithmetic fused", "--splits 4")
    },
    **{
        f"check --cases '4/2/64 f16 8,{text}'": f"cases: got '{text}', {CASES}"
        for text in ("", "4/2/64 f16", *(f"4/2/64 f16 9 {word}" for word in WRONG_WORDS))
    },
    **{f"{SWEEP} --weights-ms {x}": f"weights_ms: got {x}, expected milliseconds of at least 0" for x in ("nan", -1)},
    f"{SWEEP} --card r9700 --batch 2": "card: got --batch above 1 or --arithmetic integer or matrix, which "
    "sweep does not model",
    f"{SWEEP} --beside {RECORD}": f"{RECORD}: cannot be read: it is not JSON: Expecting property name enclosed in "
    f"double quotes: line 1 column 2 (char 1); expected {ROWS}",
    f"{SWEEP} --beside none.jsonl": f"none.jsonl: cannot be read: No such file or directory; expected {ROWS}",
    "bench --against torch,jax": "against: got 'jax', expected some of torch, numpy",
    "bench --model none": f"model: got 'none', expected a path to a config.json or one of {', '.join(PRESETS)}",
    "export made --page-size 0": "page_size: got 0, expected an int from 1 to 65536",
    "export made --cu 0": f"compute_units: got 0, {COUNT}",
    "export made --shape 2/1/80/64/latent --dtype q8_0/f16": ONE_TYPE,
}
USAGE = {  # refused by the parser; the begin of what it says, which ends by naming the help
    "plan --nonsense": "unrecognized arguments: --nonsense; see 'zinc-attn plan --help'",
    "nonsense": "argument COMMAND: invalid choice: 'nonsense' (choose from ",
    "decode --tokens x": "argument --tokens: invalid int value: 'x'",
    "plan --dtype q8_0/f8": "argument --dtype: dtype: got 'q8_0/f8', expected one of f32, f16",
    "sweep --runtime cuda": "argument --runtime: invalid choice: 'cuda' (choose from ",
    "export": "the following arguments are required: DIR",
    "check --quick --cases x": "argument --cases: not allowed with argument --quick",
    **{
        f"{command} --arithmetic tensor": "argument --arithmetic: invalid choice: "
        "'tensor' (choose from canonical, fused, integer, matrix" + ", matrix-prefill" * (command != "check") + ")"
        for command in ("sweep", "bench", "check")
    },
}


@pytest.fixture(autouse=True)
def _no_device(monkeypatch, tmp_path):
    for owner, name in ((Device, "open"), (proof.proof, "prove")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a device was opened"))
    monkeypatch.setattr(proof, "find_device", lambda *_: GPU)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line, tmp_path, capsys):
    assert refusal(capsys, line) == REFUSED[line]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", USAGE)
def test_a_wrong_usage(line, capsys):
    said = re.sub("'(canonical|fused|integer|matrix|matrix-prefill)'", r"\1", refusal(capsys, line))
    program = f"zinc-attn {line.split()[0]}" if line != "nonsense" else "zinc-attn"
    assert said.startswith(USAGE[line]) and said.endswith(f"; see '{program} --help'")


# Every argument that takes a text is a path, and stands here with a command line around it, or is in NO_PATHS.
READ = {  # a file, or what else the path may be
    "plan --model": "plan --model {}",
    "sweep --model": "sweep --model {}",
    "sweep --beside": "sweep --shape 4/2/64 --beside {}",
    "bench --model": "bench --model {}",
    "check --against": "check --against {}",
    "decode --model": "decode --model {}",
    "proof --kit": "proof --kit {}",
}
WRITTEN = {  # a folder, or a file
    "sweep --out": "sweep --shape 4/2/64 --contexts 64 --out {}",
    "check --record": "check --quick --record {}",
    "bench --out": "bench --shape 4/2/64 --contexts 64 --out {}",
    "proof --out": "proof --out {}",
    "decode --out": "decode --shape 4/2/64 --tokens 1 --out {}",
    "export directory": "export {}",
}
FOLDERS = {"compilers --mesa": "compilers --shape 4/2/64 --mesa {}"}  # which are read
NO_PATHS = {
    *("others", "card", "cases", "contexts", "cu", "device", "dtype", "graph", "rows", "runtime", "shape", "splits"),
    *("target", "program", "arguments"),  # a program, too, may be a name
}
FILES = {name for name in (*READ, *WRITTEN) if name.split("--")[-1] == "record"}

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "an end of a line": b"\n",
    "no UTF-8": b'{"model_type": "\xff"}',
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "GGUF": b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64),
    "safetensors": struct.pack("<Q", 2) + b"{}",
    "a zip archive": b"PK\3\4 broken",
    "a NumPy array": b"\x93NUMPY\1\0" + bytes(64),
    "deep": b"[" * 100_000,
    "deep in an object": b'{"model_type": "llama", "text_config": ' + b'{"text_config": ' * 100_000,
    "deep and whole": b'{"text_config": ' * 500 + b"{}" + b"}" * 500,
    "truncated": RECORD.read_bytes()[:1000],
    "a list": b"[1]",
    "null": b"null",
    "a number of 5,000 digits": b'{"num_attention_heads": ' + b"9" * 5000 + b"}",
    "another object": b'{"format": 1, "records": 7, "cases": {}}',
    "another format": b'{"format": 0, "records": []}',
}
SAID = {  # of a file that is refused, whichever command reads it
    "FIFO": "it is a FIFO",
    "device": "it is a character device",
    "empty": "it is empty",
    "GGUF": "it is a GGUF file",
    "safetensors": "it is a safetensors file",
    "UTF-16": "it is text in UTF-16",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files, folders and others that can lie at a path that is read."""
    folder = tmp_path_factory.mktemp("places")
    paths = {name: folder / str(number) for number, name in enumerate(CONTENTS)}
    for name, path in paths.items():
        path.write_bytes(CONTENTS[name])
    with open(folder / "huge", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    os.mkfifo(folder / "fifo")
    (folder / "directory").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    paths |= {name: folder / name.lower() for name in ("FIFO", "huge", "directory", "loop", "missing")}
    paths |= {"device": Path("/dev/zero"), "below a file": folder / "huge" / "file", "long name": folder / ("n" * 300)}
    return paths | {"surrogate": folder / "a\ud800b", "NUL": folder / "a\0b"}


def refused(line, path, capsys):
    """The one line with which a command refuses a path. Where it waits for ever, the process is killed."""
    before, after = line.split("{}")
    signal.alarm(60)
    try:
        return refusal(capsys, before, path, after)
    finally:
        signal.alarm(0)


def arguments():
    """Every argument of every command that takes a text of the user's own, as the tables name it."""
    (commands,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        f"{command} {next(reversed(action.option_strings), action.dest)}"
        for command, parser in commands.choices.items()
        for action in parser._actions
        if parser.get_default("command") == command  # not another name of it
        and action.nargs != 0
        and action.choices is None
        and action.type not in (int, float)
        and action.dest not in NO_PATHS
    }


def test_every_path_is_in_a_table():
    assert arguments() == set(READ) | set(WRITTEN) | set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_no_folder(name, places, capsys):
    for kind, path in places.items():
        said = refused(FOLDERS[name], path, capsys)
        assert ("expected a folder" in said) == (kind != "directory"), (kind, said)


@pytest.mark.parametrize("name", READ)
def test_what_cannot_be_read(name, places, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    for kind, path in places.items():
        said = refused(READ[name], path, capsys)
        assert SAID.get(kind, "") in said, (kind, said)
        if name.endswith("--model"):
            refused(READ[name], placed(folder / "config.json", path), capsys)


def placed(link, path):
    """The folder of ``link``, behind which ``path`` is; a path without links is itself."""
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(path)
    except (OSError, ValueError):
        return path
    return link.parent


@pytest.mark.parametrize("name", WRITTEN)
def test_what_cannot_be_written(name, tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    paths = [tmp_path / "fifo", Path("/dev/full"), tmp_path / "file" / "below", Path("/proc/none/here")]
    paths += [tmp_path / ("n" * 300), tmp_path / "a\ud800b", tmp_path / "a\0b"]
    paths.append(tmp_path / ("folder" if name in FILES else "file"))
    if name in FILES:
        (tmp_path / "checkpoint").write_bytes(CONTENTS["GGUF"])
        paths.append(tmp_path / "checkpoint")
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    for path in paths:
        refused(WRITTEN[name], path, capsys)
    assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_full_disk(tmp_path, capsys):
    """The limit on a file's size is met in the midst of one; the files of an earlier export stay."""
    assert run("export", tmp_path / "made") == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        said = refused(WRITTEN["export directory"], tmp_path / "made", capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written: File too large; choose another" in said
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before
