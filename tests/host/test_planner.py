"""The split rule and SplitPlan."""

import json
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from support import CPU

from zinc_attn import AttnShape, SplitPlan, plan_splits
from zinc_attn.errors import ArgumentError
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
@pytest.mark.parametrize("q_len", (1, 5))
def test_rule_is_monotone_and_capped(shape, units, q_len):
    """One split up to a node, a split per node after that, and never more than fill the device."""
    previous, most = 0, -(-64 * units // (shape.kv_heads * shape.head_chunks * q_len))
    for context in CONTEXTS:
        plan = plan_splits(context, shape, units, q_len)
        assert plan.num_splits == max(min(-(-context // 512), most), 1) >= previous
        previous = plan.num_splits
        check_nodes(plan)
        sizes = [b - a for a, b in plan.node_ranges()]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= (context > 0)


def check_nodes(plan):
    """Every node that some row sees is in one split, and the plan survives a file."""
    nodes = [node for a, b in plan.node_ranges() for node in range(a, b)]
    assert nodes == list(range(plan.begin // 512, -(-plan.context_len // 512)))
    assert plan.states == len(nodes)
    again = SplitPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.fingerprint() == plan.fingerprint()


@pytest.mark.parametrize(
    ("context", "layout", "ranges"),
    (
        (0, {"num_splits": 7}, [(0, 0)]),
        (500, {"num_splits": 7}, [(0, 1)]),
        (2000, {"num_splits": 3}, [(0, 1), (1, 2), (2, 4)]),
        (2000, {"num_splits": 1}, [(0, 4)]),
        (2000, {"split_size": 100}, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2000, {"split_size": 700}, [(0, 2), (2, 4)]),
        (2000, {"split_size": 1536}, [(0, 3), (3, 4)]),
        (2000, {"split_size": 1024, "window": 900}, [(2, 4)]),
        (2000, {"split_size": 1024, "window": 1000}, [(1, 2), (2, 4)]),
        (2000, {"num_splits": 2, "window": 1500}, [(0, 2), (2, 4)]),
    ),
)
def test_fixed_layouts_are_of_whole_nodes(context, layout, ranges):
    plan = SplitPlan.fixed(context, QWEN, **layout)
    assert plan.node_ranges() == ranges and plan.num_splits == len(ranges)
    assert plan.workgroups == 2 * len(ranges) * (context > 0)
    assert plan.scratch_bytes == (4 * plan.states * 16 * 258 if plan.states > 1 else 0)
    assert plan.passes == (1 if plan.states == 1 else 2)


def test_a_fingerprint_does_not_change():
    fingerprint = plan_splits(131072, QWEN, 64).fingerprint()
    assert fingerprint == "0de925bbc731a73b80d4ea7664d0cd955f71ea5621cc1f5c2ef924e93bcbf81c"


@pytest.mark.parametrize(
    ("text", "sizes"),  # group, workgroups that share a KV head, k_dim, v_dim, states' bytes
    [
        ("64/64/40/72", (1, 1, 48, 72, 64 * 74 * 4)),
        ("20/1/576/512/latent", (20, 3, 576, 512, 20 * 514 * 4)),
        ("128/1/576/512/latent", (128, 16, 576, 512, 128 * 514 * 4)),
        ("2/1/1", (2, 1, 16, 8, 2 * 10 * 4)),
        ("1/1/513/513/latent", (1, 1, 544, 544, 546 * 4)),
    ],
)
def test_shapes_of_any_sizes(text, sizes):
    """As text, as a dict and within a plan."""
    shape = AttnShape.parse(text)
    state = SplitPlan.fixed(1024, shape, num_splits=1).scratch_bytes // 2
    assert (shape.group, shape.head_chunks, shape.k_dim, shape.v_dim, state) == sizes
    assert shape.head_chunks * shape.heads_per_workgroup >= shape.group
    assert str(shape) == text and AttnShape(**shape.to_dict()) == shape
    check_nodes(plan_splits(5000, shape, 64, q_len=3))


KEYS = "expected a dict of q_heads, kv_heads and head_dim"
CHANGES = (
    ({"version": 3}, "got version 3, expected 4"),
    ({"boundaries": [0, 7]}, "expected ascending key positions from begin = 0 to context_len = 1000"),
    ({"boundaries": [0, 1024, 1000]}, "expected ascending key positions"),
    ({"boundaries": [0, 700, 1000]}, "and between them multiples of 512"),
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
    (plan_splits, (10, QWEN, 0), "compute_units: got 0, expected an int of at least 1"),
    (fixed, (), "num_splits, split_size: got None, None, expected exactly one of the two"),
    (partial(fixed, num_splits=0), (), "num_splits: got 0, expected an int of at least 1"),
    (partial(fixed, split_size=0), (), "split_size: got 0, expected an int of at least 1"),
    *((AttnShape.parse, (text,), SHAPE_TEXT.format(text)) for text in NO_SHAPES),
    *((AttnShape, (16, 2, size), f"AttnShape.head_dim: got {size}, {SIZES}") for size in (577, 0)),
    *((AttnShape, (16, 2, 64, size), f"AttnShape.v_head_dim: got {size}, {SIZES}") for size in (577, 0)),
    (AttnShape, (20, 1, 512, 576, True), LONG_V),
    (AttnShape, (20, 1, 576, 512, 1), "AttnShape.latent: got 1, expected True or False"),
    *((AttnShape, (q_heads, 2, 64), f"AttnShape.q_heads: got {q_heads}, {HEADS}") for q_heads in (0, 65536)),
    *((AttnShape, (q, kv, 64), f"q_heads: got {q}, expected a multiple of kv_heads = {kv}") for q, kv in UNEVEN),
)


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_refusals(call, arguments, message):
    with pytest.raises(ArgumentError) as caught:
        call(*arguments)
    assert str(caught.value) == message


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
    options = CallOptions(split_rule_layouts(facts.shape, units))
    request = Request(rows, tokens, rows, np.zeros(tokens >> 16 or 1, np.uint32))
    parts, bound = plan_call([request], options, facts).submissions, UNIT_WORK * units
    assert len(parts) == count and all(item_keys(part.items) * key_work(facts) <= bound for part in parts)
    assert [len(part.appends) for part in parts] == [part.key.appends for part in parts] == [rows] + [0] * (count - 1)
    ends = {part.slices: part.key.unmerged for part in parts}  # of each slice the last part
    assert not any(ends.values()) and len({(part.slices, part.key.states) for part in parts}) == len(ends)
    uncut = plan_call([request], options, replace(facts, device=replace(device, compute_units=1 << 20))).submissions
    nodes, whole = (
        [range(item["node_begin"], item["node_end"]) for submission in submissions for item in submission.items]
        for submissions in (parts, uncut)
    )
    assert rows > 1 or [*chain.from_iterable(nodes)] == [*chain.from_iterable(whole)]
