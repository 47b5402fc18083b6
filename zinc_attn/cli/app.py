"""The command line: ``zinc-attn devices | plan | sweep | check | bench | rdna4 | validate | generate | export``.

Each subcommand is one ``add_<name>(subparsers)`` that declares its arguments and sets ``run``, a function of
the parsed arguments that returns the exit status. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import __version__
from ..checks import check_int, parse_digits, shown
from ..distributed.sharded import TIMEOUT_S, RankError, Ranks, start_mpi
from ..errors import ArgumentError, ZincAttnError
from ..limits import DTYPE_BYTES
from ..runtime.device import RUNTIMES, Device, list_devices
from ..runtime.devices import choose
from ..runtime.protocol import DeviceInfo
from ..shapes import AttnShape
from ..tools import check, cost, export, generate, rdna4
from ..tools.harness.files import json_line, write_file, write_report
from ..tools.harness.inputs import Inputs, parse_contexts
from ..tools.harness.progress import Progress
from ..tools.harness.split_spec import SplitSpec, parse_split_specs
from ..tools.models import PRESETS, ModelPreset, find_model, slug
from ..tools.sweep import PAGE_SIZE, SweepRow, SweepSpec, distributed_sweep, plot_png, sweep
from .streams import NO_READER, Unwritable, guarded_streams

if TYPE_CHECKING:
    from rich.table import Table

Subparsers = Any  # argparse's _SubParsersAction, which it does not export

DEFAULT_CONTEXTS: Final = "1k,8k,32k,128k"
DEFAULT_COMPUTE_UNITS: Final = 64  # a Radeon AI PRO R9700
SHARD_CONTEXTS: Final = "8k,32k,128k,512k"
PREFIXES: Final = "2k,8k,32k"
SUFFIX: Final = 256  # keys
TABLE_COLUMNS: Final = 240  # widest table
UNMET: Final = 3  # a gate of rdna4, or validate's error bound, does not hold
FAULT: Final = 70  # EX_SOFTWARE of sysexits.h
STATUSES: Final = (
    "exit status: 0 fine; 1 a wrong bit, and nothing else; 2 refused, the reason is on stderr; 3 a gate or a bound is "
    "not met; 70 a fault of this program; 74 stdout cannot be written; 130 interrupted; 141 nobody reads stdout"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is one of STATUSES. argparse ends with 0 behind --help, with 2 for a usage."""
    with guarded_streams():
        try:
            return _run(argv)
        except Unwritable as error:
            if error.status != NO_READER:
                say(f"zinc-attn: error: {error}")
            return error.status
        except ZincAttnError as error:
            say(f"zinc-attn: error: {error}")
            return 2
        except MemoryError as error:
            say(f"zinc-attn: error: this machine has no memory for it: {error or 'MemoryError'}")
            return 2
        except KeyboardInterrupt:
            say("zinc-attn: interrupted")
            return 130
        except Exception:  # a status of 1 would say that a bit is wrong
            say(traceback.format_exc() + "zinc-attn: this is a fault of zinc-attn; please report it")
            return FAULT


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    finally:
        sys.stdout.flush()  # here, where what it raises still becomes the status; also behind --help


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="zinc-attn",
        description="Split-KV decode attention on Vulkan whose bits never change.",
        epilog=f"Each command has its own --help with an example. {STATUSES}",
    )
    parser.add_argument("--version", action="version", version=f"zinc-attn {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = (
        add_devices,
        add_plan,
        add_sweep,
        add_check,
        add_bench,
        add_rdna4,
        add_validate,
        add_generate,
        add_export,
    )
    for add in commands:
        add(subparsers)
    return parser


# --- shared by the commands --------------------------------------------------------------------------------


def add_command(subparsers: Subparsers, name: str, summary: str, text: str, example: str) -> argparse.ArgumentParser:
    """A subcommand whose help ends with an example."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}".strip(),
        epilog=f"example:\n{example}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """--device and --runtime, with the environment's defaults."""
    parser.add_argument(
        "--device",
        metavar="D",
        help="index or piece of the name, see 'zinc-attn devices' (default: $ZINC_ATTN_DEVICE, else the "
        "best: discrete, integrated, CPU)",
    )
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="dispatcher (default: $ZINC_ATTN_RUNTIME, else vulkan)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, extra: str = "") -> None:
    """--model or --shape."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--model", metavar="M", help=f"a Hugging Face config.json by path, or one of {', '.join(PRESETS)}"
    )
    group.add_argument("--shape", metavar="Q/KV/D", help=f"q_heads/kv_heads/head_dim, for example 16/2/256{extra}")


def chosen_model(args: argparse.Namespace) -> ModelPreset:
    """What --model or --shape names; a bare shape is a model of one layer."""
    if args.model:
        return find_model(args.model)
    if args.shape:
        shape = AttnShape.parse(args.shape)
        return ModelPreset(str(shape), shape, 1)
    raise ArgumentError("model: got none, expected --model or --shape, for example --model qwen3.6-35b-a3b")


def title(model: ModelPreset, dtype: str) -> str:
    """The model's name and shape."""
    name = "" if model.name == str(model.shape) else f"{model.name}: "
    return f"{name}shape {model.shape}, {dtype}"


def need(*packages: str) -> None:
    """Refuse where a package of the extra ``cli`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ZincAttnError(f"this command needs {' and '.join(missing)}: pip install 'zinc-attn[cli]'")


def print_json(records: Iterable[dict[str, Any]]) -> None:
    """JSON lines on stdout."""
    for record in records:
        plain = not sys.stdout.encoding.lower().startswith("utf")  # an escape, where a "?" would be another text
        print(json.dumps(record, ensure_ascii=plain, allow_nan=False))


def new_table(*columns: str, left: int = 0) -> Table:
    """A plain table with right-aligned columns but for the first ``left``."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """The table on stdout, never cut: a terminal that is narrower wraps it."""
    from rich.console import Console

    Console(markup=False, highlight=False, emoji=False, width=TABLE_COLUMNS).print(table)


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update


def binary_size(nbytes: int) -> str:
    """134217728 to "128 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def note_cpu(info: DeviceInfo) -> None:
    """Say plainly that a software driver runs."""
    if info.kind == "cpu":
        names = {"llvmpipe": "lavapipe", "swiftshader": "SwiftShader"}
        driver = next((name for key, name in names.items() if key in info.name.lower()), info.name)
        others = any(d.kind != "cpu" for d in list_devices())
        say(f"{'as asked, not on a GPU' if others else 'no GPU'}: running on the CPU through {driver}")


