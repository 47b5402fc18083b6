"""The recordings that growth needs, found from few lengths, are those of every length."""

from dataclasses import replace

import numpy as np
import pytest
from support import CPU, GPU

from zinc_attn import AttnShape
from zinc_attn.planning.call import plan_call
from zinc_attn.planning.growth import growth_keys
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request
from zinc_attn.planning.layouts import fixed_layouts, split_rule_layouts


def keys_of(lengths, batch, q_len, options, facts):
    """The keys of calls of these lengths, each of which is planned."""
    keys = set()
    for length in lengths:
        pages = -(-length // facts.page_size)
        tables = np.arange(batch * pages, dtype=np.uint32).reshape(batch, pages)
        requests = [Request(q_len, length, q_len, table) for table in tables]
        keys |= {submission.key for submission in plan_call(requests, options, facts).submissions}
    return keys


@pytest.mark.parametrize(
    ("shape", "kind", "units", "batch", "q_len", "window", "splits"),
    [
        ("16/2/256", "discrete", 64, 1, 1, None, None),
        ("32/8/128", "discrete", 56, 1, 1, None, None),
        ("9/3/64", "cpu", 2, 1, 1, 700, None),
        ("9/3/64", "discrete", 64, 5, 1, 1000, None),
        ("32/4/128", "discrete", 64, 3, 5, None, 7),
        ("32/8/128", "discrete", 1, 1, 1, None, None),
        ("32/32/128", "discrete", 2, 1, 1, None, None),  # workgroups walk from 2,049 keys on
    ],
)
@pytest.mark.parametrize("short", (False, True))
def test_few_lengths_stand_for_all(short, shape, kind, units, batch, q_len, window, splits):
    """Also where a submission has 100 workgroups."""
    parsed, tokens = AttnShape.parse(shape), 2200 // q_len * q_len
    info = replace(GPU, kind=kind, compute_units=units, max_workgroups=(100 if short else 65535,) * 3)
    facts = CallFacts(info, parsed, 256)
    asked = fixed_layouts(parsed, num_splits=splits, split_size=None) if splits else None
    layouts = asked or split_rule_layouts(parsed, units)
    options = CallOptions(layouts, window)
    result = growth_keys(tokens, batch, q_len, options, facts, by_rule=layouts.by_rule)
    every = keys_of(range(q_len, tokens + 1, q_len), batch, q_len, options, facts)
    assert every <= result and len(result) < len(every) + 12


def test_rows_before_a_cut_share_another_node_from_the_middle_of_a_leaf_on():
    shape, q_len = AttnShape(4, 2, 64), 36
    facts = CallFacts(replace(CPU, max_workgroups=(65535, 65535, 33)), shape, 256)
    options = CallOptions(split_rule_layouts(shape, 2))
    result = growth_keys(7744, 1, q_len, options, facts, by_rule=True)
    assert keys_of(range(7681, 7745), 1, q_len, options, facts) <= result
    assert {key.rows for key in result} >= {4}, "the rows behind the cut"
