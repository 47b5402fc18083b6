"""The exported manifest against the device: its index maps."""

from dataclasses import asdict

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas, meanings
from zinc_attn.kernels.records import WorkBuffer
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools.export import describe, evaluate, evaluate_all

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
    grid = kernels.APPEND_KERNEL.groups(spec, kv_heads=heads, appends=tokens)
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
                result = bits(stored, meanings("cache.index"), word, bit, known, width)
                assert result == bits(words, meanings("rows.index"), word, bit, known, width)


def bits(words, index, word, bit, names, width):
    return int(words[evaluate(index[word], names)]) >> evaluate(index[bit], names) & ((1 << width) - 1)