# --- devices -----------------------------------------------------------------------------------------------


def add_devices(subparsers: Subparsers) -> None:
    """zinc-attn devices"""
    parser = add_command(
        subparsers,
        "devices",
        "list the Vulkan devices",
        "CUs are compute units, from the query named beside them ('assumed' where none tells). Max buffer\n"
        "bounds the K, and the V, of one layer. The star marks the device that is used by default.",
        "  zinc-attn devices\n  zinc-attn devices --json",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines with every field")
    parser.set_defaults(run=run_devices)


def run_devices(args: argparse.Namespace) -> int:
    """List the devices."""
    devices = list_devices()
    if args.json:
        print_json(asdict(d) for d in devices)
        return 0
    need("rich")
    best = choose(devices, os.environ.get("ZINC_ATTN_DEVICE") or None)
    for d in devices:
        table = new_table(f"{d.index}{'*' if d is best else ''}", d.name, left=2)
        table.add_row("kind", f"{d.kind} ({d.vendor})")
        table.add_row("driver", f"{d.driver}, Vulkan {d.api_version}")
        table.add_row("CUs", f"{d.compute_units} ({d.compute_units_source})")
        table.add_row("subgroup", f"{d.subgroup_size} invocations")
        table.add_row("memory", binary_size(d.memory_bytes))
        table.add_row("max buffer", binary_size(d.max_buffer_bytes))
        print_table(table)
    return 0


# --- plan --------------------------------------------------------------------------------------------------


def add_plan(subparsers: Subparsers) -> None:
    """zinc-attn plan"""
    parser = add_command(
        subparsers,
        "plan",
        "show how contexts are split",
        "Pure arithmetic: touches no device unless --device is given. The unit is the number of keys per\n"
        "partial state, the build the form of pass 1 that runs, scratch the size of the partial states.\n"
        "The layout never shows in the output bits. Times of one layer's call are modelled, not measured\n"
        "(docs/cost-model.md); ideal is K and V read once at the card's peak bandwidth. --cu N models N\n"
        "compute units like an R9700's.\n\n"
        "--requests and --prefix: a batch of requests with one new row each, whose sequences share the pages of a\n"
        "prefix; what cascade reads and takes on the card, and the batch without it. --shards: a sequence's nodes\n"
        "dealt to so many cards; pass 1 there, one gather of partial states over --link, the fold on one card.",
        "  zinc-attn plan --model qwen3.6-35b-a3b --contexts 1k,8k,32k,128k --cu 64\n"
        "  zinc-attn plan --model qwen3-30b-a3b --card r9700 --draw plan.png\n"
        "  zinc-attn plan --shape 32/8/128 --requests 2,8,32 --prefix 2k,32k\n"
        "  zinc-attn plan --shape 32/8/128 --shards 2,4 --link 100gbe\n"
        "  zinc-attn plan --shape 32/8/128 --splits auto,8,size:2048",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--contexts",
        metavar="N,…",
        help=f"keys (default: {DEFAULT_CONTEXTS}; with --shards {SHARD_CONTEXTS})",
    )
    parser.add_argument("--splits", metavar="S,…", help="auto, a number, size:KEYS (default: auto)")
    parser.add_argument("--dtype", default="f16", choices=DTYPE_BYTES, help="of K and V (default: f16)")
    units = parser.add_mutually_exclusive_group()
    units.add_argument("--cu", type=int, metavar="N", help=f"compute units of a GPU (default: {DEFAULT_COMPUTE_UNITS})")
    units.add_argument("--card", metavar="C", help=f"one of {', '.join(cost.CARDS)}")
    units.add_argument(
        "--device", metavar="D", help="plan for this device: index or piece of the name; nothing modelled"
    )
    parser.add_argument("--draw", metavar="FILE.png", help="draw the modelled layouts of the largest context")
    topic = parser.add_mutually_exclusive_group()
    topic.add_argument("--requests", metavar="B,…", help="requests that share a prefix")
    topic.add_argument("--shards", metavar="N,…", help="cards that share a sequence")
    parser.add_argument("--prefix", metavar="P,…", help=f"shared keys (default: {PREFIXES})")
    parser.add_argument("--suffix", type=int, metavar="S", help=f"keys of a request's own (default: {SUFFIX})")
    parser.add_argument("--link", metavar="L", help=f"between the shards: {', '.join(cost.LINKS)} (default: pcie5)")
    parser.add_argument("--json", action="store_true", help="JSON lines with full fingerprints")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Show the plans."""
    check_plan_topic(args)
    card = plan_card(args)
    if args.requests or args.shards:
        assert card is not None
        return (run_plan_requests if args.requests else run_plan_shards)(args, chosen_model(args), card)
    contexts, layouts = parse_contexts(args.contexts or DEFAULT_CONTEXTS), parse_split_specs(args.splits or "auto")
    model = chosen_model(args)
    units, kind = card.compute_units if card else DEFAULT_COMPUTE_UNITS, "gpu"
    if args.draw:
        need("matplotlib")
        if card is None:
            raise ArgumentError("draw: got --device, expected --card or --cu: what is drawn is modelled for a card")
    if args.device is not None:
        info = choose(list_devices(), args.device)
        units, kind = info.compute_units, info.kind
    records = []
    for context in contexts:
        for layout in layouts:
            plan = layout.plan(context, model.shape, units, args.dtype, kind)
            records.append(
                {
                    "context": context,
                    "layout": layout.label,
                    "splits": plan.num_splits,
                    "unit_keys": plan.unit_keys,
                    "build": plan.build,
                    "passes": plan.passes,
                    "workgroups": plan.workgroups,
                    "workgroups_per_cu": round(plan.workgroups / units, 3),
                    "scratch_bytes": plan.scratch_bytes,
                    "fingerprint": plan.fingerprint(),
                    "shape": str(model.shape),
                    "dtype": args.dtype,
                    "compute_units": units,
                    "kind": kind,
                }
            )
            if card and (args.card or args.cu is not None):
                records[-1]["modelled"] = cost.predict(plan, card, args.dtype).to_dict()
    if card and args.draw:
        draw_plan(Path(args.draw), model, max(contexts), card, args.dtype)
    if args.json:
        print_json(records)
        return 0
    need("rich")
    print(f"{title(model, args.dtype)}, {units} compute units ({kind})")
    table = new_table(
        "context",
        "layout",
        "splits",
        "unit",
        "build",
        "passes",
        "workgroups",
        "per CU",
        "scratch",
        "fingerprint",
    )
    for r in records:
        table.add_row(
            f"{r['context']:,}",
            r["layout"],
            f"{r['splits']:,}",
            str(r["unit_keys"]),
            r["build"],
            str(r["passes"]),
            f"{r['workgroups']:,}",
            f"{r['workgroups_per_cu']:.4g}",
            binary_size(r["scratch_bytes"]),
            r["fingerprint"][:12],
        )
    print_table(table)
    if card:
        print_modelled(model, contexts, layouts, card, args.dtype)
    return 0


def check_plan_topic(args: argparse.Namespace) -> None:
    """Refuse arguments that do not go with --requests, --shards, or neither."""
    topic = "requests" if args.requests else "shards" if args.shards else None
    others = {
        "requests": ("contexts", "splits", "link"),
        "shards": ("splits", "prefix", "suffix"),
        None: ("prefix", "suffix", "link"),
    }[topic]
    for name in (*others, *(("device", "draw") if topic else ())):
        if getattr(args, name) is not None:
            given = f"--{name} with --{topic}" if topic else f"--{name} alone"
            wanted = {"link": "--shards", "prefix": "--requests", "suffix": "--requests"}.get(name)
            keys = "--prefix and --suffix" if name == "contexts" else f"one of the two: --{topic} has a table"
            wanted = wanted or ("--card or --cu" if name == "device" else keys)
            raise ArgumentError(f"{name}: got {given}, expected {wanted}")


def run_plan_requests(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
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
    need("rich")
    print(f"{title(model, args.dtype)}, {card.compute_units} compute units, {suffix:,} keys of a request's own")
    print(f"modelled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)")
    columns = "prefix", "requests", "at a time", "keys read", "without", "µs", "without", "ratio", "pays"
    table = new_table(*columns)
    for one in found:
        table.add_row(
            f"{one.prefix:,}",
            str(one.requests),
            str(one.rows_each),
            f"{one.keys_read:,}",
            f"{one.keys_alone:,}",
            figure(one.total_us),
            figure(one.alone_us),
            f"{one.speed_up:.2f}",
            "yes" if one.pays else "no" if one.rows_each > 1 else "–",
        )
    print_table(table)
    print("at a time: requests that a workgroup serves on the shared keys; 1: none shared, it would save too little.")
    return 0


def run_plan_shards(args: argparse.Namespace, model: ModelPreset, card: cost.Card) -> int:
    """What more cards save."""
    link = cost.find_link(args.link or "pcie5")
    contexts, counts = parse_contexts(args.contexts or SHARD_CONTEXTS), parse_counts("shards", args.shards, 2)
    found = [
        cost.predict_shards(context, model.shape, card, shards, link, args.dtype)
        for shards in counts
        for context in contexts
    ]
    least = {shards: cost.pays_from(model.shape, card, shards, link, args.dtype) for shards in counts}
    if args.json:
        print_json(one.to_dict() | {"pays_from": least[one.shards]} for one in found)
        return 0
    need("rich")
    where = "cards of one host" if not link.hosts else "hosts with a card each"
    print(f"{title(model, args.dtype)}, {where}; {link.title}: {link.latency_us:g} µs, {link.gb_s:g} GB/s")
    print(f"modelled for {card.title}, one layer; assumed: {', '.join(card.assumed)}, the link (docs/cost-model.md)")
    columns = "shards", "context", "bytes", "pass 1 µs", "down", "gather", "up", "fold", "total µs", "one card", "pays"
    table = new_table(*columns)
    for one in found:
        times = one.pass1_us, one.down_us, one.gather_us, one.up_us, one.fold_us, one.total_us, one.one_us
        table.add_row(
            str(one.shards),
            f"{one.context:,}",
            f"{one.received_bytes:,}",
            *(figure(x) for x in times),
            "yes" if one.pays else "no",
        )
    print_table(table)
    for shards, keys in least.items():
        text = "at no context up to 16,777,216 keys" if keys is None else f"from {keys:,} keys on"
        print(f"{shards} shards take less time than one card {text}.")
    print("bytes: partial states that one host, or the folding process, gets from the other shards.")
    return 0


def parse_counts(name: str, text: str, least: int = 1) -> list[int]:
    """``2,8`` to numbers of at least ``least``, repeated ones once."""
    found = [parse_digits(word) for word in text.split(",")]
    if None in found:
        raise ArgumentError(f"{name}: got {shown(text)}, expected numbers such as 2,8")
    return [check_int(name, number, least, 1 << 16) for number in dict.fromkeys(found)]


def plan_card(args: argparse.Namespace) -> cost.Card | None:
    """The card that --card, --cu or the default names; None for --device."""
    if args.device is not None:
        return None
    if args.card:
        return cost.find_card(args.card)
    return cost.card_with(DEFAULT_COMPUTE_UNITS if args.cu is None else args.cu)


def print_modelled(
    model: ModelPreset, contexts: Sequence[int], layouts: Sequence[SplitSpec], card: cost.Card, dtype: str
) -> None:
    """The model's word on a single split, the layouts asked for, and the best split count."""
    print(f"\nmodelled for {card.title}, one layer; assumed: {', '.join(card.assumed)} (docs/cost-model.md)")
    columns = "context,layout,splits,workgroups,per CU,utilisation,waits for,µs,ideal µs,KV GB/s,of peak"
    table = new_table(*columns.split(","))
    for context in contexts:
        plans = {
            layout.label: layout.plan(context, model.shape, card.compute_units, dtype, "gpu")
            for layout in (SplitSpec("1", num_splits=1), *layouts)
        }
        plans["best"] = cost.best_splits(context, model.shape, card, dtype)[0]
        for label, plan in plans.items():
            p = cost.predict(plan, card, dtype)
            times = (figure(x) for x in (p.total_us, p.ideal_us, p.gb_s))
            counts = (f"{p.splits:,}", f"{p.workgroups:,}", figure(p.workgroups_per_cu), f"{p.utilisation:.1%}")
            table.add_row(f"{context:,}", label, *counts, p.bound, *times, f"{p.fraction:.1%}")
    print_table(table)


def draw_plan(path: Path, model: ModelPreset, context: int, card: cost.Card, dtype: str) -> None:
    """Write the picture of --draw."""
    from ..tools.plan_plots import plan_png

    write_file(path, plan_png(model, context, card, dtype))
    say(f"written: {path}")


# --- sweep -------------------------------------------------------------------------------------------------


def add_sweep(subparsers: Subparsers) -> None:
    """zinc-attn sweep"""
    parser = add_command(
        subparsers,
        "sweep",
        "verify, then time decode attention over context lengths",
        "A point is one call at one context under one split layout: append the new rows to the resident\n"
        "KV cache, attend, merge. Its out and lse are compared bit for bit with the NumPy oracle on the\n"
        "values as stored (those of some KV heads, where all would take long; it says so). Then it is\n"
        "timed: host clock, warm, layouts in turns; the sequences are cut back to the context, untimed,\n"
        "behind every call. The cache has one layer; a step's figures are that layer's times --layers.\n"
        "Leaves sweep.csv, sweep.jsonl and sweep.png, in place of an earlier sweep's in the same folder.\n\n"
        "With --distributed, started by mpiexec, the ranks hold the nodes of 512 keys of one sequence in proportion\n"
        "to their devices' memory; a call gathers their partial states once. Every rank compares its bits with the\n"
        "oracle, rank 0 prints. Needs the extra mpi and an MPI.\n\n"
        "exit status:\n"
        "  0  every point that ran has the oracle's bits; what the device has no room for says refused\n"
        "  1  a point FAILED: wrong bits; it gets no time\n"
        "  2  wrong arguments, no device, every point refused, or a device or a rank that was lost",
        "  zinc-attn sweep --model qwen3.6-35b-a3b --contexts 1k,8k,32k,128k --splits auto,1\n"
        "  mpiexec -n 4 zinc-attn sweep --distributed --shape 32/8/128 --contexts 32k,128k\n"
        "  zinc-attn sweep --model qwen3-8b --contexts 1k,8k --dtype q8_0 --batch 3 --q-len 2\n"
        "  zinc-attn sweep --shape 32/8/128 --layers 36 --contexts 4k --splits auto,8,size:2048 --json",
    )
    add_model_arguments(parser, extra="; with --kv the file's shape is the default")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers with attention (default: the model's; 1 for --shape)"
    )
    parser.add_argument(
        "--contexts",
        default=None,
        metavar="N,…",
        help="keys of a sequence, the call's own rows among them, k = 1024 "
        f"(default: {DEFAULT_CONTEXTS}; with --kv all of its tokens)",
    )
    parser.add_argument(
        "--splits",
        metavar="S,…",
        help="layouts: auto (the split rule), a number of splits, size:KEYS (default: auto,1)",
    )
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="of K and V (default: f16, or the dtype in --kv)")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences in a call, each of the same context (default: 1)"
    )
    parser.add_argument(
        "--q-len", type=int, metavar="N", help="new rows per sequence in a call (default: 1, or the rows in --kv)"
    )
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument(
        "--page-size", type=int, default=PAGE_SIZE, metavar="N", help=f"tokens per page (default: {PAGE_SIZE})"
    )
    layout.add_argument(
        "--contiguous",
        action="store_true",
        help="no cache: K and V of one sequence as two arrays, f32 or f16; nothing is appended",
    )
    parser.add_argument(
        "--kv",
        metavar="FILE.npz",
        help="your own q, k and v: q (q_heads, head_dim) or (q_len, q_heads, head_dim), k and v (tokens, kv_heads, "
        "head_dim), float32 or float16; a context takes the first keys, every sequence of a batch the same",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the normal values without --kv (default: 0)"
    )
    parser.add_argument(
        "--weights-ms",
        type=float,
        metavar="MS",
        help="ms of the rest of a step, to give tokens/s of the whole step",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="timed runs per point (default: 5 to 50 within 3 s)")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one sequence over the ranks of mpiexec; all ranks with the same"
        " arguments, but for --device and --runtime",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help=f"that a rank waits for the others (default: {TIMEOUT_S:g} s)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the files (default: ./sweep-MODEL-DEVICE)")
    parser.add_argument(
        "--json", action="store_true", help="JSON lines on stdout, as points are ready, in place of the table"
    )
    add_device_arguments(parser)
    parser.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Sweep, print, and write the files."""
    if not args.distributed:
        if args.timeout is not None:
            raise ArgumentError(f"timeout: got {args.timeout:g} without --distributed, expected both")
        return measure(args, None)
    timeout_s = TIMEOUT_S if args.timeout is None else args.timeout
    if not 0 < timeout_s < float("inf"):
        raise ArgumentError(f"timeout: got {timeout_s:g}, expected seconds above 0")
    ranks = Ranks(start_mpi(timeout_s), timeout_s)
    try:
        status = measure(args, ranks)
        ranks.exchange(b"")  # ends together: a rank whose files cannot be written fails all
    except BaseException as error:
        if not isinstance(error, RankError):
            ranks.fail(error)
        if ranks.lost:
            say(f"zinc-attn: error: {error}")
            ranks.abort(2)
        raise
    return status


def measure(args: argparse.Namespace, ranks: Ranks | None) -> int:
    """The sweep of this process alone, or as one of ``ranks``, of which rank 0 prints and writes."""
    need("rich", "matplotlib")
    if ranks:
        check_distributed(args)
    model, spec = sweep_spec(args)
    quiet = ranks is not None and ranks.rank > 0
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        device = stack.enter_context(Device.open(args.device, runtime=args.runtime))
        if not quiet:
            note_cpu(device.info)
            if args.json:
                options["on_row"] = lambda row: print(json_line(row), flush=True)
            else:
                print_sweep_head(device, model, spec, ranks)
            options["progress"] = stack.enter_context(progress_bar())
        rows = distributed_sweep(ranks, device, spec, **options) if ranks else sweep(device, spec, **options)
        folder = Path(args.out or f"sweep-{slug(model.name)}-{slug(device.info.name)}")
    if not quiet:
        if not args.json:
            print_table(sweep_table(rows))
            for line in sweep_notes(rows):
                print(line)
        png = plot_png(rows, sweep_title(model, spec, ranks)) if any(row.tokens_s for row in rows) else None
        say(f"written: {', '.join(map(str, write_report(folder, 'sweep', rows, png)))}")
    failed = any(row.status == "failed" for row in rows)
    return 1 if failed else 2 if all(row.status == "refused" for row in rows) else 0


def check_distributed(args: argparse.Namespace) -> None:
    """Refuse what a sweep over ranks does not have."""
    for name, given in (("batch", args.batch > 1), ("contiguous", args.contiguous), ("splits", args.splits)):
        if given:
            raise ArgumentError(
                f"{name}: got --{name} with --distributed, expected neither batch nor layout: one sequence in a cache, "
                "a split per node"
            )


def sweep_spec(args: argparse.Namespace) -> tuple[ModelPreset, SweepSpec]:
    """The model, and what of it is measured."""
    model, kv = sweep_subject(args)
    spec = SweepSpec(
        model.shape,
        model.attention_layers,
        tuple(parse_contexts(args.contexts or (str(len(kv.k)) if kv else DEFAULT_CONTEXTS))),
        tuple(parse_split_specs(args.splits or "auto,1")),
        dtype=args.dtype or (kv.dtype if kv else "f16"),
        batch=args.batch,
        q_len=(len(kv.rows) if kv else 1) if args.q_len is None else args.q_len,
        page_size=None if args.contiguous else args.page_size,
        repeats=args.repeats,
        weights_ms=args.weights_ms,
        seed=args.seed,
        kv=kv,
        model=model.name,
    )
    return model, spec


def call_text(spec: SweepSpec) -> str:
    """How many sequences and rows a call has."""
    each = " each" if spec.batch > 1 else ""
    return f"{plural(spec.batch, 'sequence')}, {plural(spec.q_len, 'row')}{each} per call"


def print_sweep_head(device: Device, model: ModelPreset, spec: SweepSpec, ranks: Ranks | None) -> None:
    """Say what is measured, before it is."""
    where = f", rank 0 of {ranks.size}" if ranks else ""
    print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}{where}")
    print(f"{title(model, spec.dtype)}, {layer_text(model)}")
    memory = f"cache with pages of {spec.page_size} tokens" if spec.page_size else "contiguous K and V"
    print(f"{call_text(spec)}; {memory}", flush=True)


def sweep_title(model: ModelPreset, spec: SweepSpec, ranks: Ranks | None) -> str:
    """The title of the picture."""
    subject = "decode attention" if spec.batch == spec.q_len == 1 else f"attention\n{call_text(spec)}"
    subject += f", {plural(ranks.size, 'rank')}" if ranks else ""
    return f"{title(model, spec.dtype)}, {plural(model.attention_layers, 'layer')}: {subject}"


def sweep_subject(args: argparse.Namespace) -> tuple[ModelPreset, Inputs | None]:
    """The model, its layers as --layers says, and the values of --kv, which must fit it."""
    kv = Inputs.load(args.kv) if args.kv else None
    if kv and not (args.model or args.shape):
        model = ModelPreset(Path(args.kv).stem, kv.shape, 1)
    else:
        model = chosen_model(args)
    if kv and kv.shape != model.shape:
        raise ArgumentError(f"{args.kv}: got shape {kv.shape}, expected {model.shape} of {model.name}")
    if args.layers is not None:
        layers = check_int("layers", args.layers, 1)
        model = replace(model, attention_layers=layers, windowed_layers=0)
    return model, kv


def layer_text(model: ModelPreset) -> str:
    """How many layers a token's figures count."""
    text = plural(model.attention_layers, "attention layer")
    if model.windowed_layers:
        text += f" ({model.windowed_layers} more with a window of {model.window} keys are not counted)"
    return text


