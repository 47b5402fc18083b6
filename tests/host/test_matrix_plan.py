"""Work items for the matrix units: every row meets every leaf that it sees once, with the keys that it sees."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support import GPU

from zinc_attn.canonical.arguments import key_ranges
from zinc_attn.kernels import matrix
from zinc_attn.kernels.dispatches import MatrixVariant, attend_call
from zinc_attn.kernels.matrix import MatrixFacts, MatrixFragment, matrix_workgroup
from zinc_attn.kernels.records import Records
from zinc_attn.kernels.tuning import SCRATCH_BYTES
from zinc_attn.planning.call import cut_call, plan_call
from zinc_attn.planning.duration import key_work, row_cost, work_bound
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request
from zinc_attn.planning.items import Visible, item_records
from zinc_attn.planning.layouts import fixed_layouts, split_rule_layouts
from zinc_attn.planning.splits import SplitPlan
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.cost.cards import FRAGMENT, RDNA4_UNITS

SHAPE = AttnShape(8, 2, 64)


def met(items: Records, one_row: bool) -> set[tuple[int, int, int, int]]:
    """(row, node, first, limit) of the keys that rows meet, as the kernels read the items."""
    pairs = set()
    for item in items:
        last = int(item["row"]) + int(item["rows"]) - 1
        rows, nodes = range(int(item["row"]), last + 1), range(item["node_begin"], item["node_end"])
        for row, node in itertools.product(rows, nodes):
            before = (last - row) * int(item["row_step"])
            first, limit = max(int(item["first"]) - before, 512 * node), int(item["limit"]) - before
            limit = min(limit, 512 * node + 512)
            if first < limit:
                assert (row, node, first, limit) not in pairs
                pairs.add((row, node, first, limit))
    assert not one_row or all(items["rows"] == 1)
    return pairs


def visibles() -> list[tuple[str, Visible]]:
    rng = np.random.default_rng(3)
    cases = [
        (f"{tokens} {rows} {causal} {window}", key_ranges(tokens, rows, causal, window))
        for tokens, rows, causal, window in itertools.product((0, 5, 130, 700), (1, 37), (True, False), (None, 1, 100))
        if causal or window is None
    ]
    limits = np.minimum(np.arange(600, 640), 610)  # a shard that ends among the rows
    firsts = np.maximum(np.arange(500, 540), 512)  # and begins among their windows
    random = np.sort(rng.integers(0, 600, 40))
    return [*cases, ("shard", (firsts, limits)), ("any", (random // 2, random + 1))]


@pytest.mark.parametrize(("name", "visible"), visibles(), ids=[name for name, _ in visibles()])
@pytest.mark.parametrize("rows_each", (2, 4, 8))
def test_rows_meet_what_they_see(name, visible, rows_each):
    tokens = int(visible[1].max())
    for splits in (1, 3):
        plan = SplitPlan.fixed(tokens, SHAPE, num_splits=splits, q_len=len(visible[0]))
        ranges = np.array(plan.node_ranges())
        records = item_records(visible, ranges, rows_each=rows_each)
        assert met(records, False) == met(item_records(visible, ranges), True)
        assert np.all(records["rows"] <= rows_each)
    if name == "700 37 True None" and rows_each > 1:
        assert len(item_records(visible, np.array([[0, 2]]), rows_each=rows_each)) == -(-37 // rows_each)


def test_rows_that_see_nothing_have_an_item_where_there_is_one_pass():
    none = np.zeros(3, np.int64)
    (item,) = item_records((none, none), np.array([[0, 1]]), keep_empty=True, rows_each=4)
    assert (item["rows"], item["node_begin"], item["node_end"], item["limit"]) == (3, 0, 1, 0)


@pytest.mark.parametrize("text", ("16/2/256", "32/8/128", "9/3/64", "71/1/64", "20/1/576/512/latent", "1/1/1"))
def test_workgroups(text):
    """As many vectors as are there and fit; 64 KiB are enough for every shape, 32 KiB for all but the largest K."""
    shape = AttnShape.parse(text)
    small = MatrixFacts(MatrixFragment(8, 8, 8), 32768, 1024, MatrixFragment(8, 8, 8))
    for vectors, facts, integer in itertools.product((1, 16, 20, 64, 500), (RDNA4_UNITS, small), (False, True)):
        for kind in ("discrete", "cpu"):
            group = matrix_workgroup(shape, facts, kind, vectors, integer)
            assert group is not None and group.size <= matrix.MAX_WORKGROUP_SIZE and group.size % 32 == 0
            inputs = shape.k_dim, shape.v_dim, group.vectors, facts.fragment.m, group.unrolled, integer, 0, 0
            assert matrix.WORKGROUP_RULE.values(*map(int, inputs))["SHARED_BYTES"] <= facts.shared_bytes
            assert group.waves == group.unrolled == (kind == "discrete")
            assert group.vectors % facts.fragment.m == 0 and (group.vectors < 2 * max(vectors, facts.fragment.m))
    most = matrix_workgroup(shape, RDNA4_UNITS, "discrete", 64)
    assert most is not None
    call = attend_call(MatrixVariant(shape, "f16", FRAGMENT, most, 64), 5, 1, "out")
    assert call.groups[0] * call.spec[3] >= shape.group


@pytest.mark.parametrize("arithmetic", ("matrix-prefill", "integer"))
@pytest.mark.parametrize(("rows", "matrices"), (((1, 1), False), ((4, 4), True), ((3, 4), None)))
def test_matrix_prefill_is_for_16_vectors(rows, matrices, arithmetic):
    """Requests on either side of it go in submissions of their own, of which the first appends."""
    layouts = split_rule_layouts(SHAPE, 64)
    facts = CallFacts(replace(GPU, matrix=RDNA4_UNITS), SHAPE, 64, units=True)
    requests = [Request(n, 300, n, np.arange(5, dtype=np.uint32)) for n in rows]
    options = CallOptions(layouts, arithmetic=arithmetic)
    submissions = plan_call(requests, options, facts).submissions
    assert [part.key.matrix is not None for part in submissions] == ([False, True] if matrices is None else [matrices])
    assert [len(part.appends) for part in submissions] == [sum(rows), *([0] * (len(submissions) - 1))]
    without = plan_call(requests, replace(options, arithmetic="integer"), replace(facts, units=False)).submissions
    assert [part.key.matrix for part in without] == [None]
    everything = plan_call(requests, CallOptions(layouts, arithmetic="matrix"), facts).submissions
    assert [case.key.matrix is not None for case in everything] == [True]


def test_the_key_names_the_workgroup():
    """Two calls that need other workgroups have other recordings."""
    layouts = fixed_layouts(SHAPE, num_splits=2, split_size=None)
    facts = CallFacts(replace(GPU, matrix=RDNA4_UNITS), SHAPE, 64)
    keys = set()
    for rows in (1, 4, 16):
        request = Request(rows, 300, 0, np.arange(5, dtype=np.uint32))
        (submission,) = plan_call([request], CallOptions(layouts, arithmetic="matrix"), facts).submissions
        assert submission.key.matrix is not None
        keys.add(submission.key.matrix.vectors)
    assert keys == {16, 64}


@pytest.mark.parametrize(("text", "tokens"), [("16/2/512/64", 29127), ("16/2/256", 1 << 17), ("16/2/256", 1 << 20)])
def test_walking_rows_are_bounded(text, tokens):
    """By the size of q, where it is more than that of the output, and by the work of one submission."""
    shape = AttnShape.parse(text)
    states = SCRATCH_BYTES // (4 * shape.q_heads * (shape.v_dim + 2))
    layouts = split_rule_layouts(shape, 64)
    facts, options = CallFacts(replace(GPU, matrix=RDNA4_UNITS), shape, 256), CallOptions(layouts, arithmetic="matrix")
    rows = states // row_cost(layouts(tokens, 2048, None).without_splits(), facts, True)
    _, cut = cut_call([Request(8192, tokens, 0, np.arange(tokens // 256 + 1, dtype=np.uint32))], options, facts)
    sizes = [part.end - part.begin for (part,) in cut]
    assert len(sizes) == -(-8192 // rows) and max(sizes) - min(sizes) <= 1, "as few as fit, and even"
    assert 4 * rows * shape.q_heads * max(shape.k_dim, shape.v_dim) <= SCRATCH_BYTES // 4
    assert rows * tokens * key_work(facts) <= (work_bound(facts, True) or 0)


@pytest.mark.parametrize("rows", (1, 500, 512, 2500))
def test_rows_walk_where_they_make_enough_workgroups(rows):
    """A layout of the split rule then has an item for each block of rows, the longest first, and even parts."""
    shape = AttnShape(16, 2, 256)
    facts = CallFacts(replace(GPU, matrix=RDNA4_UNITS), shape, 64)
    request = Request(rows, 8192, 0, np.arange(128, dtype=np.uint32))
    options = CallOptions(split_rule_layouts(shape, 64), arithmetic="matrix")
    submissions = plan_call([request], options, facts).submissions
    assert all(part.key.whole_context == part.key.single_pass == (rows >= 512) for part in submissions)
    if rows < 512:
        return
    assert [len(submission.rows) for submission in submissions] == ([512] if rows == 512 else [1250, 1250])
    for submission in submissions:
        assert submission.key.states >= len(submission.rows) and np.all(submission.items["node_begin"] == 0)
        assert submission.items["rows"].sum() == len(submission.rows)
        assert np.all(np.diff(submission.items["node_end"].astype(int)) <= 0)
    other = replace(options, layout=fixed_layouts(shape, num_splits=4, split_size=None))
    assert not any(submission.key.whole_context for submission in plan_call([request], other, facts).submissions)
    shard = request._replace(end=9000, shifts=np.zeros(16, np.int64))
    assert not any(submission.key.whole_context for submission in plan_call([shard], options, facts).submissions)
