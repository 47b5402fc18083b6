"""``zinc-attn sweep``: verified and timed decode attention over context lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import check_int
from ..distributed.ranks import TIMEOUT_S, RankError, Ranks, start_mpi
from ..errors import ArgumentError
from ..runtime.device import Device
from ..tools.harness.files import check_out
from ..tools.harness.inputs import Inputs, parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.measure import PAGE_SIZE, CallSpec, sweep, sweep_png
from ..tools.models import ModelPreset, slug
from .arguments import (
    DEFAULT_CONTEXTS,
    Subparsers,
    add_arithmetic,
    add_command,
    add_device_arguments,
    add_model_arguments,
    add_shared,
    chosen_model,
    parse_counts,
    refuse_arithmetic,
)
from .measured import leave_files, print_sweep, print_sweep_head, row_printer, sweep_title
from .terminal import need, note_cpu, progress_bar, say


def add_sweep(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "sweep",
        "verify, then time decode attention over context lengths",
        "A point is one call at one context under one split layout: append the new rows to the resident KV cache,\n"
        "attend, merge. Its out and lse are compared bit for bit with the NumPy oracle on the values as stored (those\n"
        "of some KV heads, where all would take long; it says so). With matrix units (--arithmetic) they must be\n"
        "within the bound of their roundings from float64, and have the first layout's bits. A verified point is\n"
        "timed: host clock, warm, layouts in turns; the sequences are cut back to the context, untimed, behind every\n"
        "call. The cache has one layer; a step's figures are that layer's times --layers.\n"
        "Leaves sweep.csv, sweep.jsonl and sweep.png, in place of an earlier sweep's in the same folder.\n\n"
        "With --distributed, started by mpiexec, the ranks hold the nodes of 512 keys of one sequence in proportion\n"
        "to their devices' memory; a call gathers their partial states once. Every rank compares its bits with the\n"
        "oracle, rank 0 prints. Needs the extra mpi and an MPI.\n\n"
        "exit status:\n"
        "  0  every point that ran is as it must be; what the device has no room for says refused\n"
        "  1  a point FAILED: wrong bits, or an error beyond the bound; it gets no time\n"
        "  2  wrong arguments, no device, every point refused, or a device or a rank that was lost",
        "  zinc-attn sweep --model qwen3.6-35b-a3b --contexts 1k,8k,32k,128k --splits auto,1\n"
        "  mpiexec -n 4 zinc-attn sweep --distributed --shape 32/8/128 --contexts 32k,128k\n"
        "  zinc-attn sweep --model qwen3-8b --contexts 1k,8k --dtype q8_0 --batch 3 --rows 2\n"
        "  zinc-attn sweep --shape 16/2/256 --contexts 8k --rows 1,2,4,8\n"
        "  zinc-attn sweep --shape 32/8/128 --layers 36 --contexts 4k --splits auto,8,size:2048 --json",
    )
    add_model_arguments(parser, extra="; with --kv the file's shape is the default")
    add = parser.add_argument
    add("--layers", type=int, metavar="N", help="layers with attention (default: the model's; 1 for --shape)")
    said = f"{DEFAULT_CONTEXTS}; with --kv all of its tokens"
    contexts = "numbers of keys of a sequence, the call's own rows among them, k = 1024"
    add_shared(parser, "--contexts", said=said, several=True, text=contexts)
    add_shared(parser, "--splits", said="auto,1", several=True)
    add_shared(parser, "--dtype", said="f16, or that of --kv")
    add_arithmetic(parser)
    batch = "sequences in a call, each of the same context (default: 1)"
    add("--batch", type=int, default=1, metavar="N", help=batch)
    rows = "query rows of a sequence in a call, which appends as many"
    add_shared(parser, "--rows", said="1, or the rows in --kv", several=True, text=rows)
    layout = parser.add_mutually_exclusive_group()
    add_shared(layout, "--page-size", PAGE_SIZE)
    contiguous = "no cache: K and V of one sequence as two arrays; nothing is appended"
    layout.add_argument("--contiguous", action="store_true", help=contiguous)
    kv = (
        "your own q, k and v: q (q_heads, head_dim) or (q_len, q_heads, head_dim), k and v (tokens, kv_heads, "
        "head_dim), float32 or float16; a context takes the first keys, and every sequence of a batch the same ones"
    )
    add("--kv", metavar="FILE.npz", help=kv)
    add_shared(parser, "--seed", 0, text="seed of the normal values, without --kv")
    weights = "milliseconds that the rest of a step takes; adds the tokens/s of the whole step"
    add("--weights-ms", type=float, metavar="MS", help=weights)
    add("--repeats", type=int, metavar="N", help="timed runs per point (default: 5 to 50 within 3 s)")
    ranks = "share one sequence among the ranks of mpiexec; only --device and --runtime may differ between ranks"
    add("--distributed", action="store_true", help=ranks)
    timeout = f"seconds that a rank waits for the others (default: {TIMEOUT_S:g} s)"
    add("--timeout", type=float, metavar="S", help=timeout)
    add_shared(parser, "--out", said="./sweep-MODEL-DEVICE")
    add("--json", action="store_true", help="JSON lines on stdout, as points are ready, in place of the table")
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
    check_out(args.out)
    if ranks:
        check_distributed(args)
    model, specs = sweep_specs(args)
    quiet = ranks is not None and ranks.rank > 0
    options: dict[str, Any] = {}
    with ExitStack() as stack:
        device = stack.enter_context(Device.open(args.device, runtime=args.runtime))
        refuse_arithmetic(args.arithmetic, device, specs[0].dtype, model.shape)
        if not quiet:
            note_cpu(device.info)
            note_contexts(model, specs[0].contexts)
            if not args.json:
                print_sweep_head(device, model, specs, ranks)
            options = {"on_row": row_printer(args), "progress": stack.enter_context(progress_bar())}
        rows = [row for spec in specs for row in sweep(device, spec, ranks=ranks, **options)]
        info = device.info
    if not quiet:
        if not args.json:
            print_sweep(rows)
        png = sweep_png(rows, sweep_title(model, specs, ranks)) if any(row.tokens_s for row in rows) else None
        leave_files(args, f"sweep-{slug(model.name)}", info, rows, png)
    failed = any(row.status == "failed" for row in rows)
    return 1 if failed else 2 if all(row.status == "refused" for row in rows) else 0


def note_contexts(model: ModelPreset, contexts: Sequence[int]) -> None:
    """Say which contexts the model was not made for; they are measured all the same."""
    beyond = [f"{context:,}" for context in contexts if model.max_context and context > model.max_context]
    if beyond:
        say(
            f"warning: contexts {', '.join(beyond)}: {model.name} has max_position_embeddings = {model.max_context:,}; "
            "attention is measured as if it had more"
        )


def check_distributed(args: argparse.Namespace) -> None:
    """Refuse what a sweep over ranks does not have."""
    for name, given in (("batch", args.batch > 1), ("contiguous", args.contiguous), ("splits", args.splits)):
        if given:
            raise ArgumentError(
                f"{name}: got --{name} with --distributed, expected neither batch nor layout: one sequence in a cache, "
                "a split per node"
            )


def sweep_specs(args: argparse.Namespace) -> tuple[ModelPreset, list[CallSpec]]:
    """The model, and what of it is measured, by query rows."""
    model, kv = sweep_subject(args)
    q_lens = [len(kv.rows) if kv else 1] if args.rows is None else parse_counts("rows", args.rows)
    options = {name: getattr(args, name) for name in ("batch", "repeats", "weights_ms", "seed", "arithmetic")}
    spec = CallSpec(
        model.shape,
        model.attention_layers,
        tuple(parse_contexts(args.contexts or (str(len(kv.k)) if kv else DEFAULT_CONTEXTS))),
        tuple(parse_split_specs(args.splits or "auto,1")),
        dtype=args.dtype or (kv.dtype if kv else "f16"),
        q_len=q_lens[0],
        page_size=None if args.contiguous else args.page_size,
        kv=kv,
        model=model.name,
        **options,
    )
    return model, [replace(spec, q_len=q_len) for q_len in q_lens]


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