def plural(count: int, noun: str) -> str:
    """2 and "layer" to "2 layers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """One line per point."""
    weights = any(row.weights_ms is not None for row in rows)
    ranks = any(row.formula_bytes is not None for row in rows)
    columns = [
        "context",
        "layout",
        "splits",
        *(["ranks", "bytes per\nlayer", "by the\nformula"] if ranks else []),
        "verified",
        "µs per\nlayer",
        "IQR\nµs",
    ]
    columns += ["KV\nGB/s", "attn\nms/step", "attn\ntokens/s"]
    table = new_table(*columns, *(["with weights\ntokens/s"] if weights else []))
    previous = None
    for row in rows:
        if previous not in (None, row.context) and not ranks:
            table.add_section()
        previous = row.context
        word = {"ok": row.verified or "", "failed": "FAILED", "refused": "refused"}[row.status]
        figures = (row.median_us, row.iqr_us, row.kv_gb_s, row.attention_ms_per_step, row.tokens_s)
        table.add_row(
            f"{row.context:,}",
            row.layout,
            f"{row.num_splits:,}",
            *((str(row.ranks), count(row.received_bytes), count(row.formula_bytes)) if ranks else ()),
            word.replace(" (sampled)", "*"),
            *(figure(x) for x in figures),
            *([figure(row.tokens_s_with_weights)] if weights else []),
            style={"failed": "bold red", "refused": "yellow"}.get(row.status),
        )
    return table


def count(x: int | None) -> str:
    """1234567 to "1,234,567"."""
    return "–" if x is None else f"{x:,}"


def figure(x: float | None) -> str:
    """Four significant digits, no exponent."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if x >= 1000 else f"{float(f'{x:.4g}'):g}"


