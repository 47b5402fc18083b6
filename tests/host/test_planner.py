"""The split rule and SplitPlan."""

import json
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from support import CPU

from zinc_attn import AttnShape, SplitPlan, plan_splits
from zinc_attn.dtypes import EXPECTED
from zinc_attn.errors import ArgumentError
from zinc_attn.kernels.tuning import LayoutFacts
from zinc_attn.planning.call import plan_call
from zinc_attn.planning.duration import UNIT_WORK, key_work
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request
from zinc_attn.planning.items import item_keys
from zinc_attn.planning.layouts import split_rule_layouts

QWEN = AttnShape(16, 2, 256)
QWEN_DICT = {"q_heads": 16, "kv_heads": 2, "head_dim": 256}
CONTEXTS = (
    *(0, 1, 63, 64, 65, 128, 129, 130, 500, 700, 1000, 4096, 5000, 8192, 16384, 40000),
    *(65535, 65536, 70000, 131072, 262144),
)
SHAPES = [AttnShape.parse(s) for s in ("16/2/256", "32/4/128", "64/8/64", "9/3/64", "16/1/512", "32/32/128")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("units", (1, 2, 32, 48, 56, 64, 108, 132))
@pytest.mark.parametrize(("kind", "nodes"), (("gpu", True), ("gpu", False), ("cpu", True)))
def test_rule_is_monotone_and_capped(shape, units, kind, nodes):
    previous = 0
    for context in CONTEXTS:
        plan = plan_splits(context, shape, units, kind=kind, node_workgroups=nodes)
        assert plan.num_splits >= previous
        previous = plan.num_splits
        check_leaves(plan)
        sizes = [b - a for a, b in plan.leaf_ranges()]
        assert min(sizes) >= (context > 0), "no split under a leaf of 64 keys"
        assert max(sizes) - min(sizes) <= plan.leaves_per_state


def check_leaves(plan):
    """Every leaf that some row sees is in one split, and the plan survives a file."""
    leaves = [leaf for a, b in plan.leaf_ranges() for leaf in range(a, b)]
    assert leaves == list(range(plan.begin // 64, -(-plan.context_len // 64)))
    assert plan.states == -(-plan.context_len // plan.unit_keys) - plan.begin // plan.unit_keys
    again = SplitPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.fingerprint() == plan.fingerprint()


def test_one_split_up_to_the_threshold_and_one_pass():
    one_wave = {n: plan_splits(n, QWEN, node_workgroups=False) for n in (0, 1, 128, 129)}
    assert [plan.num_splits for plan in one_wave.values()] == [1, 1, 1, 3]
    assert (one_wave[128].passes, one_wave[129].passes) == (1, 2)
    assert [plan_splits(n, QWEN).num_splits for n in (0, 1, 512, 513, 131072)] == [1, 1, 1, 2, 256]
    assert (plan_splits(512, QWEN).passes, plan_splits(513, QWEN).passes) == (1, 2)


def test_fills_the_units_and_writes_few_states():
    """Written and read partial states against float16 K and V bytes: at most 4 % for groups of up to 8."""
    for shape, context in product(SHAPES, (65536, 131072)):
        plan = plan_splits(context, shape, 64)
        assert plan.workgroups >= 4 * 64 or context < 131072
        assert shape.group > 8 or 2 * plan.scratch_bytes <= 0.04 * context * shape.kv_bytes_per_token("f16")


def test_a_unit_belongs_to_the_split_in_which_it_starts():
    plan = SplitPlan.fixed(300, QWEN, split_size=100)
    assert plan.leaf_ranges() == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(
    ("context", "q_len", "dtype", "shape", "build"),
    (
        (0, 1, "f16", "16/2/256", "node"),
        (64, 1, "f16", "16/2/256", "node"),
        (131072 - 512, 1, "f16", "16/2/256", "node"),
        (131072, 1, "f16", "16/2/256", "loop"),  # 256 nodes of 2 KV heads: eight for each of 64 compute units
        (131072, 1, "q8_0", "16/2/256", "node"),  # half the bytes
        (131072, 1, "f16/q4_0", "16/2/256", "node"),
        (65536, 1, "f32", "16/2/256", "loop"),
        (131072, 2, "f16", "16/2/256", "node"),
        (524288, 1, "f16", "20/1/576/512/latent", "node"),  # seven heads together, where one wave would take four
    ),
)
def test_builds_of_a_gpu(context, q_len, dtype, shape, build):
    """Workgroups of eight waves, until those of one wave keep the memory busy."""
    plan = plan_splits(context, AttnShape.parse(shape), 64, dtype, q_len)
    assert plan.build_on(LayoutFacts(64), dtype) == build
    assert plan.build_on(LayoutFacts(64, "gpu", False), dtype) == plan.build
    assert plan.build_on(LayoutFacts(2, "cpu"), dtype) == "node"


def test_no_node_workgroups_for_longer_or_smaller_splits():
    sizes = ({"split_size": 1024}, {"split_size": 100}, {"num_splits": 7})
    for plan in (SplitPlan.fixed(5000, QWEN, **size) for size in sizes):
        assert plan.build_on(LayoutFacts(64)) == plan.build == "loop"
    assert SplitPlan(1536, QWEN, (0, 512, 1536), 8).build_on(LayoutFacts(64)) == "loop"
    assert SplitPlan(1024, QWEN, (0, 300, 1024), 8).build_on(LayoutFacts(64)) == "node", "a node is its first key's"


def test_builds_and_scratch():
    assert SplitPlan.fixed(1000, QWEN, split_size=64).build == "single"
    assert SplitPlan.fixed(1000, QWEN, num_splits=1).build == "loop"
    plan = SplitPlan.fixed(1000, QWEN, num_splits=1)
    assert (plan.leaves_per_state, plan.states, plan.scratch_bytes) == (8, 2, 4 * 2 * 16 * 258)
    assert plan.workgroups == 2
    assert SplitPlan.fixed(500, QWEN, num_splits=1).scratch_bytes == 4 * 8 * 16 * 258


def test_fingerprints():
    assert len({plan_splits(n, QWEN, 64).fingerprint() for n in range(1000, 1010)}) == 10
    assert plan_splits(131072, QWEN, 64).fingerprint() == (
        "93908c1af1422f32c86514e2f9378ead172f895d611a3347a2604036d0c5d2f3"
    )


@pytest.mark.parametrize(
    ("text", "sizes"),  # group, workgroups that share a KV head, k_dim, v_dim, states' bytes
    [
        ("32/8/192/128", (4, 1, 192, 128, 32 * 130 * 4)),
        ("64/64/40/72", (1, 1, 48, 72, 64 * 74 * 4)),
        ("20/1/576/512/latent", (20, 5, 576, 512, 20 * 514 * 4)),
        ("128/1/576/512/latent", (128, 32, 576, 512, 128 * 514 * 4)),
        ("4/2/64/64/latent", (2, 1, 64, 64, 4 * 66 * 4)),
        ("17/1/72", (17, 3, 80, 72, 17 * 74 * 4)),
        ("1/1/100", (1, 1, 112, 104, 106 * 4)),
        ("2/1/1", (2, 1, 16, 8, 2 * 10 * 4)),
        ("3/1/576", (3, 2, 576, 576, 3 * 578 * 4)),
        ("1/1/513/513/latent", (1, 1, 544, 544, 546 * 4)),
    ],
)
def test_shapes_of_any_sizes(text, sizes):
    """As text, as a dict, within a plan and on a device; a plan of a shape whose V is not like K is one of its own."""
    shape = AttnShape.parse(text)
    state = SplitPlan.fixed(1024, shape, num_splits=1).scratch_bytes // 2
    assert (shape.group, shape.head_chunks, shape.k_dim, shape.v_dim, state) == sizes
    assert shape.head_chunks * shape.heads_per_workgroup >= shape.group
    assert str(shape) == text and AttnShape(**shape.to_dict()) == shape
    plan = plan_splits(5000, shape, 64, q_len=3)
    check_leaves(plan)
    plain = plan_splits(5000, AttnShape(shape.q_heads, shape.kv_heads, shape.head_dim), 64, q_len=3)
    assert (plain.fingerprint() == plan.fingerprint()) == (text.count("/") == 2)


def test_plain_shapes_are_written_as_ever():
    for shape in (AttnShape(16, 2, 256), AttnShape(16, 2, 256, 256), AttnShape.parse("16/2/256/256")):
        assert shape == QWEN and hash(shape) == hash(QWEN)
        assert (str(shape), shape.to_dict()) == ("16/2/256", QWEN_DICT)
    latent = QWEN_DICT | {"q_heads": 20, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "latent": True}
    assert AttnShape(20, 1, 576, 512, latent=True).to_dict() == latent


KEYS = "expected a dict of q_heads, kv_heads and head_dim"
CHANGES = (
    ({"version": 2}, "got version 2, expected 3"),
    ({"boundaries": [0, 7]}, "expected ascending key positions from begin = 0 to context_len = 1000"),
    ({"boundaries": [0, 900, 100, 1000]}, "expected ascending key positions"),
    ({"boundaries": 7}, "boundaries: got 7, expected a sequence of key positions"),
    ({"leaves_per_state": 3}, "leaves_per_state: got 3, expected 1 or 8"),
    ({"shape": {"q_heads": 16}}, KEYS),
    ({"shape": QWEN_DICT | {"v_head_dim": 128}}, f"{KEYS}, and of v_head_dim and latent where V is not like K"),
    (
        {"shape": QWEN_DICT | {"v_head_dim": 257, "latent": True}},
        "v_head_dim: got 257, expected at most head_dim = 256",
    ),
    ({"shape": QWEN_DICT | {"v_head_dim": None, "latent": False}}, "AttnShape.v_head_dim: got None, expected an int"),
    ({"surprise": 1}, "expected ['begin', 'boundaries'"),
)


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_from_dict_refuses(change, message):
    with pytest.raises(ArgumentError) as caught:
        SplitPlan.from_dict({**SplitPlan.fixed(1000, QWEN, num_splits=2).to_dict(), **change})
    assert message in str(caught.value)


SHAPE_TEXT = (
    "shape: got {!r}, expected q_heads/kv_heads/head_dim, for example 16/2/256, with V's size where it differs, "
    "32/8/192/128, and the word latent where V is the begin of K, 20/1/576/512/latent"
)
NO_SHAPES = ("16x2", "", "16/2", "16/2/-64", "16/2/64/", "16/2/64/latent", "20/1/576/512/mla", "1/1/8/8/8")
LONG_V = "v_head_dim: got 576, expected at most head_dim = 512, since a latent shape's V is the begin of its K"
SIZES = "expected an int from 1 to 576"
HEADS = "expected an int from 1 to 65535"
UNEVEN = ((16, 3), (17, 2), (2, 4))  # query heads and KV heads
fixed = partial(SplitPlan.fixed, 10, QWEN)
REFUSED = (
    (plan_splits, (-1, QWEN), "context_len: got -1, expected an int from 0 to 16777216"),
    (plan_splits, (10.5, QWEN), "context_len: got 10.5, expected an int"),
    (plan_splits, (10, QWEN, 0), "compute_units: got 0, expected an int of at least 1"),
    (plan_splits, (10, QWEN, 64, "f8"), f"dtype: got 'f8', expected {EXPECTED}"),
    (fixed, (), "num_splits, split_size: got None, None, expected exactly one of the two"),
    (partial(fixed, num_splits=0), (), "num_splits: got 0, expected an int from 1 to 262144"),
    (partial(fixed, split_size=0), (), "split_size: got 0, expected an int of at least 1"),
    *((AttnShape.parse, (text,), SHAPE_TEXT.format(text)) for text in NO_SHAPES),
    *((AttnShape, (16, 2, size), f"AttnShape.head_dim: got {size}, {SIZES}") for size in (577, 0)),
    *((AttnShape, (16, 2, 64, size), f"AttnShape.v_head_dim: got {size}, {SIZES}") for size in (577, 0)),
    (AttnShape, (16, 2, 64, 64.5), "AttnShape.v_head_dim: got 64.5, expected an int"),
    (AttnShape, (20, 1, 512, 576, True), LONG_V),
    (AttnShape, (20, 1, 576, 512, 1), "AttnShape.latent: got 1, expected True or False"),
    *((AttnShape, (q_heads, 2, 64), f"AttnShape.q_heads: got {q_heads}, {HEADS}") for q_heads in (0, 65536)),
    (AttnShape, (4, 0, 64), "AttnShape.kv_heads: got 0, expected an int of at least 1"),
    *((AttnShape, (q, kv, 64), f"q_heads: got {q}, expected a multiple of kv_heads = {kv}") for q, kv in UNEVEN),
)


@pytest.mark.parametrize(("call", "given", "message"), REFUSED)
def test_refusals(call, given, message):
    with pytest.raises(ArgumentError) as caught:
        call(*given)
    assert str(caught.value) == message


def test_a_prompt_on_a_cpu_has_a_split_per_leaf_in_several_submissions() -> None:
    """Each has at most 4,096 states, whatever the call's rows; 32 rows of 8,192 keys are the last that fit."""
    shape, device = AttnShape(9, 3, 64), LayoutFacts(2, "cpu", False)
    facts = CallFacts(CPU, shape, 256)
    options = CallOptions(split_rule_layouts(shape, "f16", device))
    for rows, tokens, each in ((32, 1024, 32), (1024, 1024, 256), (100, 8192, 32), (100, 8193, 100)):
        table = np.arange(-(-tokens // 256), dtype=np.uint32)
        made = plan_call([Request(rows, tokens, rows, table)], options, facts).submissions
        assert [len(one.rows) for one in made] == [each] * (rows // each) + [rows % each] * (rows % each > 0)
        assert all(one.items["leaves_per_state"].max() == (1 if tokens <= 8192 else 8) for one in made)
    tables = np.arange(48, dtype=np.uint32).reshape(3, 16)
    made = plan_call([Request(48, 4096, 48, table) for table in tables], options, facts).submissions
    assert [[(one.request, one.end - one.begin) for one in submission.slices] for submission in made] == [
        [(0, 48), (1, 16)],
        [(1, 32), (2, 32)],
        [(2, 16)],
    ]


@pytest.mark.parametrize(
    ("units", "shape", "tokens", "rows", "count"),
    (
        (64, "16/2/256", 1 << 17, 1, 1),
        (64, "16/2/256", 1 << 15, 512, 5),  # as many as memory asks for
        (2, "32/8/128", 1 << 17, 16, 1),
        (1, "128/1/576/512", 1 << 19, 1, 3),
        (1, "128/1/576/512", 1 << 19, 2, 6),
        (64, "128/1/576/512", 1 << 24, 1, 2),
    ),
)
def test_submissions_keep_the_bound_of_time(units: int, shape: str, tokens: int, rows: int, count: int) -> None:
    """The keys of a row that is too long go in parts, of which the first appends; on a CPU there is no bound."""
    device = replace(CPU, kind="discrete", compute_units=units, max_buffer_bytes=1 << 34)
    facts = CallFacts(device, AttnShape.parse(shape), 1 << 16)
    options = CallOptions(split_rule_layouts(facts.shape, "f16", device.layout_facts))
    request = Request(rows, tokens, rows, np.zeros(tokens >> 16 or 1, np.uint32))
    made, bound = plan_call([request], options, facts).submissions, UNIT_WORK * units
    assert len(made) == count and all(item_keys(one.items) * key_work(facts) <= bound for one in made)
    assert [len(one.appends) for one in made] == [one.key.appends for one in made] == [rows] + [0] * (count - 1)
    ends = {one.slices: one.key.unmerged for one in made}  # of each slice the last part
    assert not any(ends.values()) and len({(one.slices, one.key.states) for one in made}) == len(ends)
    uncut = plan_call([request], options, replace(facts, device=replace(device, compute_units=1 << 20))).submissions
    items = [np.concatenate([one.items for one in found]) for found in (made, uncut)]
    assert np.array_equal(*items) or rows > 1
