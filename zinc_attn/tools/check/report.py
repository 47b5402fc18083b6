"""``zinc-attn check`` on the command line: its arguments, its lines and its exit status."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError
from ...runtime.device import RUNTIMES, Device, list_devices
from ..harness.files import write_file
from ..harness.progress import Progress
from ..harness.split_spec import parse_split_specs
from .cases import CONTEXTS, DTYPES, SHAPES, Case
from .outcome import PROPERTIES, Fault, Outcome
from .properties import check, title
from .record import Digests, describe, load_record, make_entry, record_text

LAYOUTS: Final = "1,2,8,64,auto,size:256,size:2048"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zinc-attn check``."""
    installed = RUNTIMES if importlib.util.find_spec("kp") else ("vulkan",)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small fixed set of cases, in place of the matrix")
    add("--shapes", metavar="LIST", help=f"Q/KV/D (default: {SHAPES})")
    add("--dtypes", metavar="LIST", help=f"dtypes of K and V (default: {DTYPES})")
    add("--contexts", metavar="LIST", help=f"numbers of keys, k = 1024 (default: {CONTEXTS})")
    masking = "none, or some of window=KEYS, softcap=X, scale=X, sinks, joined by +"
    add("--masking", metavar="LIST", help=f"{masking} (default: none, and the few cases that have some)")
    add("--layouts", default=LAYOUTS, metavar="LIST", help="splits, auto or size:KEYS (default: %(default)s)")
    add("--devices", metavar="LIST", help="all, or indices or pieces of names (default: the best one)")
    add("--runtimes", default=",".join(installed), metavar="LIST", help="dispatchers (default: %(default)s)")
    add("--record", metavar="FILE", type=Path, help="write the digests, for another machine's --against")
    add("--against", metavar="FILE", type=Path, help="compare with another machine's digests, too")
    add("--json", action="store_true", help="JSON lines on stdout, one per case, then one per device")


def run(args: argparse.Namespace, progress_bar: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Check, print, and write the record. 0: all bits are equal; 1: some differ; 2: a case was refused."""
    cases, splits = chosen_cases(args), parse_split_specs(args.layouts)
    against = load_record(args.against) if args.against else {}
    names = [str(case) for case in cases]
    width = max(22, *map(len, names)) + 2
    if against and not any(name in digests for digests in against.values() for name in names):
        raise ArgumentError(f"{args.against}: got none of the {len(names)} cases of this run, expected some of them")

    def print_outcome(outcome: Outcome) -> None:
        print("\n".join(outcome_lines(outcome, args.json, width)), flush=True)

    with ExitStack() as stack:
        devices = open_devices(stack, args)
        with progress_bar() as progress:
            outcomes = check(devices, cases, splits, against=against, progress=progress, on_outcome=print_outcome)
        entries = []
        for device in devices:
            digests = {str(o.case): o.digest for o in outcomes if o.subject == title(device) and o.result}
            entries.append(make_entry(digests, **describe(device)))
    lines = [json.dumps(entry) for entry in entries] if args.json else summary(outcomes, entries, against)
    print("\n".join(lines))
    if args.record:
        write_file(args.record, record_text(entries).encode())
        print(f"written: {args.record}", file=sys.stderr)
    found = {outcome.status for outcome in outcomes}
    return 1 if "FAIL" in found else 2 if "refused" in found else 0


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the options name."""
    asked = args.shapes, args.dtypes, args.contexts, args.masking
    if args.quick and any(asked):
        raise ArgumentError("quick: got --quick with --shapes, --dtypes, --contexts or --masking, expected either")
    if any(asked):
        return Case.matrix(*(a or b for a, b in zip(asked, (SHAPES, DTYPES, CONTEXTS, "none"), strict=True)))
    return Case.quick() if args.quick else Case.default()


def open_devices(stack: ExitStack, args: argparse.Namespace) -> list[Device]:
    """Every device that --devices names, on every dispatcher."""
    chosen: list[Any] = [None]
    if args.devices:
        every = args.devices == "all"
        chosen = [d.index for d in list_devices()] if every else [name.strip() for name in args.devices.split(",")]
    runtimes = dict.fromkeys(name.strip() for name in args.runtimes.split(","))
    return [stack.enter_context(Device.open(name, runtime=by)) for name, by in product(chosen, runtimes)]


def outcome_lines(outcome: Outcome, as_json: bool, width: int) -> Iterator[str]:
    """One line, the case's name ``width`` wide, and one for each property that fails: the first variation's."""
    if as_json:
        yield json.dumps(outcome.to_dict())
        return
    name = f"{outcome.case!s:<{width}}"
    yield f"{outcome.status:<8}{name}{outcome.digest[:16]:<18}{outcome.verified:<24}{outcome.subject}"
    if outcome.refused:
        yield f"        {outcome.refused}"
    seen: dict[int, list[Fault]] = {}
    for fault in outcome.faults:
        seen.setdefault(fault.property, []).append(fault)
    for faults in seen.values():
        more = f" (and in {len(faults) - 1} more variations)" if len(faults) > 1 else ""
        yield f"        {faults[0]}{more}"


def summary(
    outcomes: Sequence[Outcome], entries: Sequence[dict[str, Any]], against: Mapping[str, Digests]
) -> Iterator[str]:
    """The properties over all cases, and the digests of the run."""
    yield ""
    for prop, text in PROPERTIES.items():
        shown = sum(outcome.shown.get(prop, 0) for outcome in outcomes)
        bad = sum(any(fault.property == prop for fault in outcome.faults) for outcome in outcomes)
        word = f"pass, {shown} comparisons" if shown else "not shown"
        word = f"FAIL in {bad} of {len(outcomes)} cases" if bad else word
        yield f"{prop:>2} {text:<42}{word}"
    for source, digests in against.items():
        mine = {str(outcome.case) for outcome in outcomes}
        yield f"{source}: has {len(mine & set(digests))} of the {len(mine)} cases"
    for entry in entries:
        yield f"run {entry['run']}  {entry['made_by']['device']}, {entry['made_by']['runtime']}"
