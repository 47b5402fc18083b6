"""``zinc-attn plan --measured``: what a card took, from the rows of bench and sweep, beside what the model says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from ..errors import ArgumentError
from ..tools import cost
from ..tools.harness.tables import MISSING, figure
from .terminal import print_json, print_rows, say

COLUMNS: Final = (
    *("shape", "dtype", "context", "rows", "layout", "runtime", "clock", "measured\nµs", "modeled\nµs", "ratio"),
    *("pass 1\nµs", "modeled\nµs", "ratio", "gap, pass 2\nµs", "modeled\nµs", "ratio"),
)
OTHERS: Final = (  # arguments of plan that the rows answer
    *("model", "shape", "contexts", "splits", "rows", "device", "draw", "requests", "prefix", "suffix", "arithmetic"),
)


def run_measured(args: argparse.Namespace) -> int:
    """Print a line per measured point. ArgumentError where the file has none, or with an argument of the planner."""
    for name in OTHERS:
        if getattr(args, name) not in (None, "canonical"):
            raise ArgumentError(f"{name}: got --{name} with --measured, expected neither: the file's rows say it")
    path, card = Path(args.measured), named_card(args)
    rows = cost.read_rows(path)
    try:
        points, left_out = cost.measured_points(rows)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if not points:
        expected = "expected verified calls of bench --json or sweep --json"
        raise ArgumentError(f"{path}: got no row that the model covers ({reasons or 'the file is empty'}), {expected}")
    found = cost.compare(points, card)
    if args.json:
        print_json(one.to_dict() for one in found)
    else:
        print_comparisons(found)
    if reasons:
        say(f"rows that the model does not cover: {reasons}")
    return 0


def named_card(args: argparse.Namespace) -> cost.Card | None:
    """The card that --card or --cu names."""
    if args.card:
        return cost.find_card(args.card)
    return None if args.cu is None else cost.card_with(args.cu)


def print_comparisons(found: list[cost.Comparison]) -> None:
    """The table, by device and card, and what its words mean."""
    for device, chosen in dict.fromkeys((one.point.device, one.chosen) for one in found):
        mine = [one for one in found if (one.point.device, one.chosen) == (device, chosen)]
        print(f"{device} ({mine[0].point.driver}); modeled for {chosen.card.title}, chosen by {chosen.by}")
        print_rows(COLUMNS, [comparison_cells(one) for one in mine])
        print()
    compilers = cost.prediction_compilers()
    print(f"Ratios are measured over modeled. Instruction counts: {compilers['counted_mesa']}, SPIR-V of")
    print(f"{compilers['counted_glsl']}; this SPIR-V: {compilers['glsl'] or 'not built'}. The model times the begin of")
    print("pass 1 to the end of pass 2, as the device clock does; the host clock adds the submission and the wait,")
    print("and for a sweep append and readback.")
    if not all(one.same_plan for one in found):
        print("*: measured with another layout than this version's, which is the one that is modeled.")


def comparison_cells(one: cost.Comparison) -> list[str]:
    """A line of COLUMNS."""
    point, modeled = one.point, one.modeled
    layout = point.layout if one.same_plan else f"{point.layout}*"
    cells = [point.shape, point.dtype, f"{point.context:,}", str(point.q_len), layout, point.runtime, point.clock]
    for part in ("total", "pass1", "merge"):
        ratio = one.ratio if part == "total" else getattr(one, f"{part}_ratio")
        cells += [figure(getattr(of, f"{part}_us")) for of in (point, modeled)]
        cells.append(MISSING if ratio is None else f"{ratio:.2f}")
    return cells
