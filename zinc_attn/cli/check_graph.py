"""The lines of ``zinc-attn check --graph``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..runtime.device import Device
from ..tools.check.properties import title
from ..tools.check.record import Digests, make_entry, maker
from ..tools.graph.check import CASES, GraphOutcome, check_graph, name_of


def check_models(
    devices: Sequence[Device],
    against: Mapping[str, Digests],
    as_json: bool = False,
    cases: Sequence[str] = CASES,
    processor: Device | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """The entries of a record, and whether some bits differ; prints a line a model, and a device's digest."""
    entries, failed = [], False
    for device in devices:
        digests = {}
        for outcome in check_graph(device, cases, processor):
            faults = [fault for fault in (outcome.fault, *_others(outcome, against)) if fault]
            failed |= bool(faults)
            digests[name_of(outcome.kind)] = outcome.digest
            print(_line(outcome, faults, title(device), as_json), flush=True)
        entries.append(make_entry(digests, maker(device)))
        run = f"run {entries[-1]['run']}  {title(device)}, {device.info.driver}"
        print(json.dumps(entries[-1]) if as_json else run)
    return entries, failed


def _others(outcome: GraphOutcome, against: Mapping[str, Digests]) -> list[str]:
    """How the outcome differs from those of other machines."""
    name = name_of(outcome.kind)
    return [
        f"{source} has {known[name][:16]}"
        for source, known in against.items()
        if known.get(name, outcome.digest) != outcome.digest
    ]


def _line(outcome: GraphOutcome, faults: list[str], device: str, as_json: bool) -> str:
    status = "FAIL" if faults else "pass"
    if as_json:
        as_check = [{"variation": "tokens in pieces", "text": fault} for fault in faults]
        of_check = {"case": name_of(outcome.kind), "status": status, "faults": as_check}
        return json.dumps({**asdict(outcome), **of_check, "fault": "; ".join(faults), "device": device})
    first = f"{status:<8}{name_of(outcome.kind):<23}{outcome.digest[:18]:<20}{outcome.operations} operations  {device}"
    return "\n".join([first, *(f"        {fault}" for fault in faults)])
