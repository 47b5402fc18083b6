"""The output bits are those of ``reference.emulate``: for every shape, type, mask and bias of a grid, and whatever the
layout, the driver and the dispatcher.

The grid's axes are those of llama.cpp's test of FLASH_ATTN_EXT, with more of each. ``--full`` runs every combination of
sizes, type, mask and bias; the default run a few with each value of each axis. Keys and rows are drawn per case, ratio
and KV heads per size and type, so that cases share pipelines: compiling them takes most of the time.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import FULL, differing, make_inputs, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.kernels import dispatches
from zinc_attn.kernels.families import CPU, FAMILIES, RDNA
from zinc_attn.kernels.tuning import merge_workgroup_size
from zinc_attn.storage import STORAGE
from zinc_attn.tools.check import Case

SIZES = (
    *((size, size, False) for size in (40, 64, 72, 80, 96, 128, 192, 256, 320, 512, 576)),
    *((96, 64, False), (192, 128, False), (320, 256, False), (576, 512, False), (65, 67, False), (67, 65, False)),
    *((576, 512, True), (320, 256, True), (80, 65, True)),
)
ELSEWHERE = tuple((size, size, False) for size in (64, 80, 96, 128, 192, 256, 512))
PAIRS = "q8_0/q4_0 f16/q5_1 q4_1/iq4_nl q5_0/fp8_e4m3 bf16/f32"  # before single types, as the last sizes are latent
TYPES = (*PAIRS.split(), *STORAGE)
MASKS = (None, False), (None, True), ("f16", False), ("tree", True)  # and whether causal
BIASES = tuple(product((False, True), (None, 10.0), (False, True)))  # alibi, softcap, sinks
RATIOS = (*[1] * 24, *[2] * 16, *[3] * 10, *range(4, 18), 20, 24, 32, 128)  # mostly few heads, which compile faster
KEYS = (17, 113, 512, 1024, 4096)
ROWS = (1, 3, 32, 75)
PRODUCTS = 1 << 26  # rows * heads * keys * dimensions of a case: the oracle takes half a second for so many


def cases() -> list[Case]:
    """Every case, with drawn ratio, KV heads, keys and rows; a latent shape has one type."""
    rng, drawn_cases = np.random.default_rng(15), []
    for (k, v, latent), dtype in product(SIZES, TYPES):
        if latent and "/" in dtype:
            continue
        ratio, kv_heads = int(rng.choice(RATIOS)), 1 if latent else int(rng.choice((1, 2)))
        shape = za.AttnShape(ratio * kv_heads, kv_heads, k, v, latent)
        most = PRODUCTS // (shape.q_heads * (k + v))
        fitting = [(keys, rows) for keys, rows in product(KEYS, ROWS) if rows <= keys and keys * rows <= most]
        for (mask, causal), (alibi, softcap, sinks) in product(MASKS, BIASES):
            options = {"mask": mask, "causal": causal, "alibi": alibi, "softcap": softcap, "sinks": sinks}
            drawn_cases.append(Case(shape, dtype, *fitting[rng.integers(len(fitting))], **options))
    return drawn_cases


def axes(case: Case) -> tuple[Any, ...]:
    """Type, mask and biases."""
    return case.dtype, (case.mask, case.causal), (case.alibi, case.softcap, case.sinks)


def drawn() -> list[Case]:
    """Of all cases, some of each size that no other test has, in which types, masks and biases take turns."""
    everything, some = cases(), []
    sizes = [size for size in SIZES if size not in ELSEWHERE]
    for index in range(max(len(sizes), len(TYPES))):
        size = sizes[index % len(sizes)]
        mine = [c for c in everything if (c.shape.head_dim, c.shape.v_head_dim, c.shape.latent) == size]
        turns = TYPES[index % len(TYPES)], MASKS[index // 2 % 4], BIASES[(3 * index + 1) % 8]
        some.append(max(mine, key=lambda c: sum(x == y for x, y in zip(axes(c), turns, strict=True))))
    return some


@pytest.mark.parametrize("case", cases() if FULL else drawn(), ids=str)
def test_the_oracles_bits(device, case):
    check(device, case)


LATENT = Case.parse("1/1/40/24/latent q4_1 17 sinks+alibi+mask=f16+noncausal")


@pytest.mark.one_driver("latent")  # SwiftShader compiles the kernels of each of the drawn cases for a minute
@pytest.mark.parametrize("case", [*cases()] if FULL else [drawn()[9], LATENT], ids=str)
def test_the_oracles_bits_on_every_driver(any_device, case):
    """Sizes that are filled up, K and V of different sizes, and latent."""
    check(any_device, case)


@pytest.mark.parametrize(
    "case",
    (
        "8/1/256 f16 577 rows=3 sinks",  # 16 lanes
        "6/2/72/64 q4_1/iq4_nl 113 rows=3 alibi+mask=f16+noncausal",
        "3/1/64 q8_0 1024 softcap=10+noncausal",
        "2/1/80/64/latent f32 577 rows=9 mask=tree",
    )[: None if FULL else 2],
)
def test_the_oracles_bits_in_small_waves(device, monkeypatch, case):
    """Which a lavapipe with a newer compiler has; the driver of these tests has waves of 32."""
    monkeypatch.setattr(device.runtime, "info", replace(device.info, layout=CPU._replace(lanes=8)))
    check(device, Case.parse(case))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_oracles_bits_in_the_registers_of_every_family(device, monkeypatch, family):
    monkeypatch.setattr(device.runtime, "info", replace(device.info, layout=family.layout))
    check(device, Case.parse("4/1/72/136 q8_0/f16 577 rows=2"))


def score_size(q: NDArray[Any], k: NDArray[Any]) -> float:
    """The largest sum of the magnitudes of a score's products."""
    rows, (_, kv_heads, head_dim) = len(q), k.shape
    vectors = np.abs(q).reshape(rows, kv_heads, -1, head_dim).transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
    keys = np.abs(k.astype(np.float32)).transpose(1, 2, 0)
    return float((vectors @ keys).max()) / np.sqrt(head_dim)


