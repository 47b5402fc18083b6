"""The recordings that growth needs, found from few lengths, are those of every length."""

from __future__ import annotations

import numpy as np
import pytest

from zinc_attn import AttnShape
from zinc_attn.kernels.tuning import LayoutFacts
from zinc_attn.planning.call import CallOptions, DeviceFacts, Request, plan_call
from zinc_attn.planning.growth import growth_keys
from zinc_attn.planning.layouts import fixed_layouts, split_rule_layouts


@pytest.mark.parametrize("uploads", (False, True))
@pytest.mark.parametrize(
    ("shape", "kind", "units", "batch", "q_len", "window", "splits"),
    [
        ("16/2/256", "discrete", 64, 1, 1, None, None),
        ("32/8/128", "discrete", 56, 1, 1, None, None),
        ("9/3/64", "cpu", 2, 1, 1, 700, None),
        ("9/3/64", "discrete", 64, 5, 1, 1000, None),
        ("32/4/128", "discrete", 64, 3, 5, None, 7),
        ("32/8/128", "one-wave", 2, 1, 1, None, None),
        ("32/8/128", "discrete", 2, 1, 1, None, None),  # the loop build from 1,024 keys on
    ],
)
def test_few_lengths_stand_for_all(shape, kind, units, batch, q_len, window, splits, uploads):
    parsed, tokens = AttnShape.parse(shape), 3000 // q_len * q_len
    facts = DeviceFacts(parsed, kind, units, (65535, 65535, 65535), 1 << 30, 256, uploads)
    device = LayoutFacts(units, "discrete", False) if kind == "one-wave" else LayoutFacts(units, kind)
    kind = device.kind
    if splits:
        layouts = fixed_layouts(parsed, "f16", device, num_splits=splits, split_size=None)
    else:
        layouts = split_rule_layouts(parsed, "f16", device)
    options = CallOptions(layouts, window)
    found = growth_keys(tokens, batch, q_len, options, facts)
    needed = set()
    for length in range(q_len, tokens + 1, q_len):
        pages = -(-length // 256)
        tables = np.arange(batch * pages, dtype=np.uint32).reshape(batch, pages)
        requests = [Request(q_len, length, q_len, table) for table in tables]
        needed |= {submission.key for submission in plan_call(requests, options, facts).submissions}
    assert needed <= found and len(found) < 12
