"""``zinc-attn plan``: how contexts are split. Pure arithmetic, but for --device."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError
from ..kernels.tuning import LayoutFacts
from ..planning.splits import SplitPlan
from ..runtime.device import list_devices
from ..runtime.devices import choose
from ..tools import cost
from ..tools.harness.files import check_file, write_file
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from .arguments import (
    DEFAULT_COMPUTE_UNITS,
    DEFAULT_CONTEXTS,
    Subparsers,
    add_arithmetic,
    add_command,
    add_model_arguments,
    add_shared,
    chosen_model,
    parse_counts,
)
from .plan_measured import named_card, run_measured
from .plan_modeled import PREFIXES, SUFFIX, Columns, print_columns, print_modeled, run_arithmetic, run_requests
from .terminal import binary_size, model_text, need, print_json, say_written

DRAW_HINT: Final = "choose another file with --draw"
COLUMNS: Final[Columns] = {  # of a plan's record
    "context": lambda r: f"{r['context']:,}",
    "layout": lambda r: r["layout"],
    "splits": lambda r: f"{r['splits']:,}",
    "unit": lambda r: str(r["unit_keys"]),
    "build": lambda r: r["build"],
    "passes": lambda r: str(r["passes"]),
    "workgroups": lambda r: f"{r['workgroups']:,}",
    "per CU": lambda r: f"{r['workgroups_per_cu']:.4g}",
    "scratch": lambda r: binary_size(r["scratch_bytes"]),
    "fingerprint": lambda r: r["fingerprint"][:12],
}
ROWS: Final[Columns] = {"rows": lambda r: str(r["q_len"])}  # a column where --rows is given
INSTEAD: Final = {  # of an argument that does not go with others
    "prefix": "--requests",
    "suffix": "--requests",
    "device": "--card or --cu",
    "contexts": "--prefix and --suffix",
}


def add_plan(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "plan",
        "show how contexts are split",
        "Pure arithmetic: touches no device unless --device is given. The unit is the number of keys per\n"
        "partial state, the build the form of pass 1 that runs, scratch the size of the partial states.\n"
        "The layout never shows in the output bits. Times of one layer's call are modeled, not measured\n"
        "(docs/cost-model.md); ideal is K and V read once at the card's peak bandwidth. --cu N models N\n"
        "compute units like an R9700's.\n\n"
        "--requests and --prefix: a batch of requests with one new row each, whose sequences share the pages of a\n"
        "prefix; what cascade reads and takes on the card, and the batch without it.\n\n"
        "--arithmetic: calls of many query rows, --rows, by matrix units; beside them the canonical kernels.\n\n"
        "--measured: a file that bench --json or sweep --json printed on a card; each verified call beside the model.\n"
        "The card is that of the rows' device name, or --card.",
        "  zinc-attn plan --model qwen3.6-35b-a3b --contexts 1k,8k,32k,128k --cu 64\n"
        "  zinc-attn plan --model qwen3-30b-a3b --card r9700 --draw plan.png\n"
        "  zinc-attn plan --shape 16/2/256 --contexts 32k --rows 1,2,4,8\n"
        "  zinc-attn plan --shape 32/8/128 --contexts 2k,32k --rows 16,2048 --arithmetic matrix\n"
        "  zinc-attn plan --shape 32/8/128 --requests 2,8,32 --prefix 2k,32k\n"
        "  zinc-attn plan --shape 32/8/128 --splits auto,8,size:2048\n"
        "  zinc-attn plan --measured bench.jsonl --card r9700",
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add_shared(parser, "--contexts", said=DEFAULT_CONTEXTS, several=True)
    add_shared(parser, "--splits", said="auto", several=True)
    add_shared(parser, "--rows", said="1", several=True)
    add_shared(parser, "--dtype", "f16")
    add_arithmetic(parser)
    units = parser.add_mutually_exclusive_group()
    add_shared(units, "--cu", said=str(DEFAULT_COMPUTE_UNITS))
    units.add_argument("--card", metavar="C", help=f"one of {', '.join(cost.CARDS)}")
    add_shared(units, "--device", text="plan for this device, index or piece of the name; nothing is modeled")
    add("--draw", metavar="FILE.png", help="draw the modeled layouts of the largest context")
    add("--requests", metavar="B,…", help="requests that share a prefix")
    add(
        "--measured",
        metavar="FILE.jsonl",
        help="JSON lines of bench or sweep: print measured beside modeled, and the ratio",
    )
    add("--prefix", metavar="P,…", help=f"shared keys (default: {PREFIXES})")
    add("--suffix", type=int, metavar="S", help=f"keys of a request's own (default: {SUFFIX})")
    add("--json", action="store_true", help="JSON lines with full fingerprints")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Show the plans, or measured calls beside the model."""
    if args.measured is not None:
        return run_measured(args)
    refuse_others(args)
    model = chosen_model(args)
    card = None if args.device is not None else named_card(args) or cost.card_with(DEFAULT_COMPUTE_UNITS)
    if card and args.arithmetic != "canonical":
        return run_arithmetic(args, model, card)
    if card and args.requests:
        return run_requests(args, model, card)
    contexts, layouts = parse_contexts(args.contexts or DEFAULT_CONTEXTS), parse_split_specs(args.splits or "auto")
    if args.draw:
        need("matplotlib")
        check_file(Path(args.draw), DRAW_HINT)
        if card is None:
            raise ArgumentError("draw: got --device, expected --card or --cu: what is drawn is modeled for a card")
    facts = LayoutFacts(card.compute_units) if card else choose(list_devices(), args.device).layout_facts
    records = []
    rows = parse_counts("rows", args.rows or "1")
    for context, layout, q_len in product(contexts, layouts, rows):
        plan = layout.plan(context, model.shape, facts, args.dtype, q_len)
        records.append({"context": context, "layout": layout.label} | plan_record(plan, facts, args.dtype))
        if card and (args.card or args.cu is not None):
            records[-1]["modeled"] = cost.predict_call(plan, card, args.dtype).to_dict()
    if card and args.draw:
        from ..tools.plan_plots import plan_png

        write_file(Path(args.draw), plan_png(model, max(contexts), card, args.dtype), DRAW_HINT)
        say_written([Path(args.draw)])
    if args.json:
        print_json(records)
        return 0
    print(f"{model_text(model, args.dtype)}, {facts.compute_units} compute units ({facts.kind})")
    print_columns({**(ROWS if args.rows else {}), **COLUMNS}, records)
    if card:
        print_modeled(model, contexts, layouts, rows, card, args.dtype)
    return 0


