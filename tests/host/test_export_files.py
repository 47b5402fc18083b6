"""The files of an export: written in whole or not, read back, and refused where anything of them was changed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import run

from zinc_attn.errors import ArgumentError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import export
from zinc_attn.tools.export import ManifestError, load_manifest
from zinc_attn.tools.export.files import sealed

SHAPES = [AttnShape.parse(s) for s in ("16/2/256", "32/4/128")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, export.export(folder, SHAPES[:1], compute_units=64)


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of an export that a test may damage."""
    return Path(shutil.copytree(exported[0], tmp_path / "out"))


def test_export_and_load(folder, exported):
    assert load_manifest(folder) == load_manifest(folder / "manifest.json")
    data = load_manifest(folder)
    assert data["kernels"] == exported[1]["kernels"]
    export.export(folder, [SHAPES[1]], dtype="q8_0", page_size=16)  # over the old one
    assert [s["dtype"] for s in load_manifest(folder)["shapes"]] == ["q8_0"]
    assert sorted(os.listdir(folder)) == sorted({"manifest.json", *(d.file for d in kernels.KERNELS)})


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
        *(
            ("manifest.json", changed(version=version), REFUSED.format("zinc_attn export", version))
            for version in (1, True)
        ),
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


def test_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    assert run("export", out, "--shape '16/2/256, 9/3/64' --page-size 64 --json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == load_manifest(out)
    assert captured.err.startswith(f"written: {out / 'manifest.json'} and 7 SPIR-V modules (")
    assert [(s["shape"], s["page_size"]) for s in load_manifest(out)["shapes"]] == [("16/2/256", 64), ("9/3/64", 64)]
