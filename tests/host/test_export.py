"""An export: its numbers and names, and its files, which are written in whole and refused where one was changed."""

import ast
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import run

from zinc_attn.cache.mover import PageGeometry
from zinc_attn.errors import ArgumentError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas, meanings
from zinc_attn.kernels.dispatches import AttendVariant, copy_call, merge_call, move_call
from zinc_attn.planning.splits import plan_splits
from zinc_attn.shapes import TILES, AttnShape, row_strides, strided_format
from zinc_attn.storage import STORAGE
from zinc_attn.tools import export
from zinc_attn.tools.export import ManifestError, describe, evaluate, evaluate_all, load_manifest
from zinc_attn.tools.export.files import sealed

SHAPES = [AttnShape.parse(s) for s in ("16/2/256", "32/4/128")]
OTHERS = "64/8/64 9/3/64 16/1/512 10/1/80 32/8/192/128 20/1/576/512/latent 17/1/72 6/3/65/33 3/1/513/513/latent"
NUMBERED = [*SHAPES, *map(AttnShape.parse, OTHERS.split())]


def test_places_are_those_of_the_declarations():
    """Of the fields of records, bindings and specialization constants, and the sizes of workgroups."""
    manifest = export.manifest()
    for name in describe.RECORDS:
        fields = [(field["name"], field["word"], field["byte"]) for field in manifest["work"][name]["fields"]]
        assert fields == [(field, i, 4 * i) for i, field in enumerate(getattr(kernels, name.upper()))]
    sizes = {kernels.ATTEND: "workgroup_size", kernels.MERGE: "merge_workgroup_size"}
    for kernel, decl in zip(manifest["kernels"], kernels.KERNELS, strict=True):
        bindings = [(entry["binding"], entry["name"], entry["access"]) for entry in kernel["bindings"]]
        assert bindings == [(i, binding.name, binding.access) for i, binding in enumerate(decl.bindings)]
        constants = [(entry["id"], entry["offset"], entry["name"]) for entry in kernel["specialization_constants"]]
        assert constants == [(i, 4 * i, name) for i, name in enumerate(decl.constant_names)]
        local_size = [sizes.get(decl, "32"), "1", "1"]
        assert (kernel["file"], kernel["entry_point"], kernel["local_size"]) == (decl.file, "main", local_size)


def test_no_formula_uses_a_name_that_is_not_explained():
    manifest = export.manifest()
    functions = {"min", "max", "ceil_div", "log2", "float32", "e"}
    fixed = {name for decl in kernels.KERNELS for name, _ in decl.fixed}  # the manifest has their values
    known = {*meanings("inputs"), *formulas("sizes"), *formulas("quantities"), *functions, *fixed}
    families = {decl.family for decl in kernels.KERNELS}
    sections = ["sizes", "quantities", "buffers", *(f"work.{record}" for record in describe.RECORDS)]
    sections += [f"{family}.constants" for family in families]
    texts = [formula for section in sections for formula, _ in formulas(section).values()]
    texts += [count for decl in kernels.KERNELS for count in decl.grid]
    texts += [step["when"] for step in manifest["dispatch"] if "when" in step]
    texts += [*meanings("cache.index").values(), *meanings("rows.index").values()]
    texts += [entry["expression"] for entry in manifest["split_rule"].values()]
    used = {n.id for text in texts for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)}
    beside = {"tile_number", "k_tile_at", "v_tile_at", "row_at"}  # their own formulas, as the rule's
    assert used - known - set(manifest["split_rule"]) == beside
    assert set(meanings("inputs")) <= used


@pytest.mark.parametrize("dtype", (*STORAGE, "q5_1/q4_0"))
@pytest.mark.parametrize(("page_size", "kv_layout"), ((1, "tiles"), (256, "tiles"), (1, "NHD"), (256, "NHD")))
def test_numbers_of_a_shape(dtype, page_size, kv_layout):
    """The manifest's are those of the package's own rows, states and dispatches."""
    for shape in NUMBERED:
        if "/" in dtype and shape.latent:
            continue
        numbers, strides = describe._shape(shape, dtype, page_size, 64, kv_layout), TILES
        token_bytes = shape.kv_bytes_per_token(dtype)
        if kv_layout == "NHD":
            strides = row_strides(shape, dtype)
            token_bytes = 4 * shape.kv_heads * strided_format(strides, shape.latent).words
        assert AttnShape(**{name: numbers[name] for name in asdict(shape)}) == shape
        assert numbers["kv_bytes_per_token"] == token_bytes
        assert numbers["state_bytes"] == 4 * shape.q_heads * (shape.v_dim + 2)
        names = {**asdict(shape), **numbers["sizes"], "kind": "gpu", "context_len": 100000, "q_len": 1, "rows": 1}
        names |= evaluate_all(formulas("quantities"), names | {"window": 0})
        names |= evaluate_all(formulas("split_rule"), names | {"compute_units": 64})
        plan = plan_splits(100000, shape)
        assert (names["splits"], numbers["most_splits"]) == (plan.num_splits, names["most_splits"])
        assert evaluate(formulas("buffers")["states"][0], names) == plan.scratch_bytes
        tile, page_tiles = (numbers["sizes"][name] for name in ("tile", "page_tiles"))
        copied = PageGeometry(shape, dtype, tile, page_tiles, strides).tile_words
        for kind, device in (("gpu", "discrete"), ("cpu", "cpu")):
            moved = move_call(kernels.APPEND_KERNEL, shape, dtype, tile, 1, shape.kv_heads, strides)
            calls = merge_call(shape, device, 1), moved, copy_call(copied, 1, 1)
            attend = AttendVariant(shape, dtype, device, tile, strides=strides).program()
            for decl, values in (attend, *((call.decl, call.spec) for call in calls)):
                result = numbers["kinds"][kind]["specialization"][decl.family]
                assert tuple(result[name] for name in decl.spec) == values


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, export.export(folder, SHAPES[:1], compute_units=64)


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of an export that a test may damage."""
    return Path(shutil.copytree(exported[0], tmp_path / "out"))


def test_export_and_load(folder, exported):
    assert load_manifest(folder) == load_manifest(folder / "manifest.json") == exported[1]
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
