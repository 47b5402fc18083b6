"""``zinc-attn check --graph``: its lines and its exit status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..runtime.device import Device
from ..tools.check.properties import title
from ..tools.check.record import Digests, load_record, make_entry, maker, record_text
from ..tools.graph.check import GraphOutcome, check_graph, name_of
from ..tools.harness.files import check_file, write_file
from .terminal import say_written


def run_graph(args: argparse.Namespace, devices: Sequence[Device], hint: str) -> int:
    """Check, print, and write the record. 0: all bits are equal; 1: some differ."""
    if args.record:
        check_file(args.record, hint)
    against = load_record(args.against) if args.against else {}
    entries, failed = [], False
    for device in devices:
        found = {}
        for outcome in check_graph(device):
            faults = [one for one in (outcome.fault, *_others(outcome, against)) if one]
            failed |= bool(faults)
            found[name_of(outcome.kind)] = outcome.digest
            print(_line(outcome, faults, title(device), args.json), flush=True)
        entries.append(make_entry(found, maker(device)))
        run = f"run {entries[-1]['run']}  {title(device)}, {device.info.driver}"
        print(json.dumps(entries[-1]) if args.json else run)
    if args.record:
        write_file(args.record, record_text(entries).encode(), hint)
        say_written([args.record])
    return int(failed)


def _others(outcome: GraphOutcome, against: Mapping[str, Digests]) -> list[str]:
    """How the outcome differs from those of other machines."""
    name = name_of(outcome.kind)
    return [
        f"{one} has {of[name][:16]}" for one, of in against.items() if of.get(name, outcome.digest) != outcome.digest
    ]


def _line(outcome: GraphOutcome, faults: list[str], device: str, as_json: bool) -> str:
    if as_json:
        return json.dumps({**asdict(outcome), "fault": "; ".join(faults), "device": device})
    status = "FAIL" if faults else "pass"
    first = f"{status:<8}{name_of(outcome.kind):<14}{outcome.digest[:18]:<20}{outcome.operations} operations  {device}"
    return "\n".join([first, *(f"        {fault}" for fault in faults)])