def sweep_notes(rows: Sequence[SweepRow]) -> Iterator[str]:
    """What the table's words mean."""
    timed = [row for row in rows if row.median_us is not None]
    if timed:
        first = timed[0]
        yield f"bits: out and lse equal the oracle's bit for bit. Time: {first.latency_mode}."
        tokens = plural(first.batch * first.q_len, "token")
        layers = plural(first.layers, "layer")
        yield f"Values: {first.data}. tokens/s: as if attention over {layers} were all of a step of {tokens}."
        if first.formula_bytes is not None:
            yield f"Compared on {plural(first.ranks, 'rank')}, and the same on all. bytes per layer: what rank 0 gets"
            yield "in a call; the formula: nodes of the other ranks × q_len × q_heads × (head_dim + 2) × 4."
    if any(row.verified == "bits (sampled)" and row.formula_bytes is None for row in rows):
        yield "bits*: some KV heads compared with the oracle, everything with the context's first layout."
    if any(row.verified == "bits (sampled)" and row.formula_bytes is not None for row in rows):
        yield "bits*: some KV heads compared with the oracle, everything with rank 0's."
    troubles: dict[tuple[int, str, str], list[str]] = {}
    for row in rows:
        if row.error:
            word = "FAILED" if row.status == "failed" else row.status
            troubles.setdefault((row.context, word, row.error), []).append(row.layout)
    for (context, word, error), layouts in troubles.items():
        yield f"{context:,} keys, {', '.join(layouts)}: {word}: {error}"