def check(device: za.Device, case: Case) -> None:
    """The case alone and in another layout, against the oracle, and the oracle against float64.

    The squared error may be 1e-11 of the output's square. Where the magnitudes of a score's products have a large sum
    S, the score's rounding is about S / 2**24, and its weight and the output are off by as large a part of themselves.
    """
    shape, keys, options, call = case.shape, case.context, case.options(), case.masking(case.rows, case.context)
    data = case.data()
    q, held = case.query(data).reshape(case.rows, shape.q_heads, -1), data.stored_as(case.dtype)
    if case.mask == "f16" and not case.alibi:
        options["mask_slopes"] = np.linspace(2, -0.5, shape.q_heads, dtype=np.float32)
    want = reference.emulate(q, held.k, held.v, **options, **call)
    truth, _ = reference.attention(q, held.k, held.v, **options, **call)
    assert np.sum((want[0] - truth) ** 2) <= max(1e-11, (score_size(q, held.k) / 2**24) ** 2) * np.sum(truth**2)
    page_size = (1, 2, 8, 64)[(shape.head_dim + len(case.dtype)) % 4]  # cases of a size and type share pipelines
    order, layout = np.random.default_rng(keys).permutation(-(-keys // page_size)), shape.head_dim // 8 % 2
    options_of_cache = {"page_order": order, "kv_layout": ("tiles", "NHD")[layout]}
    with za.KVCache(device, shape, 1, keys, case.dtype, page_size, **options_of_cache) as cache:
        seq = cache.new_sequence()
        half = keys - min(case.rows, keys // 2)
        if half:
            cache.append(seq, 0, *data.rows(0, half))
        got = za.Attention(cache, **options)(q, seq, 0, *data.rows(half, keys), return_lse=True, **call)
        again = za.Attention(cache, num_splits=2, **options)(q, seq, 0, return_lse=True, **call)
    for results in (got, again):
        same(results, want)


def test_every_value_of_every_axis_is_drawn():
    some = drawn()
    assert {(c.shape.head_dim, c.shape.v_head_dim, c.shape.latent) for c in some} == set(SIZES) - set(ELSEWHERE)
    types, masks, biases = zip(*map(axes, some), strict=True)
    assert set(types) == set(TYPES) and set(masks) == set(MASKS)
    assert [set(values) for values in zip(*biases, strict=True)] == [{False, True}, {None, 10.0}, {False, True}]


# --- layouts --------------------------------------------------------------

SPLITS = (1, 2, 3, 5, 7, 8, 17, 32, 64, 128, 1000) if FULL else (1, 7, 1000)
SPLIT_SIZES = (100, 256, 2048) if FULL else (100, 2048)
LAYOUTS = [{}, *({"num_splits": n} for n in SPLITS), *({"split_size": n} for n in SPLIT_SIZES)]
SHAPES = ("16/2/256", "9/3/64", "8/2/80", "6/2/192", "5/1/512")  # ``check`` has layouts of longer contexts
# Shapes, those that are in float32, too, and contexts. A shape and a type take seconds to compile.
LAID_OUT = {
    ("default", "vulkan"): (SHAPES, SHAPES[1:2], (0, 1, 2, 31, 33, 64, 65, 127, 129, 1000)),
    ("default", "kompute"): (SHAPES[1:2], (), (0, 65, 1000)),  # a dispatcher does not know a shape or a type
    ("swiftshader", "vulkan"): (SHAPES[1:2], (), (1, 65, 577)),
}
LAYOUT_CASES = [
    pytest.param(driver, shape, dtype, context, id=f"{'-'.join(driver)}-{shape}-{dtype}-{context}")
    for driver, (shapes, in_f32, contexts) in LAID_OUT.items()
    for shape, dtype in (*product(shapes, ["f16"]), *product(in_f32, ["f32"]))
    for context in contexts
]


def check_all_layouts(
    device: za.Device, text: str, context: int, dtype: str, kind: str, layouts: Iterable[dict[str, int]] = LAYOUTS
) -> None:
    """One input, one oracle, every layout; an element that no kernel writes is NaN."""
    shape = za.AttnShape.parse(text)
    q, k, v = make_inputs(shape, context, dtype, kind)
    want = reference.emulate(q, k, v)
    with za.KVCache(device, shape, 1, max(context, 1), dtype) as cache:
        sequence = cache.new_sequence()
        if context:
            cache.append(sequence, 0, k, v)
        for layout in layouts:
            attention = za.Attention(cache, observer=lambda _, workspace: workspace.spoil(), **layout)
            got = attention(q, sequence, 0, return_lse=True, allow_empty=True)
            same(got, want, (text, dtype, context, kind, layout))


@pytest.mark.parametrize(("any_device", "shape", "dtype", "context"), LAYOUT_CASES, indirect=["any_device"])
def test_bits_of_every_layout(any_device, shape, dtype, context):
    check_all_layouts(any_device, shape, context, dtype, "normal")


@pytest.mark.parametrize("kind", ("sharp", "extreme", "equal", "zeros", "subnormal", "cancelling"))
@pytest.mark.parametrize("dtype", ("f16", "f32"))
@pytest.mark.parametrize("shape", ("16/2/256", "9/3/64") if FULL else ("9/3/64",))
@pytest.mark.parametrize("context", (1, 65, 1000) if FULL else (65,))
def test_bits_on_awkward_values(any_device, shape, dtype, context, kind):
    if "SwiftShader" in any_device.info.name and dtype == "f32" and not FULL:
        pytest.skip("float16 shows every layout's kernel there, and test_c_engine.py float32's loads")
    check_all_layouts(any_device, shape, context, dtype, kind)


def test_bits_at_131072_keys(device, monkeypatch):
    """Also where pass 2 merges its 256 states in several rounds of two waves."""
    monkeypatch.setattr(dispatches, "merge_workgroup_size", lambda kind: 64)
    shape = "16/2/256" if FULL else "3/1/64"
    check_all_layouts(device, shape, 131072, "f16", "sharp", ({}, {"num_splits": 1}, {"num_splits": 1000}))


# two chunks of K in flight, and workgroups of five heads, which make two passes over V
WIDE = "5/1/264", "f16"
TEN = "10/1/40", "f16"  # whose workgroups have all heads where a context has two nodes
FOR_GPUS = [("4/2/256", "f16"), WIDE, TEN, *((("16/2/256", "f16"), ("11/1/64", "f32")) if FULL else ())]


@pytest.mark.parametrize(("shape", "dtype"), FOR_GPUS)
def test_bits_of_the_programs_for_gpus(device, monkeypatch, shape, dtype):
    """Of 8 heads, which leave registers for fewer value rows: on SwiftShader, in test_cascade.py."""
    facts = {"compute_units": 2, "shared_memory_bytes": 1 << 16, "layout": RDNA}
    monkeypatch.setattr(device.runtime, "info", replace(device.info, **facts))
    monkeypatch.setattr(dispatches, "merge_workgroup_size", lambda _: merge_workgroup_size("discrete"))
    for context in (1000,) if shape == "4/2/256" and not FULL else (65, 1000):
        check_all_layouts(device, shape, context, dtype, "normal")


@pytest.mark.both_dispatchers
def test_repeats_and_threads_give_one_output(device):
    shape = za.AttnShape(9, 3, 64)
    q, k, v = make_inputs(shape, 1000, "f16")
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda n: za.attention(q, k, v, device=device, num_splits=n), [1, 3, 8, 16] * 4))
    assert all(not differing(out, outs[0]) for out in outs)


def test_what_merges_flush(device):
    """The second of three nodes scales the first one's sums below the flush, and to it; the third one's show whether
    they were flushed."""
    q, k, v = np.eye(1, 16, dtype=np.float32), *np.zeros((2, 1536, 1, 16), np.float32)
    k[..., 0] = -200
    for node, score, digits in ((0, 0, (13, 5)), (512, 10, ()), (1024, 10, (6, 6))):
        k[node, 0, 0], k[node + 1 : node + 3, 0, 0] = score, score - 45
        v[node + 1, 0, : len(digits)] = [2.0**-40 * (1 + 2.0**-n) for n in digits]
        v[node + 2, 0, : len(digits)] = -(2.0**-40)
    call = {"scale": float(np.log(2.0)), "return_lse": True}  # scores are whole in log2 units
    for num_splits in (1, 3):
        got = za.attention(q, k, v, device, num_splits, **call)
        same(got, reference.emulate(q, k, v, scale=call["scale"]), num_splits)
