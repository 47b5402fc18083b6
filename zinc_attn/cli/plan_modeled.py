"""The tables of ``zinc-attn plan`` that the cost model fills: layouts on a card, shared prefixes, matrix units."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from ..errors import ArgumentError
from ..kernels.tuning import LayoutFacts
from ..tools import cost
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import SplitSpec
from ..tools.harness.tables import MISSING, figure
from ..tools.models import ModelPreset
from .arguments import DEFAULT_CONTEXTS, parse_counts
from .terminal import arithmetic_text, model_text, print_json, print_rows

PREFIXES: Final = "2k,8k,32k"
SUFFIX: Final = 256  # keys
MATRIX_ROWS: Final = "1,16,512"
Columns = Mapping[str, Callable[[Any], str]]  # a cell of a record, by the column's name

LAYOUTS: Final[Columns] = {
    "splits": lambda p: f"{p.splits:,}",
    "workgroups": lambda p: f"{p.workgroups:,}",
    "per CU": lambda p: figure(p.workgroups_per_cu),
    "utilization": lambda p: f"{p.utilization:.1%}",
    "waits for": lambda p: p.bound,
    "µs": lambda p: figure(p.total_us),
    "ideal µs": lambda p: figure(p.ideal_us),
    "KV GB/s": lambda p: figure(p.gb_s),
    "of peak": lambda p: f"{p.fraction:.1%}",
}
CASCADE: Final[Columns] = {
    "prefix": lambda one: f"{one.prefix:,}",
    "requests": lambda one: str(one.requests),
    "at a time": lambda one: str(one.rows_each),
    "keys read": lambda one: f"{one.keys_read:,}",
    "without": lambda one: f"{one.keys_alone:,}",
    "µs": lambda one: figure(one.total_us),
    "without µs": lambda one: figure(one.alone_us),
    "ratio": lambda one: f"{one.speed_up:.2f}",
    "pays": lambda one: "yes" if one.pays else "no" if one.rows_each > 1 else MISSING,
}
MATRIX: Final[Columns] = {  # of (modeled, canonical)
    "context": lambda pair: f"{pair[0].context:,}",
    "rows": lambda pair: f"{pair[0].rows:,}",
    "runs by": lambda pair: pair[0].arithmetic,
    "submissions": lambda pair: f"{pair[0].submissions:,}",
    "workgroups": lambda pair: f"{pair[0].workgroups:,}",
    "µs": lambda pair: figure(pair[0].total_us),
    "canonical µs": lambda pair: figure(pair[1].total_us),
    "ratio": lambda pair: f"{pair[1].total_us / pair[0].total_us:.2f}",
    "TFLOPS": lambda pair: figure(pair[0].tflops),
}


def print_columns(columns: Columns, records: Iterable[Any]) -> None:
    """The table of these columns on stdout."""
    print_rows(list(columns), ([cell(record) for cell in columns.values()] for record in records))


def modeled_for(card: cost.Card) -> str:
    """What stands over a table of modeled times."""
    return f"modeled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)"


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
    print(f"\n{modeled_for(card)}")
    several, lines = list(rows) != [1], []
    for context, q_len in product(contexts, rows):
        specs = layouts if several else (SplitSpec("1", num_splits=1), *layouts)
        facts = LayoutFacts(card.compute_units)
        plans = {spec.label: spec.plan(context, model.shape, facts, dtype, q_len) for spec in specs}
        if not several:
            plans["best"] = cost.best_splits(context, model.shape, card, dtype)[0]
        for label, plan in plans.items():
            p = cost.predict_call(plan, card, dtype)
            line = [f"{context:,}", label, *(cell(p) for cell in LAYOUTS.values())]
            if several:
                one = cost.predict(replace(plan, q_len=1), card, dtype)
                line = [str(q_len), *line, f"{p.total_us / one.total_us:.2f}"]
            lines.append(line)
    names = ["context", "layout", *LAYOUTS]
    print_rows(["rows", *names, "of one row's"] if several else names, lines)


def run_requests(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
    """What a shared prefix saves."""
    suffix = SUFFIX if args.suffix is None else args.suffix
    prefixes, counts = parse_contexts(args.prefix or PREFIXES, "prefix"), parse_counts("requests", args.requests)
    calls = product(prefixes, counts)
    found = [cost.predict_cascade(model.shape, card, count, prefix, suffix, args.dtype) for prefix, count in calls]
    if args.json:
        print_json(one.to_dict() for one in found)
        return 0
    print(f"{model_text(model, args.dtype)}, {card.compute_units} compute units, {suffix:,} keys of a request's own")
    print(modeled_for(card))
    print_columns(CASCADE, found)
    print("at a time: requests that a workgroup serves on the shared keys; 1: none shared, it would not pay.")
    return 0


def run_arithmetic(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
    """What matrix units save in calls of many query rows, beside the canonical kernels."""
    contexts = parse_contexts(args.contexts or DEFAULT_CONTEXTS)
    rows = parse_counts("rows", args.rows or MATRIX_ROWS)
    if max(rows) > min(contexts):
        raise ArgumentError(f"rows: got {max(rows)} at {min(contexts)} keys, expected at most as many rows as keys")
    calls = [(model.shape, card, count, context, args.dtype) for context, count in product(contexts, rows)]
    found = [(cost.predict_rows(*call, args.arithmetic), cost.predict_rows(*call)) for call in calls]
    if args.json:
        asked = {"asked": args.arithmetic}
        print_json(one.to_dict() | asked | {"canonical_us": canonical.total_us} for one, canonical in found)
        return 0
    where = f"{card.compute_units} compute units"
    print(f"{model_text(model, args.dtype)}, {where}{arithmetic_text(args.arithmetic)}")
    print(modeled_for(card))
    print_columns(MATRIX, found)
    print("ratio: canonical time over this one. The rows are the last of their context, as in a prompt's chunk.")
    return 0