# --- check -------------------------------------------------------------------------------------------------


def add_check(subparsers: Subparsers) -> None:
    """zinc-attn check"""
    parser = add_command(
        subparsers,
        "check",
        "show that the output bits never change",
        "Seeded cases, the same on every machine, some with a window, a softcap, sinks or another scale. Each\n"
        "varies the run, the split layout, the compute-unit count, the batch, the prefill chunks, the pages, the\n"
        "stored dtype, whether keys that rows share are attended once (counted where the device does so), and the\n"
        "devices that hold the sequence (from 513 keys on: all devices and dispatchers of the run together, or\n"
        "two shards on a single one). Every variation must give the same bits, and these must be the NumPy\n"
        "oracle's: its digests are in the package. A case which is not in there is compared with the oracle here\n"
        "(above 2**30 products with the heads of one KV head; it says so).\n\n"
        "exit status:\n"
        "  0  every bit is as it must be\n"
        "  1  some are not: the case names the first element and how far apart it is\n"
        "  2  wrong arguments, no device, or a case the device has no room for",
        "  zinc-attn check --quick\n"
        "  zinc-attn check --devices all --contexts 8k,32k --dtypes f16 --layouts 1,8,auto\n"
        "  zinc-attn check --shapes 64/8/64 --masking none,window=128+sinks --contexts 8k\n"
        "  zinc-attn check --record mine.json    elsewhere: zinc-attn check --against mine.json",
    )
    check.add_arguments(parser)
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Check the bits."""
    need("rich")
    return check.run(args, progress_bar)


# --- rdna4 -------------------------------------------------------------------------------------------------


def add_rdna4(subparsers: Subparsers) -> None:
    """zinc-attn rdna4"""
    parser = add_command(
        subparsers,
        "rdna4",
        "what RADV's compiler makes of every kernel for gfx1201, without the card",
        "Wave size, registers, LDS, spills, occupancy and instructions of each variant, and an estimate of issue\n"
        "cycles per key. Needs Mesa 25.0's RADV.\n\nexit status: 0 every gate holds, 3 one does not, 2 not known here",
        "  zinc-attn rdna4\n  zinc-attn rdna4 --family gfx1200 --json",
    )
    rdna4.add_arguments(parser)
    parser.set_defaults(run=rdna4.run)


# --- bench -------------------------------------------------------------------------------------------------


def add_bench(subparsers: Subparsers) -> None:
    """zinc-attn bench"""
    parser = add_command(
        subparsers,
        "bench",
        "time the kernels beside a read yardstick and baselines",
        "Verifies every layout against the oracle, bit for bit, then times runtimes and layouts in turns: the whole\n"
        "call, both passes, the gap between them, the host's work. Beside them a kernel that only reads K and V, a\n"
        "single split, one workgroup per query head, NumPy, and PyTorch where it is installed. Leaves bench.csv,\n"
        "bench.jsonl and bench.png in --out.",
        "  zinc-attn bench\n  zinc-attn bench --runtimes vulkan --shapes 32/8/128 --contexts 8k --json",
    )
    add = parser.add_argument
    add("--device", metavar="D", help="index or piece of the name, see 'zinc-attn devices'")
    installed = RUNTIMES if importlib.util.find_spec("kp") else ("vulkan",)
    add("--runtimes", default=",".join(installed), metavar="LIST", help="dispatchers (default: %(default)s)")
    add("--shapes", default="16/2/256,32/4/128", metavar="LIST", help="Q/KV/D (default: %(default)s)")
    add("--contexts", default=DEFAULT_CONTEXTS, metavar="LIST", help="keys, k = 1024 (default: %(default)s)")
    add("--dtype", choices=("f32", "f16"), default="f16", help="of K and V (default: %(default)s)")
    add("--repeats", type=int, metavar="N", help="rounds per point (default: 5 to 50 within 10 s)")
    add("--seed", type=int, default=0, metavar="N", help="of the values (default: %(default)s)")
    add("--out", metavar="DIR", help="folder of the files (default: bench-DEVICE)")
    add("--json", action="store_true", help="JSON lines on stdout, as points are ready, in place of the tables")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Benchmark, print, and write the files."""
    need("rich", "matplotlib")
    from ..tools import bench

    spec = bench.BenchSpec(
        [AttnShape.parse(text.strip()) for text in args.shapes.split(",")],
        parse_contexts(args.contexts),
        dtype=args.dtype,
        repeats=args.repeats,
        seed=args.seed,
    )
    with ExitStack() as stack:
        runtimes = dict.fromkeys(name.strip() for name in args.runtimes.split(","))
        devices = [stack.enter_context(Device.open(args.device, runtime=name)) for name in runtimes]
        info = devices[0].info
        note_cpu(info)
        if not args.json:
            print(f"{info.name} ({info.driver}), {args.dtype}, one layer", flush=True)
        on_row = (lambda row: print(json_line(row), flush=True)) if args.json else None
        with progress_bar() as progress:
            rows = bench.bench(devices, spec, progress=progress, on_row=on_row)
    if not args.json:
        for columns, lines in zip((bench.HOST_COLUMNS, bench.COLUMNS), bench.table_cells(rows), strict=True):
            table = new_table(*columns, left=2 if columns is bench.HOST_COLUMNS else 5)
            for line in lines:
                table.add_row(*line)
            print_table(table)
            print()
        print(f"Times: {bench.HOST_CLOCK}; passes by {bench.DEVICE_CLOCK}; medians. of read: of the rate at which a")
        print("kernel that does nothing else reads K and V. GB/s counts each stored byte of K and V once.")
    png = bench.bench_png(rows) if any(row.kv_gb_s for row in rows) else None
    paths = write_report(Path(args.out or f"bench-{slug(info.name)}"), "bench", rows, png)
    say(f"written: {', '.join(map(str, paths))}")
    return 1 if any(row.status == "failed" for row in rows) else 0


