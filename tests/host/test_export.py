"""The manifest: its words are explained, its formulas give the words of a call, and its files are whole or refused."""

import json
import os
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from commands import run
from support import GPU

from zinc_attn.cache.layer_storage import HeadSlice, LayerStorage
from zinc_attn.cache.mover import PageGeometry
from zinc_attn.decode.scoring import Scoring
from zinc_attn.decode.workspace import PagedStorage, Tensors, Workspace
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas
from zinc_attn.planning.call import SubmissionPlanner
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request, SplitLayout
from zinc_attn.planning.splits import SplitPlan, plan_splits
from zinc_attn.planning.submission import RowSlice
from zinc_attn.runtime.device import Device
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import export
from zinc_attn.tools.export import ManifestError, describe, evaluate, evaluate_all, load_manifest
from zinc_attn.tools.export.files import sealed

SHAPE = AttnShape(9, 3, 64)


@pytest.mark.parametrize("context,q_len", ((0, 1), (1, 1), (64, 3), (65, 1), (1000, 5), (70000, 1)))
@pytest.mark.parametrize("layout", ({}, {"num_splits": 1}, {"num_splits": 7}))
@pytest.mark.parametrize("window,sinks", ((0, False), (1, True), (130, False), (5000, True)))
def test_work_words_follow_from_the_formulas(context, q_len, layout, window, sinks):
    """Items, row records, header and grids, against what a recorded call writes and dispatches."""
    shape, masks = SHAPE, {"q_len": q_len, "window": window or None}
    plan = SplitPlan.fixed(context, shape, **masks, **layout) if layout else plan_splits(context, shape, **masks)
    scoring = Scoring(0.125, window or None, None, np.ones(shape.q_heads, np.float32) if sinks else None)
    written, steps = recorded(plan, scoring)
    names = {**asdict(shape), "latent": 0, **describe.storage_names("f16"), "page_size": 64, "nhd": 0}
    names |= {**evaluate_all(formulas("sizes"), names), "kind": "gpu"}
    names |= {"context_len": context, "q_len": q_len, "window": window}
    names |= {"rows": q_len, "splits": plan.num_splits, "appends": 0, "table_words": 1, "layer": 0, "pages": 1}
    names |= evaluate_all(formulas("quantities"), names)
    names |= {"mask_words": 0}
    rule = evaluate_all(formulas("split_rule"), {**names, "compute_units": 64})
    assert layout or rule["splits"] == plan.num_splits
    assert plan.states == 1 or evaluate(formulas("buffers")["states"][0], names) == plan.scratch_bytes
    single_pass = names["single_pass"]
    items, records = {}, []
    for row in range(q_len):
        limit = max(context - q_len + 1 + row, 0)
        seen = {"row": row, "limit": limit, "first": max(limit - window, 0) if window else 0}
        seen["row_nodes"] = max(-(-limit // 512), single_pass)
        for split in range(plan.num_splits):
            known = {**names, **seen, "split": split, "page_table": written["table"]}
            known["node_begin"] = evaluate(formulas("work.item")["node_begin"][0], known)
            item = [evaluate(formulas("work.item")[word][0], known) for word in kernels.ITEM]
            if known["node_begin"] < item[list(kernels.ITEM).index("node_end")]:
                items[split, row] = item
        record = [evaluate(formulas("work.row")[word][0], {**names, **seen}) for word in kernels.ROW]
        records.append([value % 2**32 for value in record])  # the position is an int32
    names |= {"items": len(items), "vectors": names["heads_per_workgroup"]}
    assert written["items"] == [items[key] for key in sorted(items)], "rows of a split are neighbors"
    assert written["rows"] == records
    assert 4 * written["words"] == evaluate(formulas("buffers")["work"][0], names)
    floats = {"score_scale", "softcap", "softcap_inverse"}
    cache = {"page_shift", "page_tiles"}  # of the one page that holds everything
    for word in set(kernels.HEADER) - floats - cache:
        assert written["header"][word] == evaluate(formulas("work.header")[word][0], names), word
    grids = {d.kernel.decl.name: d.groups for d in steps}
    for kernel in kernels.KERNELS:
        told = tuple(evaluate(count, names) for count in kernel.grid if kernel.name in grids)
        assert grids.get(kernel.name, ()) == told
    assert ("attend" in grids, "merge" in grids) == (bool(items), plan.states != 1)


def recorded(plan, scoring):
    """The words of a call's work buffer and its dispatches, on a runtime that computes nothing; no size is rounded."""
    shape, layout = plan.shape, SplitLayout.of(plan)
    request = Request(plan.q_len, plan.context_len, 0, np.zeros(1, np.uint32))
    options = CallOptions(lambda *_: layout, scoring.window, cascade=False)
    planner = SubmissionPlanner([request], [layout], options, CallFacts(GPU, shape, 64))
    submission = planner.plan((RowSlice(0, 0, plan.q_len),), ())
    sizes = {"items": len(submission.items), "rows": plan.q_len, "tables": 1, "states": plan.states * plan.q_len}
    runtime = SimpleNamespace(
        buffer=lambda nbytes, use: SimpleNamespace(nbytes=nbytes, use=use),
        write=lambda buffer, words: None,
        kernel=lambda decl, spirv, spec: SimpleNamespace(decl=decl, spec=spec),
        info=GPU,
    )
    storage = LayerStorage(0, 0, (HeadSlice(0, shape.kv_heads, None, None),))
    pages, key = PagedStorage(Device(runtime), PageGeometry(shape, "f16", 64, 1), [storage]), submission.key
    key = key._replace(**sizes)
    tensors = Tensors.of(key, pages, lambda name, words, use: runtime.buffer(4 * words, use))
    workspace = Workspace.make(key, pages, scoring, tensors)
    workspace.fill(submission, 0)
    with mock.patch("zinc_attn.runtime.device.check_primitives"):
        steps = workspace.dispatches(0)
    words = workspace.work.words.tolist()
    header = dict(zip(kernels.HEADER, words, strict=False))
    row_table, table = header["row_table"], header["append_table"]
    items = range(kernels.HEADER_WORDS, row_table, kernels.ITEM_WORDS)
    plans = {
        "words": len(words),
        "header": header,
        "items": [words[offset : offset + len(kernels.ITEM)] for offset in items],
        "rows": [words[offset : offset + kernels.ROW_WORDS] for offset in range(row_table, table, kernels.ROW_WORDS)],
        "table": table,
    }
    return plans, steps


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
