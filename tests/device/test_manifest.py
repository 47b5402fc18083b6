"""The exported manifest against calls: its index maps, and its formulas of work words and grids."""

from dataclasses import asdict

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas, meanings
from zinc_attn.runtime.protocol import Use
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools.export import describe, evaluate, evaluate_all

NATIVE = True
PLACED = [  # shapes with every page size, K and V apart, sizes that the cache fills up, and latent ones
    *((text, page_size, dtype) for text, page_size in (("4/2/96/64", 256), ("4/2/72/33", 2)) for dtype in STORAGE),
    *(("2/2/576/512/latent", 64, dtype) for dtype in STORAGE),
    *(("4/2/192/128", page_size, "q5_1/q4_0") for page_size in (1, 64, 256)),
]


@pytest.mark.of_drivers  # whose modules are exported
@pytest.mark.parametrize(("text", "page_size", "dtype"), PLACED)
def test_index_maps(device, rng, monkeypatch, text, page_size, dtype):
    """A bit that is flipped where they say changes the value, or the block of 32, that is stored there, and no other.

    In the second of two layers, and at its place in the rows that a host uploads and reads back.
    """
    shape, tokens, runtime, buffer = za.AttnShape.parse(text), 300, device.runtime, device.runtime.buffer
    visible = {Use.CACHE: Use.OUTPUT}  # so that the host can write it
    monkeypatch.setattr(runtime, "buffer", lambda nbytes, use: buffer(nbytes, visible.get(use, use)))
    heads, dims = shape.kv_heads, {"k": shape.head_dim, "v": shape.v_head_dim}
    pages = -(-tokens // page_size)
    names = {**asdict(shape), **describe.storage_names(dtype), "page_size": page_size, "pages": pages, "nhd": 0}
    names |= {"layer": 1, "latent": int(shape.latent), "row": 0}
    names |= evaluate_all(formulas("sizes"), names)
    k, v = (rng.standard_normal((tokens, heads, n), np.float32) for n in dims.values())
    order, index, row_index = rng.permutation(pages), meanings("cache.index"), meanings("rows.index")
    with za.KVCache(device, shape, 2, pages * page_size, dtype, page_size, page_order=order, round_rows=True) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 1, k, None if shape.latent else v)
        (buffers,), first_page = cache.layers[1].slices, cache.layers[1].first_page
        assert first_page == evaluate(formulas("work.header")["first_page"][0], names)
        for which, x in enumerate("k" if shape.latent else "kv"):
            kind, cells = storage_types(dtype)[which], getattr(buffers, x)
            stored = runtime.read(cells)
            places = [(f"{x}_word", f"{x}_bit", 0, 1), (f"{x}_word", f"{x}_bit", kind.bits - 1, 1)]
            places += [(f"{x}_scale_word", f"{x}_scale_bit", 13, 32)] * (kind.halves > 0)
            places += [(f"{x}_fifth_word", "fifth_bit", 0, 1)] * kind.fifth_bits
            size = dims[x] - (dims[x] % 32 == 1)  # a block of one value has a scale of 0 in some types
            drawn = rng.integers(0, (tokens, heads, size), (12, 3)).tolist()
            for token, head, dim in [[0, 0, 0], [tokens - 1, heads - 1, size - 1], *drawn]:
                page = first_page + seq.pages.table[token // page_size]
                known = {**names, "token": token, "kv_head": head, "dim": dim, "page": page}
                for name in ("tile_number", "k_tile_at", "v_tile_at"):
                    known[name] = evaluate(index[name], known)
                known["row_at"] = evaluate(row_index["row_at"], known)
                before = cache.read_rows(seq, 1, token, token + 1)
                for word, bit, more, width in places:
                    place, flipped = evaluate(index[word], known), np.uint32(1 << evaluate(index[bit], known) + more)
                    runtime.write(cells, stored[place : place + 1] ^ flipped, place)
                    after = cache.read_rows(seq, 1, token, token + 1)
                    runtime.write(cells, stored[place : place + 1], place)
                    changed = np.zeros(before.size, np.uint32)
                    changed[evaluate(row_index[word], known)] = 1 << evaluate(row_index[bit], known) + more
                    assert np.array_equal((before ^ after).reshape(-1), changed)
                    values = (rows.decode(words, shape, dtype)[which] for words in (before, after))
                    differs = np.argwhere(np.not_equal(*values))
                    assert {(h, d // width) for _, h, d in differs} == {(head, dim // width)}


@pytest.mark.parametrize("context,q_len", ((0, 1), (1, 1), (64, 3), (65, 1), (1000, 5), (70000, 1)))
@pytest.mark.parametrize("layout", ({}, {"num_splits": 1}, {"num_splits": 7}))
@pytest.mark.parametrize("window,sinks", ((0, False), (1, True), (130, False), (5000, True)))
def test_work_words_follow_from_the_formulas(device, context, q_len, layout, window, sinks):
    """Items, row records, header and grids of a call, whose recording may have room for more of them."""
    shape, calls = za.AttnShape(9, 3, 64), []
    sizes = {"q_len": q_len, "window": window or None}
    plan = za.plan_splits(context, shape, device.info.split_units, **sizes)
    plan = za.SplitPlan.fixed(context, shape, **sizes, **layout) if layout else plan

    def seen(submission, workspace):
        calls.append((submission, workspace.key, workspace.work.words.tolist(), workspace.dispatches(0)))

    with za.KVCache(device, shape, 1, 70400, "f16", 64) as cache:
        seq = cache.new_sequence()
        if context:
            cache.append(seq, 0, *np.zeros((2, context, 3, 64), np.float16))
        masks = {"window": window or None, "sinks": np.ones(9, np.float32) if sinks else None}
        attention = za.Attention(cache, cascade=False, observer=seen, **masks, **layout)
        attention(np.ones((q_len, 9, 64), np.float32), seq, 0, allow_empty=True)
        pages = cache.pool.num_pages
    ((submission, key, words, steps),) = calls
    names = {**asdict(shape), **describe.storage_names("f16"), "latent": 0, "page_size": 64, "nhd": 0, "kind": "cpu"}
    names |= {"context_len": context, "q_len": q_len, "window": window, "rows": q_len, "splits": plan.num_splits}
    names |= {"appends": 0, "table_words": key.tables, "layer": 0, "pages": pages, "mask_words": 0}
    names |= evaluate_all(formulas("sizes"), names)
    names |= evaluate_all(formulas("quantities"), names)
    header = dict(zip(kernels.HEADER, words, strict=False))
    items, records = {}, []
    for row in range(q_len):
        limit = max(context - q_len + 1 + row, 0)
        known = {"row": row, "limit": limit, "first": max(limit - window, 0) if window else 0}
        known |= names | {
            "row_nodes": max(-(-limit // 512), names["single_pass"]),
            "page_table": header["append_table"],
        }
        for split in range(plan.num_splits):
            known["split"] = split
            known["node_begin"] = evaluate(formulas("work.item")["node_begin"][0], known)
            item = {word: evaluate(formulas("work.item")[word][0], known) for word in kernels.ITEM}
            if item["node_begin"] < item["node_end"]:
                items[split, row] = [*item.values()]
        record = [evaluate(formulas("work.row")[word][0], known) for word in kernels.ROW]
        records.append([value % 2**32 for value in record])  # the position is an int32
    begins = range(kernels.HEADER_WORDS, header["row_table"], kernels.ITEM_WORDS)
    written = [words[begin : begin + len(kernels.ITEM)] for begin in begins[: len(submission.items)]]
    assert written == [items[place] for place in sorted(items)], "rows of a split are neighbors"
    begins = range(header["row_table"], header["append_table"], kernels.ROW_WORDS)
    assert [words[begin : begin + kernels.ROW_WORDS] for begin in begins[:q_len]] == records
    names |= {"items": key.items, "rows": key.rows, "states": key.states, "vectors": names["heads_per_workgroup"]}
    assert 4 * len(words) == evaluate(formulas("buffers")["work"][0], names)
    for word in set(kernels.HEADER) - {"score_scale", "softcap", "softcap_inverse"}:
        assert header[word] == evaluate(formulas("work.header")[word][0], names), word
    grids = {step.kernel.decl.name: step.groups for step in steps}
    for kernel in kernels.KERNELS:
        told = tuple(evaluate(count, names) for count in kernel.grid if kernel.name in grids)
        assert grids.get(kernel.name, ()) == told
    assert ("attend" in grids, "merge" in grids) == (key.items > 0, plan.states != 1)