# --- export ------------------------------------------------------------------------------------------------


def add_export(subparsers: Subparsers) -> None:
    """zinc-attn export"""
    parser = add_command(
        subparsers,
        "export",
        "write the SPIR-V and a manifest for a runtime without Python",
        "manifest.json says how to build, feed and order the kernels: bindings, specialisation constants, grids, the\n"
        "work buffer's words, cache and row layouts, the split rule, barriers, and every file's SHA-256. With --shape\n"
        "also the numbers and split tables of these shapes. examples/embed_c reads it. Touches no device.",
        "  zinc-attn export kernels --shape 16/2/256\n"
        "  zinc-attn export kernels --shape 16/2/256,32/4/128 --dtype q8_0 --page-size 64 --compute-units 48",
    )
    parser.add_argument("directory", metavar="DIR", help="made where it is missing; files in it are replaced")
    parser.add_argument("--shape", metavar="Q/KV/D,…", help="q_heads/kv_heads/head_dim, for example 16/2/256")
    parser.add_argument("--dtype", default="f16", choices=DTYPE_BYTES, help="of the shapes' K and V (default: f16)")
    parser.add_argument(
        "--page-size", type=int, default=PAGE_SIZE, metavar="N", help=f"tokens per page (default: {PAGE_SIZE})"
    )
    parser.add_argument(
        "--compute-units",
        type=int,
        default=DEFAULT_COMPUTE_UNITS,
        metavar="N",
        help=f"of the device that the split tables are for (default: {DEFAULT_COMPUTE_UNITS})",
    )
    parser.add_argument("--json", action="store_true", help="the manifest on stdout too, as one line")
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    """Write the files and say what they are."""
    chosen = [AttnShape.parse(text.strip()) for text in args.shape.split(",")] if args.shape else []
    options = {"dtype": args.dtype, "page_size": args.page_size, "compute_units": args.compute_units}
    made = export.export(args.directory, chosen, **options)
    if args.json:
        print_json([made])
    size = binary_size(sum(kernel["bytes"] for kernel in made["kernels"]))
    say(f"written: {Path(args.directory) / export.MANIFEST} and {len(made['kernels'])} SPIR-V modules ({size})")
    return 0


