"""``zinc-attn plan --arithmetic``: what matrix units save where a call has many query rows, as the model says."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Final

from ..errors import ArgumentError
from ..tools import cost
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.tables import figure
from ..tools.models import ModelPreset
from .arguments import DEFAULT_CONTEXTS, parse_counts
from .terminal import arithmetic_text, model_text, print_json, print_rows

ROWS: Final = "1,16,512"
COLUMNS: Final = ("context", "rows", "runs by", "submissions", "workgroups", "µs", "canonical µs", "ratio", "TFLOPS")


def run_arithmetic(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
    """Print the modeled call of each context and number of rows beside the canonical one."""
    contexts, rows = parse_contexts(args.contexts or DEFAULT_CONTEXTS), parse_counts("rows", args.rows or ROWS)
    if max(rows) > min(contexts):
        raise ArgumentError(f"rows: got {max(rows)} at {min(contexts)} keys, expected at most as many rows as keys")
    found = []
    for context, count in product(contexts, rows):
        call = model.shape, card, count, context, args.dtype
        found.append((cost.predict_rows(*call, args.arithmetic), cost.predict_rows(*call)))
    if args.json:
        asked = {"asked": args.arithmetic}
        print_json(one.to_dict() | asked | {"canonical_us": canonical.total_us} for one, canonical in found)
        return 0
    where = f"{card.compute_units} compute units"
    print(f"{model_text(model, args.dtype)}, {where}{arithmetic_text(args.arithmetic)}")
    print(f"modeled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)")
    lines = []
    for one, canonical in found:
        counts = f"{one.context:,}", f"{one.rows:,}", one.arithmetic, f"{one.submissions:,}", f"{one.workgroups:,}"
        times = figure(one.total_us), figure(canonical.total_us), f"{canonical.total_us / one.total_us:.2f}"
        lines.append((*counts, *times, figure(one.tflops)))
    print_rows(COLUMNS, lines)
    print("ratio: canonical time over this one. The rows are the last of their context, as in a prompt's chunk.")
    return 0
