"""The files of an export: written in whole or not, read back, and refused where anything of them was changed."""

import json
import os

import pytest
from commands import run

from zinc_attn.errors import ArgumentError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import export
from zinc_attn.tools.export import ManifestError, load_manifest
from zinc_attn.tools.export.files import sealed

SHAPES = [AttnShape.parse(s) for s in ("16/2/256", "32/4/128")]


@pytest.fixture
def folder(tmp_path):
    """An export that a test may damage."""
    export.export(tmp_path / "out", SHAPES[:1], compute_units=64)
    return tmp_path / "out"


def test_export_and_load(folder, capsys):
    assert run("export", folder, "--shape '16/2/256, 9/3/64' --page-size 64 --json") == 0  # over the old one
    out, err = capsys.readouterr()
    data = load_manifest(folder)
    assert json.loads(out) == data == load_manifest(folder / "manifest.json")
    assert err.startswith(f"written: {folder / 'manifest.json'} and 7 SPIR-V modules (")
    assert [(entry["shape"], entry["page_size"]) for entry in data["shapes"]] == [("16/2/256", 64), ("9/3/64", 64)]
    assert {*os.listdir(folder)} == {"manifest.json", *(decl.file for decl in kernels.KERNELS)}


def test_a_failed_write_leaves_the_old_files(folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def replace(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ArgumentError, match="No space left on device; choose another directory"):
        export.export(folder, [SHAPES[1]])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


REFUSED = "got format '{}', version {}, expected 'zinc_attn export', 10; export again with the zinc-attn that reads it"


def changed(**change):
    """A function that makes a manifest of another one, with a checksum that fits."""
    return lambda data: sealed(json.dumps({**json.loads(data), **change}).encode())


def test_no_changed_byte_of_a_manifest_is_accepted(folder, rng):
    path = folder / "manifest.json"
    text = path.read_bytes()
    for index in (*range(len("{ manifest_sha256") + 80), *rng.integers(0, len(text), 100)):
        path.write_bytes(text[:index] + bytes([text[index] ^ 1 << int(rng.integers(0, 8))]) + text[index + 1 :])
        with pytest.raises(ManifestError):
            load_manifest(folder)
    path.write_bytes(text + b" ")
    with pytest.raises(ManifestError, match="its manifest_sha256 is not that of its bytes; the file was changed"):
        load_manifest(folder)


@pytest.mark.parametrize(
    "name,damaged,message",
    (
        ("merge.spv", lambda data: data[:-1] + b"\1", r"merge.spv: got SHA-256 \w{64}, expected \w{64}; export again"),
        ("manifest.json", changed(version=2), REFUSED.format("zinc_attn export", 2)),
        ("manifest.json", changed(format="other"), REFUSED.format("other", 10)),
        ("manifest.json", changed(kernels=[{"file": "gone.spv"}]), r"gone\.spv: cannot be read: No such file"),
        ("manifest.json", lambda data: data[:1000], "not JSON: .*; make it with zinc-attn export DIR"),
        ("manifest.json", lambda data: b"[" * 100000, "not JSON"),
        ("manifest.json", lambda data: b"[]", r"got format \[\]"),
        ("manifest.json", lambda data: data.replace(b'"manifest_', b'"another_', 1), "it has no manifest_sha256 of 64"),
        ("manifest.json", None, "cannot be read: No such file or directory; expected a manifest; make it"),
    ),
)
def test_load_refuses_what_is_damaged(folder, name, damaged, message):
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if damaged:
        path.write_bytes(damaged(data))
    with pytest.raises(ManifestError, match=message):
        load_manifest(folder)
