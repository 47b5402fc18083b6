"""``zinc-attn plan``: how contexts are split, and what a call should take on a card. No device but with --device."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, Final

from ..kernels.device_info import DeviceInfo
from ..planning.arithmetic import check_types
from ..planning.call import call_works
from ..planning.splits import SplitPlan
from ..runtime.device import list_devices
from ..runtime.devices import choose
from ..tools import cost
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.harness.tables import figure
from .arguments import DEFAULT_COMPUTE_UNITS, DEFAULT_CONTEXTS, Subparsers, add_command, chosen_model
from .terminal import arithmetic_text, binary_size, model_text, plural, print_json, print_rows

Columns = Mapping[str, Callable[[dict[str, Any]], str]]  # a cell of a record, by the column's name
CALL: Final[Columns] = {  # of plan_record; the first columns of both tables
    "context": lambda r: f"{r['context']:,}",
    "rows": lambda r: f"{r['q_len']:,}",
    "layout": lambda r: r["layout"],
}
LAYOUT: Final[Columns] = {  # of plan_record
    "splits": lambda r: f"{r['splits']:,}",
    "states": lambda r: f"{r['states']:,}",
    "passes": lambda r: str(r["passes"]),
    "workgroups": lambda r: f"{r['workgroups']:,}",
    "per CU": lambda r: f"{r['workgroups_per_cu']:.4g}",
    "submissions": lambda r: f"{r['submissions']:,}",
    "of bound": lambda r: "-" if r["work_bound"] is None else f"{r['work'] / r['work_bound']:.2%}",
    "scratch": lambda r: binary_size(r["scratch_bytes"]),
    "fingerprint": lambda r: r["fingerprint"][:12],
}
MODELED: Final[Columns] = {  # of the Prediction "p"
    "KV": lambda r: binary_size(r["p"].kv_bytes),
    "workgroups": lambda r: f"{r['p'].workgroups:,}",
    "per CU": lambda r: figure(r["p"].workgroups_per_cu),
    "utilization": lambda r: f"{r['p'].utilization:.1%}",
    "waits for": lambda r: r["p"].bound,
    "µs": lambda r: figure(r["p"].total_us),
    "ideal µs": lambda r: figure(r["p"].ideal_us),
    "KV GB/s": lambda r: figure(r["p"].gb_s),
    "of peak": lambda r: f"{r['p'].fraction:.1%}",
}


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.model()
    parser.share("--contexts", DEFAULT_CONTEXTS, several=True)
    parser.share("--splits", "auto", several=True)
    parser.share("--rows", "1", several=True)
    parser.share("--dtype", "f16")
    parser.arithmetic(("canonical", "fused", "integer"))
    units = parser.add_mutually_exclusive_group()
    parser.share("--cu", said=str(DEFAULT_COMPUTE_UNITS), group=units)
    units.add_argument("--card", metavar="C", help=f"one of {', '.join(cost.CARDS)}")
    parser.share("--device", text="plan for this device, index or piece of the name; nothing is modeled", group=units)
    parser.flag("--json", "JSON lines with full fingerprints")


def run(args: argparse.Namespace) -> int:
    """Show the plans, and the model's times on a card."""
    model, card = chosen_model(args), chosen_card(args)
    check_types(args.arithmetic, args.dtype)
    contexts, layouts = parse_contexts(args.contexts), parse_split_specs(args.splits)
    device = card.info if card else choose(list_devices(), args.device)
    known = card or cost.card_of(device.name)
    shares = cost.issue_shares(model.shape, known, args.dtype) if known else None
    records, modeled = [], []
    for context, layout, q_len in product(contexts, layouts, parse_contexts(args.rows, "rows")):
        plan = layout.plan(context, model.shape, device.split_units, q_len)
        records.append({"context": context, "layout": layout.label} | plan_record(plan, device, args.dtype))
        bound, works = call_works(plan, layout.layouts(model.shape, device.split_units), device, args.arithmetic)
        records[-1] |= {"submissions": len(works), "work": max(works), "work_bound": bound}
        records[-1]["issue_shares"] = shares
        if card:
            modeled.append(cost.predict_call(plan, card, args.dtype, args.arithmetic))
            records[-1] |= {"arithmetic": args.arithmetic, "modeled": modeled[-1].to_dict()}
    if args.json:
        print_json(records)
        return 0
    print(f"{model_text(model, args.dtype)}, {plural(device.compute_units, 'compute unit')} ({device.kind})")
    if bound is not None:
        print(f"of bound: the longest submission's share of {bound:.3g} products, a second of a slow GPU")
    if shares:
        print(f"issue against memory, many keys: {issue_text(shares)} (docs/cost-model.md)")
    print_columns({**CALL, **LAYOUT}, records)
    if card:
        assumed = f"; assumed of it: {', '.join(card.assumed)}" if card.assumed else ""
        layers = model.attention_layers
        print(f"\nmodeled for {card.title}{assumed}{arithmetic_text(args.arithmetic)} (docs/cost-model.md)")
        print(f"µs: of one layer; tokens/s: of {plural(layers, 'layer')}")
        rates = {"tokens/s": lambda r: figure(r["p"].rows * 1e6 / (layers * r["p"].total_us))}
        print_columns({**CALL, **MODELED, **rates}, (r | {"p": p} for r, p in zip(records, modeled, strict=True)))
    return 0


def issue_text(shares: Mapping[str, float]) -> str:
    """``issue_shares`` in words."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def print_columns(columns: Columns, records: Iterable[dict[str, Any]]) -> None:
    """The table of these columns on stdout."""
    print_rows(list(columns), ([cell(record) for cell in columns.values()] for record in records))


def chosen_card(args: argparse.Namespace) -> cost.Card | None:
    """The card that --card or --cu names; None with --device, for which nothing is modeled."""
    if args.device is not None:
        return None
    if args.card is not None:
        return cost.find_card(args.card)
    return cost.card_with(DEFAULT_COMPUTE_UNITS if args.cu is None else args.cu)


def plan_record(plan: SplitPlan, device: DeviceInfo, dtype: str) -> dict[str, Any]:
    """A plan as --json shows it."""
    return {
        "splits": plan.num_splits,
        "q_len": plan.q_len,
        "states": plan.states,
        "passes": plan.passes,
        "workgroups": plan.workgroups,
        "workgroups_per_cu": round(plan.workgroups / device.compute_units, 3),
        "scratch_bytes": plan.scratch_bytes,
        "fingerprint": plan.fingerprint(),
        "shape": str(plan.shape),
        "dtype": dtype,
        "compute_units": device.compute_units,
        "kind": device.kind,
    }
