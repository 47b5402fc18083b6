"""``zinc-attn check``: its arguments, its lines and its exit status."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

from ..checks import plain
from ..decode.arithmetic import check_arithmetic
from ..errors import ArgumentError
from ..planning.arithmetic import EXACT
from ..runtime.cpu import NAME as CPU
from ..runtime.device import Device, list_devices
from ..tools.check import Case, check
from ..tools.check.data import KINDS, MASKS
from ..tools.check.outcome import Outcome, properties_of
from ..tools.check.properties import title
from ..tools.check.record import Digests, is_of, load_record, make_entry, maker, origin, record_text
from ..tools.graph.check import CASES as MODELS
from ..tools.graph.check import CHOSEN, name_of
from ..tools.harness.bits import oracle
from ..tools.harness.files import check_file, write_file
from ..tools.harness.judge import NativeOracle
from ..tools.harness.split_spec import VARIED_LAYOUTS, parse_split_specs
from ..tools.harness.tables import grouped
from .arguments import Subparsers, add_command, installed_runtimes, open_devices, open_oracle
from .check_graph import check_models
from .terminal import arithmetic_text, plural, progress_bar, say, say_written

MANY: Final = 20  # cases that take minutes on a CPU
RECORD_HINT: Final = "choose another file with --record"


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run, kinds=", ".join(KINDS[1:]), masks="|".join(MASKS))
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_true", help="a small fixed set of cases, in place of the whole matrix")
    chosen.add_argument("--cases", metavar="LIST", help="other cases, by their names")
    text = f"a model's other operations: small random models, or some of them, or {', '.join(CHOSEN)}"
    chosen.add_argument("--graph", nargs="?", const=",".join(MODELS), metavar="LIST", help=text)
    parser.arithmetic(("canonical", "fused", "integer", "matrix"))
    parser.share("--splits", VARIED_LAYOUTS, several=True)
    parser.share("--device", said="$ZINC_ATTN_DEVICE, else the best one", several=True)
    said = f"{installed_runtimes()}; with --quick $ZINC_ATTN_RUNTIME, else the first of them; with --graph vulkan,cpu"
    parser.share("--runtime", said=said, several=True)
    parser.path("--record", "write the digests, for another machine's --against")
    parser.path("--against", "compare with another machine's digests, too")
    parser.flag("--json", "JSON lines on stdout, one per case, then one per device")
    parser.oracle()


def run(args: argparse.Namespace) -> int:
    """Check, print, and write the record. 0: all bits are equal; 1: some differ; 2: a case was refused."""
    cases, splits = [] if args.graph is not None else chosen_cases(args), parse_split_specs(args.splits)
    if args.graph is not None and (args.arithmetic, args.splits) != ("canonical", VARIED_LAYOUTS):
        raise ArgumentError("--graph: got --arithmetic or --splits with it, expected neither: they are attention's")
    models = args.graph.split(",") if args.graph is not None else []
    if unknown := set(models) - {*MODELS, *CHOSEN}:
        raise ArgumentError(f"graph: got '{min(unknown)}', expected some of {', '.join((*MODELS, *CHOSEN))}")
    if args.record:
        check_file(args.record, RECORD_HINT)
    against = load_record(args.against) if args.against else {}
    names = [*map(name_of, models), *map(str, cases)]
    width = max(22, *map(len, names)) + 2
    if against and not any(name in digests for digests in against.values() for name in names):
        held = list(dict.fromkeys(chain(*against.values())))
        raise ArgumentError(
            f"{args.against}: got {plain(', '.join(held[:3]))}{', …' * (len(held) > 3)}, expected some of this run's "
            "cases; choose the file's with --arithmetic, --cases, --graph, --quick, or give one that has this run's"
        )
    if models:
        with ExitStack() as stack:
            devices = open_devices(stack, chosen_devices(args.device, args.runtime), args.runtime or "vulkan,cpu")
            processor = open_oracle(stack, args.oracle or "numpy", devices)  # NumPy takes less time for these
            entries, failed = check_models(devices, against, args.json, models, processor)
        write_record(args.record, entries)
        return int(failed)

    with ExitStack() as stack:
        default = None if args.quick and args.arithmetic in EXACT else installed_runtimes()
        devices = open_devices(stack, chosen_devices(args.device, args.runtime), args.runtime or default)
        for device, dtype in product(devices, dict.fromkeys(case.dtype for case in cases)):
            check_arithmetic(args.arithmetic, device, dtype, *dict.fromkeys(case.shape for case in cases))
        check_sources(args.arithmetic, against, devices)
        if len(cases) >= MANY and any(device.info.kind == "cpu" for device in devices):
            long = f"{'two or three' if args.quick else 'several'} minutes on a CPU"
            say(f"{len(cases)} cases on {plural(len(devices), 'device')}: {long}, less once its shaders are compiled")
        processor = open_oracle(stack, args.oracle, devices)
        judge = NativeOracle(processor) if processor else oracle
        outcomes, entries = list[Outcome](), []
        with progress_bar() as progress:
            for outcome in check(devices, cases, splits, against=against, judge=judge, progress=progress):
                outcomes.append(outcome)
                print("\n".join(outcome_lines(outcome, args.json, width)), flush=True)
        for device in devices:
            digests = {str(o.case): o.digest for o in outcomes if o.subject == title(device) and o.result}
            entries.append(make_entry(digests, maker(device)))
    lines = [json.dumps(entry) for entry in entries] if args.json else summary(outcomes, entries, against)
    print("\n".join(lines))
    write_record(args.record, entries)
    statuses = {outcome.status for outcome in outcomes}
    return 1 if "FAIL" in statuses else 2 if "refused" in statuses else 0


def write_record(path: Path | None, entries: Sequence[dict[str, Any]]) -> None:
    """Write the file of --record, where it is given."""
    if path:
        write_file(path, record_text(entries).encode(), RECORD_HINT)
        say_written([path])


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    if args.cases is None:
        return Case.quick(args.arithmetic) if args.quick else Case.default(args.arithmetic)
    cases = [Case.parse(text, args.arithmetic) for text in args.cases.split(",")]
    if other := next((case for case in cases if case.arithmetic != args.arithmetic), None):
        raise ArgumentError(f"cases: got '{other}', expected cases of --arithmetic {args.arithmetic}, or the other one")
    return list(dict.fromkeys(cases))


def check_sources(arithmetic: str, against: Mapping[str, Digests], devices: Sequence[Device]) -> None:
    """Refuse a record of matrix units that is of no device of this run: only the same device has its bits."""
    known = any(is_of(source, device) for source in against for device in devices)
    if arithmetic == "matrix" and against and not known:
        origins = "; ".join(origin(maker(device)) for device in devices)
        raise ArgumentError(
            f"against: got digests of {', '.join(against)}, expected some of this device and driver: {origins}; the "
            "bits of matrix units are a driver's own"
        )


def chosen_devices(names: str | None, runtimes: str | None) -> list[Any]:
    """The devices of --device: "all" that have one of --runtime, indices, pieces of names; else the best, None."""
    if names == "all":
        native = {name.strip() == CPU for name in runtimes.split(",")} if runtimes else {False, True}
        return [d.index for d in list_devices() if d.native in native]
    return [name.strip() for name in names.split(",")] if names else [None]


def outcome_lines(outcome: Outcome, as_json: bool, width: int) -> Iterator[str]:
    """One line, the case's name ``width`` wide, and one for each property that fails: the first variation's."""
    if as_json:
        yield json.dumps(outcome.to_dict())
        return
    name = f"{outcome.case!s:<{width}}"
    yield f"{outcome.status:<8}{name}{outcome.digest[:16]:<18}{outcome.verified:<24}{outcome.subject}"
    if outcome.refused:
        yield f"        {outcome.refused}"
    for faults in grouped((fault.property, fault) for fault in outcome.faults).values():
        more = f" (and in {len(faults) - 1} more variations)" if len(faults) > 1 else ""
        yield f"        {outcome.line(faults[0])}{more}"


def summary(
    outcomes: Sequence[Outcome], entries: Sequence[dict[str, Any]], against: Mapping[str, Digests]
) -> Iterator[str]:
    """The properties over all cases, and the digests of the run."""
    yield ""
    arithmetic = outcomes[0].case.arithmetic
    for prop, text in properties_of(arithmetic).items():
        shown = sum(outcome.shown.get(prop, 0) for outcome in outcomes)
        bad = sum(any(fault.property == prop for fault in outcome.faults) for outcome in outcomes)
        word = f"pass, {shown} comparisons" if shown else "not shown"
        word = f"FAIL in {bad} of {len(outcomes)} cases" if bad else word
        yield f"{prop:>2} {text:<42}{word}"
    for source, digests in against.items():
        names = {str(outcome.case) for outcome in outcomes}
        yield f"{source}: has {len(names & set(digests))} of the {len(names)} cases"
    for entry in entries:
        yield f"run {entry['run']}  {origin(entry['made_by'])}{arithmetic_text(arithmetic)}"