def plan_record(plan: SplitPlan, facts: LayoutFacts, dtype: str) -> dict[str, Any]:
    """What --json says of a plan."""
    return {
        "splits": plan.num_splits,
        "q_len": plan.q_len,
        "unit_keys": plan.unit_keys,
        "build": plan.build_on(facts, dtype),
        "passes": plan.passes,
        "workgroups": plan.workgroups,
        "workgroups_per_cu": round(plan.workgroups / facts.compute_units, 3),
        "scratch_bytes": plan.scratch_bytes,
        "fingerprint": plan.fingerprint(),
        "shape": str(plan.shape),
        "dtype": dtype,
        "arithmetic": "canonical",
        "compute_units": facts.compute_units,
        "kind": facts.kind,
    }


def refuse_others(args: argparse.Namespace) -> None:
    """Refuse arguments that do not go with matrix units, with --requests, or without --requests."""
    checks: list[tuple[tuple[str, ...], str, str]] = [(("prefix", "suffix"), "alone", "")]
    if args.requests:
        checks = [(("contexts", "splits", "rows", "device", "draw"), "with --requests", ": --requests has a table")]
    if args.arithmetic != "canonical":
        checks.insert(0, (("splits", "device", "draw", "requests"), f"with --arithmetic {args.arithmetic}", ""))
    for names, where, why in checks:
        for name in (name for name in names if getattr(args, name) is not None):
            wanted = INSTEAD.get(name, f"one of the two{why}")
            raise ArgumentError(f"{name}: got --{name} {where}, expected {wanted}")