# --- generate ----------------------------------------------------------------------------------------------


def add_generate(subparsers: Subparsers) -> None:
    """zinc-attn generate"""
    parser = add_command(
        subparsers,
        "generate",
        "run a Hugging Face checkpoint with its attention on the device",
        "The model runs in transformers on the CPU, its keys and values live on the Vulkan device. Text goes to\n"
        "stdout as it comes; tokens/s, and the attention function's share of decode time, to stderr. Nothing is\n"
        "ever downloaded. --selfcheck generates again with other split layouts, page sizes and prefill chunks.\n\n"
        "exit status:\n"
        "  0  fine\n"
        "  1  --selfcheck: a layout or a page size gave other bits\n"
        "  2  wrong arguments, no device, no room, or a model that cannot be run",
        "  zinc-attn generate --model ~/models/Qwen3-0.6B --prompt 'The sea is' --max-new-tokens 64\n"
        "  zinc-attn generate --model checkpoint --prompt-ids 1,2,3 --dtype q8_0 --selfcheck",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", required=True, help="folder with config.json, *.safetensors and tokenizer files")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="as it is, without a chat template; - reads stdin")
    given.add_argument("--prompt-ids", metavar="N,…", help="token ids; ids come out, too")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the best token, always (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="of the drawing above temperature 0 (default: 0)")
    add("--prefill-chunk", type=int, metavar="N", help="prompt tokens per forward (default: all)")
    add_cache_arguments(parser)
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--num-splits", type=int, metavar="N", help="splits (default: the split rule)")
    layout.add_argument("--split-size", type=int, metavar="N", help="keys per split")
    add("--capacity", type=int, metavar="N", help="tokens that the cache holds (default: what is needed)")
    add("--selfcheck", action="store_true", help="compare layouts, page sizes and prefill chunks")
    add("--json", action="store_true", help="one JSON object on stdout, in place of the text")
    add_device_arguments(parser)
    parser.set_defaults(run=run_generate)


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """--dtype and --page-size of a model's cache."""
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="of keys and values (default: the model's)")
    parser.add_argument(
        "--page-size", type=int, default=PAGE_SIZE, metavar="N", help=f"tokens per page (default: {PAGE_SIZE})"
    )


def run_generate(args: argparse.Namespace) -> int:
    """Generate, and check."""
    need("rich")
    settings = generate.Settings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        prefill_chunk=args.prefill_chunk,
        dtype=args.dtype,
        page_size=args.page_size,
        num_splits=args.num_splits,
        split_size=args.split_size,
        capacity=args.capacity,
    )
    given = parse_ids(args.prompt_ids) if args.prompt is None else None
    host = generate.load_model(args.model)
    tokenizer = generate.load_tokenizer(args.model) if given is None else None
    if given is None and tokenizer is None:
        raise ArgumentError(f"prompt: {args.model} has no tokenizer files, expected --prompt-ids, for example 1,2,3")
    text = read_stdin() if args.prompt == "-" else args.prompt
    prompt = given if tokenizer is None else [int(i) for i in tokenizer(text)["input_ids"]]
    assert prompt is not None
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)

    def show_id(token: int) -> None:
        show(f"{',' if pieces else ''}{token}")

    on_token, end = generate.stream_text(tokenizer, show) if tokenizer else (show_id, lambda: None)

    with Device.open(args.device, runtime=args.runtime) as device:
        note_cpu(device.info)
        if tokenizer is None:
            say("token ids in, token ids out: no tokenizer is used")
        traced = generate.AttentionTrace(digests=args.selfcheck)
        made = generate.generate_ids(host, device, prompt, settings, on_token=on_token, trace=traced)
        end()
        if not args.json:
            print(flush=True)
            say_figures(host, device.info, made)
        checks: list[generate.Check] = []
        if args.selfcheck:
            with progress_bar() as progress:
                checks = generate.selfcheck(host, device, prompt, settings, made, traced, progress)
        if args.json:
            record: dict[str, Any] = {"model": host.name, "device": device.info.name, "driver": device.info.driver}
            record |= {"runtime": device.runtime.name, "settings": {**asdict(settings), "dtype": made.dtype}}
            record |= {"ids": made.ids, "text": "".join(pieces) if tokenizer else None, "stopped": made.stopped}
            print_json([record | made.figures | {"selfcheck": [asdict(one) for one in checks] or None}])
    if checks and not args.json:
        print_checks(checks)
    return 1 if any(one.status == "DIFFERENT" for one in checks) else 0


def read_stdin() -> str:
    """All of stdin. ArgumentError where it is closed, or no text."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"prompt: stdin cannot be read: {error}; expected text") from error


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` to token ids."""
    found = [parse_digits(word) for word in text.split(",")]
    if None in found:
        raise ArgumentError(f"prompt_ids: got {shown(text)}, expected token ids such as 1,2,3")
    return [number for number in found if number is not None]


