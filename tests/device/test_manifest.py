"""The exported manifest against the device: its index maps, and the dispatches of a call."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.decode.scoring import Scoring
from zinc_attn.decode.workspace import PagedStorage, SharedTensors, Tensors, Workspace
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.records import WorkBuffer
from zinc_attn.planning.submission import RecordingKey
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools import export
from zinc_attn.tools.export import describe, evaluate, evaluate_all
from zinc_attn.tools.export.formulas import formulas, meanings

PLACED = [  # shapes with every page size, K and V apart, sizes that the cache fills up, and latent ones
    *((text, page_size, dtype) for text, page_size in (("4/2/96/64", 256), ("4/2/72/33", 2)) for dtype in STORAGE),
    *(("2/2/576/512/latent", 64, dtype) for dtype in STORAGE),
    *(("4/2/192/128", page_size, "q5_1/q4_0") for page_size in (1, 64, 256)),
]


@pytest.mark.parametrize("device", ("vulkan",), indirect=True)
@pytest.mark.parametrize(("text", "page_size", "dtype"), PLACED)
def test_cache_index_maps(device, rng, text, page_size, dtype):
    """Where the append kernel puts each value, in the second of two layers, is where the manifest says."""
    shape, tokens = za.AttnShape.parse(text), 300
    heads, dims = shape.kv_heads, {"k": shape.head_dim, "v": shape.v_head_dim}
    pages = -(-tokens // page_size)
    names = {**asdict(shape), **describe.storage_names(dtype), "page_size": page_size, "pages": pages, "nhd": 0}
    names |= {"layers": 2, "layer": 1, "latent": int(shape.latent)}
    names |= evaluate_all(formulas("sizes"), names)
    k, v = (rng.standard_normal((tokens, heads, n)).astype(np.float16) for n in dims.values())
    if dtype == "bf16":
        k, v = ((x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in (k, v))
    v = k[..., : dims["v"]] if shape.latent else v
    words = rows.encode(k, v, shape, dtype).reshape(-1)
    table = rng.permutation(pages)
    work = WorkBuffer(0, 0, tokens, pages)
    work.set_shape(shape, heads)
    first_page = evaluate(formulas("work.header")["first_page"][0], names)
    work.set(page_shift=names["page_tiles"].bit_length() - 1, page_tiles=names["page_tiles"], first_page=first_page)
    work.appends["position"], work.appends["page_table"] = np.arange(tokens), work.tables_at
    work.tables[:] = table
    runtime = device.runtime
    inputs, uploaded = runtime.buffer(4 * work.words.size, Use.INPUT), runtime.buffer(4 * words.size, Use.INPUT)
    kept = {x: evaluate(formulas("buffers")[x][0], names) for x in "kv"}
    caches = {x: runtime.buffer(size, Use.OUTPUT) for x, size in kept.items() if size}  # a latent shape has no V
    runtime.write(inputs, work.words)
    runtime.write(uploaded, words)
    spec = tuple(evaluate(formulas("append.constants")[name][0], names) for name in kernels.APPEND_KERNEL.spec)
    grid = tuple(evaluate(n, {**names, "appends": tokens}) for n, _ in formulas("append.grid").values())
    kernel = device.kernel(kernels.APPEND_KERNEL, spec)
    bound = (inputs, uploaded, caches["k"], caches.get("v", caches["k"]))
    runtime.run(runtime.record([Dispatch(kernel, bound, grid)]))
    for x, cache in caches.items():
        kind, stored = storage_types(dtype)["kv".index(x)], runtime.read(cache)
        places = [(f"{x}_word", f"{x}_bit", kind.bits)]
        places += [(f"{x}_scale_word", f"{x}_scale_bit", 16)] * (kind.halves > 0)
        places += [(f"{x}_fifth_word", "fifth_bit", 1)] * kind.fifth_bits
        corners = [[0, 0, 0], [tokens - 1, heads - 1, dims[x] - 1]]
        for token, head, dim in [*corners, *rng.integers(0, (tokens, heads, dims[x]), (100, 3)).tolist()]:
            known = {**names, "token": token, "kv_head": head, "dim": dim, "row": token}
            known["page"] = first_page + int(table[token // page_size])
            for name in ("tile_number", "k_tile_at", "v_tile_at"):
                known[name] = evaluate(meanings("cache.index")[name], known)
            known |= {"row_at": evaluate(meanings("rows.index")["row_at"], known)}
            for word, bit, width in places:
                found = bits(stored, meanings("cache.index"), word, bit, known, width)
                assert found == bits(words, meanings("rows.index"), word, bit, known, width)


def bits(words, index, word, bit, names, width):
    return int(words[evaluate(index[word], names)]) >> evaluate(index[bit], names) & ((1 << width) - 1)


@pytest.mark.parametrize("device", ("vulkan",), indirect=True)
@pytest.mark.parametrize(
    ("dtype", "held"), (("f16", {"page_size": 32}), ("q8_0", {"page_size": 1, "kv_layout": "NHD"}))
)
def test_a_call_dispatches_what_the_manifest_says(device, monkeypatch, dtype, held):
    """Order, bindings, specialization constants and grids of a decode call on a cache."""
    shape = za.AttnShape(16, 2, 64)
    entry = export.manifest([shape], dtype=dtype, **held)
    cache = za.KVCache(device, shape, 1, 1024, dtype=dtype, **held)
    key = RecordingKey("loop", False, 8, 2, 16, 4, 32)
    tensors = SharedTensors(device)
    pages = PagedStorage(device, cache.layout, cache.layers)
    workspace = Workspace.make(key, pages, Scoring(1.0), Tensors.of(key, pages, tensors))
    monkeypatch.setattr(device, "kernel", lambda decl, spec: SimpleNamespace(decl=decl, spec=spec))
    steps = workspace.dispatches(0)
    names = {**entry["shapes"][0]["sizes"], **asdict(shape), "items": 8, "rows": 2, "appends": 4}
    values = entry["shapes"][0]["kinds"]["cpu" if device.info.kind == "cpu" else "gpu"]["specialization"]
    assert [describe.family(step.kernel.decl) for step in steps] == [
        step["kernel"] for step in entry["dispatch"] if "kernel" in step
    ]
    for step in steps:
        key = describe.family(step.kernel.decl)
        assert step.kernel.spec == tuple(values[key][name] for name in step.kernel.decl.spec)
        assert step.groups == tuple(evaluate(n, names) for n, _ in formulas(f"{key}.grid").values())
    workspace.close()
    tensors.close()
    cache.close()
