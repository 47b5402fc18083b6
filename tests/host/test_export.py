"""The manifest's numbers of a shape, its names, and the index maps of rows, against the package's own."""

import ast
import itertools
from dataclasses import asdict

import numpy as np
import pytest

from zinc_attn.cache import rows
from zinc_attn.cache.mover import PageGeometry
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas, meanings
from zinc_attn.kernels.dispatches import AttendVariant, copy_call, merge_call, move_call
from zinc_attn.planning.splits import plan_splits
from zinc_attn.shapes import TILES, AttnShape, row_strides, strided_format
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools.export import describe, evaluate, evaluate_all

TEXTS = "16/2/256 32/4/128 64/8/64 9/3/64 16/1/512 10/1/80 32/8/192/128 20/1/576/512/latent 17/1/72 6/3/65/33"
SHAPES = [AttnShape.parse(text) for text in (*TEXTS.split(), "3/1/513/513/latent")]


def test_no_formula_uses_a_name_that_is_not_explained():
    manifest = describe.manifest(SHAPES[:1], compute_units=64)
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


def names_of(shape, dtype, page_size, kv_layout="tiles"):
    names = {**asdict(shape), "latent": int(shape.latent), **describe.storage_names(dtype), "page_size": page_size}
    names["nhd"] = int(kv_layout == "NHD")
    return {**names, **evaluate_all(formulas("sizes"), names)}


@pytest.mark.parametrize("dtype", (*STORAGE, "q5_1/q4_0"))
@pytest.mark.parametrize(("page_size", "kv_layout"), ((1, "tiles"), (256, "tiles"), (1, "NHD"), (256, "NHD")))
def test_numbers_of_a_shape(dtype, page_size, kv_layout):
    """The manifest's are those of the package's own rows, states and dispatches."""
    for shape in SHAPES:
        if "/" in dtype and shape.latent:
            continue
        n, strides = names_of(shape, dtype, page_size, kv_layout), TILES
        token_bytes = shape.kv_bytes_per_token(dtype)
        if kv_layout == "NHD":
            strides = row_strides(shape, dtype)
            token_bytes = 4 * shape.kv_heads * strided_format(strides, shape.latent).words
        numbers = describe._shape(shape, dtype, page_size, 64, kv_layout)
        assert AttnShape(**{name: numbers[name] for name in asdict(shape)}) == shape
        assert numbers["kv_bytes_per_token"] == token_bytes
        plan = plan_splits(100000, shape)
        call = {"kind": "gpu", "context_len": 100000, "rows": 1, "q_len": 1, "window": 0}
        states = evaluate_all(formulas("quantities"), {**n, **call})
        assert evaluate(formulas("buffers")["states"][0], {**n, **states}) == plan.scratch_bytes
        pages = PageGeometry(shape, dtype, n["tile"], n["page_tiles"], strides)
        for kind, device in (("gpu", "discrete"), ("cpu", "cpu")):
            calls = [
                merge_call(shape, device, 1),
                move_call(kernels.APPEND_KERNEL, shape, dtype, n["tile"], 1, shape.kv_heads, strides),
            ]
            programs = [(call.decl, call.spec) for call in (*calls, copy_call(pages.tile_words, 1, 1))]
            programs.append(AttendVariant(shape, dtype, device, n["tile"], strides=strides).program())
            for decl, values in programs:
                result = numbers["kinds"][kind]["specialization"][decl.family]
                assert tuple(result[name] for name in decl.spec) == values


INDEXED = [AttnShape.parse(s) for s in ("4/2/128", "4/2/192/128", "4/2/96/160", "2/2/576/512/latent", "4/2/72/33")]
APART = [(shape, "q5_1/q4_0") for shape in INDEXED if not shape.latent]


@pytest.mark.parametrize(("shape", "dtype"), [*itertools.product(INDEXED, STORAGE), *APART])
def test_row_index_maps(rng, dtype, shape):
    """A bit that is flipped where they say changes the value or the block of 32 that is stored there, and no other.

    tests/device/test_manifest.py compares the places in a cache with these.
    """
    k = rng.standard_normal((3, shape.kv_heads, shape.head_dim)).astype(np.float16)
    v = rng.standard_normal((3, shape.kv_heads, shape.v_head_dim)).astype(np.float16)
    v = k[..., : shape.v_head_dim] if shape.latent else v
    kinds, index = storage_types(dtype), meanings("rows.index")
    k, v = (rows.stored_values("x", x, kind.name, True)[0] for x, kind in zip((k, v), kinds, strict=True))
    names, words = names_of(shape, dtype, 64), rows.encode(k, v, shape, dtype)
    before = rows.decode(words, shape, dtype)
    for which, kind in enumerate(kinds[: 1 if shape.latent else 2]):
        x, size = "kv"[which], before[which].shape[2]
        last = size - 1 - (size % 32 == 1)  # a block of one value has a scale of 0 in some types
        places = [(f"{x}_word", f"{x}_bit", 1), (f"{x}_word", f"{x}_bit + {kind.bits - 1}", 1)]
        places += [(f"{x}_scale_word", f"{x}_scale_bit + 13", 32)] * (kind.halves > 0)
        places += [(f"{x}_fifth_word", "fifth_bit", 1)] * kind.fifth_bits
        for (row, head, dim), (word, bit, width) in itertools.product({(0, 0, 0), (2, 1, last), (1, 0, 31)}, places):
            known = {**names, "row": row, "kv_head": head, "dim": dim}
            known["row_at"] = evaluate(index["row_at"], known)
            name, _, more = bit.partition(" + ")
            changed = words.copy()
            place = evaluate(index[name], known) + int(more or 0)
            changed.reshape(-1)[evaluate(index[word], known)] ^= np.uint32(1 << place)
            differs = np.argwhere(rows.decode(changed, shape, dtype)[which] != before[which])
            assert len(differs) and {(r, h, d // width) for r, h, d in differs} == {(row, head, dim // width)}