def say_figures(host: generate.HFModel, info: DeviceInfo, made: generate.Generation) -> None:
    """Tokens per second and attention's share, on stderr."""
    figures = made.figures
    say(f"{host.name} on the CPU, attention on {info.name}, cache {made.dtype}")
    rate = figure(figures["prefill_tokens_s"])
    say(f"prefill  {plural(made.prompt_tokens, 'token')} in {made.prefill_s:.3g} s: {rate} tokens/s")
    if figures["decode_tokens_s"] is not None:
        say(
            f"decode   {plural(len(made.steps_s), 'token')} in {made.decode_s:.3g} s: "
            f"{figure(figures['decode_tokens_s'])} tokens/s, median {figure(figures['median_step_ms'])} ms; "
            f"attention {100 * figures['attention_share']:.3g} %"
        )


def print_checks(checks: Sequence[generate.Check]) -> None:
    """The self-check's table and what it says."""
    table = new_table("varied", "value", "bits of attention and logits", "token ids", left=4)
    for one in checks:
        bits = "not compared" if one.bits_equal is None else "equal" if one.bits_equal else one.status
        style = {"DIFFERENT": "bold red", "host differs": "yellow"}.get(one.status)
        table.add_row(one.kind, one.value, bits, "equal" if one.ids_equal else "differ", style=style)
    print_table(table)
    for one in checks:
        if one.text:
            print(f"{one.kind} {one.value}: {one.text}")
    if any(one.kind == "chunks" and not one.ids_equal for one in checks):
        print("The model's own sums may round differently for other numbers of rows; attention's do not.")


# --- validate ----------------------------------------------------------------------------------------------


def add_validate(subparsers: Subparsers) -> None:
    """zinc-attn validate"""
    steps = generate.STEPS
    parser = add_command(
        subparsers,
        "validate",
        "decode a model at long contexts with every split layout",
        f"Fills the cache with seeded normal keys and values up to {steps} tokens before each context (no prefill;\n"
        f"linear-attention layers begin with a fresh state), then decodes the last {steps} positions on fixed token\n"
        "ids with every layout. Attention outputs, layer by layer, and logits must have the bits of a single split,\n"
        f"and the outputs a relative L2 error of at most {generate.BOUND:g} against float64.\n\n"
        "exit status:\n"
        "  0  every bit is as it must be\n"
        "  1  some are not\n"
        "  3  those of attention are, but the model's own differ, or the error is beyond the bound\n"
        "  2  wrong arguments, no device, a model that cannot be run, or a context there is no room for",
        "  zinc-attn validate --config examples/qwen3.6-style-tiny.json\n"
        "  zinc-attn validate --model ~/models/Qwen3.6-35B-A3B --contexts 32k,128k --layouts 8,auto",
    )
    add = parser.add_argument
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--model", metavar="DIR", help="folder with config.json and *.safetensors")
    given.add_argument("--config", metavar="FILE", help="a config.json; weights are random, of --seed")
    add("--contexts", default=generate.CONTEXTS, metavar="N,…", help="keys, k = 1024 (default: %(default)s)")
    add("--layouts", default=generate.LAYOUTS, metavar="S,…", help="splits, auto, size:KEYS (default: %(default)s)")
    add_cache_arguments(parser)
    add("--seed", type=int, default=0, metavar="N", help="of keys, values, token ids and weights (default: 0)")
    add("--json", action="store_true", help="JSON lines on stdout, one per context as it is ready")
    add_device_arguments(parser)
    parser.set_defaults(run=run_validate)


def run_validate(args: argparse.Namespace) -> int:
    """Validate, and print. A wrong bit is more than an unmet bound, and that more than a context without room."""
    need("rich")
    contexts, layouts = parse_contexts(args.contexts), parse_split_specs(args.layouts)
    seed = check_int("seed", args.seed, 0)
    for context in contexts:
        check_int("contexts", context, generate.STEPS)
    host = generate.load_model(args.model) if args.model else generate.build_model(args.config, seed)
    options = generate.ValidationOptions(args.dtype, args.page_size, seed)
    with Device.open(args.device, runtime=args.runtime) as device:
        info = device.info
        note_cpu(info)
        about = {"model": host.name, "device": info.name, "driver": info.driver, "runtime": device.runtime.name}

        def on_context(one: generate.ContextResult) -> None:
            if args.json:
                print_json([about | one.to_dict()])
                sys.stdout.flush()

        with progress_bar() as progress:
            found = generate.validate(
                host, device, contexts, layouts, options, progress=progress, on_context=on_context
            )
    if not args.json:
        print(f"{info.name} ({info.driver}), {about['runtime']}")
        print(f"{host.name}: {host.describe()}; cache {found[0].dtype}")
        print_validation(found)
    words = {one.status for one in found}
    if any(row.status == "DIFFERENT" for one in found for row in one.layouts):
        return 1
    return UNMET if "FAIL" in words else 2 if "refused" in words else 0


def print_validation(found: Sequence[generate.ContextResult]) -> None:
    """A line per context and layout; then what float64 says, and what went wrong."""
    table = new_table("context", "layout", "splits", "bits", "ms per\nstep", "attn\nms/step")
    for one in found:
        if one is not found[0]:
            table.add_section()
        for row in one.layouts:
            style = {"DIFFERENT": "bold red", "host differs": "yellow"}.get(row.status)
            cells = (row.layout, f"{row.splits:,}", row.status, figure(row.step_ms), figure(row.attention_ms))
            table.add_row(f"{one.context:,}", *cells, style=style)
        if one.refused:
            table.add_row(f"{one.context:,}", "–", "–", "refused", style="yellow")
    print_table(table)
    print("equal: attention of every layer, and logits, have the bits of the baseline, a single split.")
    for one in found:
        if one.refused:
            print(f"{one.context:,} keys: refused: {one.refused}")
            continue
        word = "at most" if one.relative_l2 <= generate.BOUND else "FAIL, expected at most"
        print(
            f"{one.context:,} keys against float64: max abs error {one.max_abs:.2g}, relative L2 "
            f"{one.relative_l2:.2g} ({word} {generate.BOUND:g}), the worst of {plural(len(one.layers), 'layer')}"
        )
        for row in one.layouts:
            if row.difference:
                print(f"{one.context:,} keys, layout {row.layout}: {row.status}: {row.difference}")


if __name__ == "__main__":
    sys.exit(main())
