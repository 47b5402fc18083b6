"""The tables of ``zinc-attn plan`` that the cost model fills: layouts on a card, shared prefixes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from ..kernels.tuning import LayoutFacts
from ..tools import cost
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import SplitSpec
from ..tools.harness.tables import MISSING, figure
from ..tools.models import ModelPreset
from .arguments import parse_counts
from .terminal import model_text, print_json, print_rows

PREFIXES: Final = "2k,8k,32k"
SUFFIX: Final = 256  # keys
MODELED: Final = (  # columns
    *("context", "layout", "splits", "workgroups", "per CU", "utilization"),
    *("waits for", "µs", "ideal µs", "KV GB/s", "of peak"),
)


def print_modeled(
    model: ModelPreset,
    contexts: Sequence[int],
    layouts: Sequence[SplitSpec],
    rows: Sequence[int],
    card: cost.Card,
    dtype: str,
) -> None:
    """The model's word on a single split, the layouts asked for, and the best split count; for several rows their word
    alone, and the time over one row's."""
    print(f"\nmodeled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)")
    several = list(rows) != [1]
    lines = []
    for context, q_len in product(contexts, rows):
        plans = {
            layout.label: layout.plan(context, model.shape, LayoutFacts(card.compute_units), dtype, q_len)
            for layout in ((SplitSpec("1", num_splits=1), *layouts) if not several else layouts)
        }
        if not several:
            plans["best"] = cost.best_splits(context, model.shape, card, dtype)[0]
        for label, plan in plans.items():
            p = cost.predict_call(plan, card, dtype)
            times = (figure(x) for x in (p.total_us, p.ideal_us, p.gb_s))
            counts = (f"{p.splits:,}", f"{p.workgroups:,}", figure(p.workgroups_per_cu), f"{p.utilization:.1%}")
            line = (f"{context:,}", label, *counts, p.bound, *times, f"{p.fraction:.1%}")
            if several:
                one = cost.predict(replace(plan, q_len=1), card, dtype)
                line = (str(q_len), *line, f"{p.total_us / one.total_us:.2f}")
            lines.append(line)
    print_rows(["rows", *MODELED, "of one row's"] if several else MODELED, lines)


def run_requests(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
    """What a shared prefix saves."""
    suffix = SUFFIX if args.suffix is None else args.suffix
    prefixes, counts = parse_contexts(args.prefix or PREFIXES, "prefix"), parse_counts("requests", args.requests)
    found = [
        cost.predict_cascade(model.shape, card, count, prefix, suffix, args.dtype)
        for prefix in prefixes
        for count in counts
    ]
    if args.json:
        print_json(one.to_dict() for one in found)
        return 0
    print(f"{model_text(model, args.dtype)}, {card.compute_units} compute units, {suffix:,} keys of a request's own")
    print(f"modeled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)")
    columns = "prefix", "requests", "at a time", "keys read", "without", "µs", "without", "ratio", "pays"
    rows = (
        (
            f"{one.prefix:,}",
            str(one.requests),
            str(one.rows_each),
            f"{one.keys_read:,}",
            f"{one.keys_alone:,}",
            figure(one.total_us),
            figure(one.alone_us),
            f"{one.speed_up:.2f}",
            "yes" if one.pays else "no" if one.rows_each > 1 else MISSING,
        )
        for one in found
    )
    print_rows(columns, rows)
    print("at a time: requests that a workgroup serves on the shared keys; 1: none shared, it would not pay.")
    return 0
