"""Every path that a command takes, with everything that can lie there: a refusal in one line, at once."""

import argparse
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import refusal
from support import GPU

from zinc_attn import Device
from zinc_attn.cli import app as cli
from zinc_attn.cli import proof
from zinc_attn.files import MOST_BYTES
from zinc_attn.tools.check.record import RECORD

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


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    monkeypatch.setattr(proof, "find_device", lambda *_: GPU)
    for owner, name in ((Device, "open"), (proof.proof, "prove")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a device was opened before the path was seen"))


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
    variants: list[Callable[[Path], Path]] = [lambda path: path]
    if name.endswith("--model"):
        variants.append(lambda path: placed(folder / "config.json", path))
    for kind, path in places.items():
        for variant in variants:
            said = refused(READ[name], variant(path), capsys)
            if variant is variants[0]:
                assert SAID.get(kind, "") in said, (kind, said)


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
    """The limit on a file's size is met in the midst of one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        said = refused(WRITTEN["export directory"], tmp_path / "made", capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot be written: File too large; choose another" in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
