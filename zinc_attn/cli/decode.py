"""``zinc-attn decode``: the time of every step while a context grows from nothing."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import numpy as np

from ..checks import check_int
from ..tools.harness.files import check_out
from ..tools.measure import DecodeRun, DecodeSpec, decode_run, steps_png
from ..tools.measure.steps import STALL_MS, STALL_RATIO
from .arguments import (
    Subparsers,
    add_command,
    add_model_arguments,
    add_shared,
    chosen_model,
    installed_runtimes,
    open_devices,
)
from .measured import leave_files
from .terminal import need, note_cpu, print_json, print_rows, progress_bar

_COLUMNS = ("runtime", "prepare s", "recordings", "first ms", "median ms", "slowest ms", "at", "stalls", "bits")


def add_decode(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "decode",
        "time every step of a decode that grows from nothing",
        "A step appends one token to every layer and attends, as a model's forward does. Every 64th step's output is\n"
        "compared bit for bit with the NumPy oracle. A stall is a step above three times the median of the 16 steps\n"
        "before and behind it, or 50 ms above it. Leaves steps.csv, steps.jsonl and steps.png in --out.",
        "  zinc-attn decode --shape 9/3/64 --layers 30 --tokens 4096\n"
        "  zinc-attn decode --shape 9/3/64 --layers 30 --tokens 600 --no-prepare",
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--layers", type=int, metavar="N", help="layers with attention (default: the model's; 1 for --shape)")
    add("--tokens", type=int, default=4096, metavar="N", help="steps (default: %(default)s)")
    add_shared(parser, "--dtype", "f16")
    add("--no-prepare", action="store_true", help="leave out Attention.prepare: steps make what they lack")
    add_shared(parser, "--device")
    add_shared(parser, "--runtime", installed_runtimes(), several=True)
    add_shared(parser, "--out", said="decode-DEVICE")
    add("--json", action="store_true", help="the steps as JSON lines on stdout in place of the table")
    parser.set_defaults(run=run_decode)


def run_decode(args: argparse.Namespace) -> int:
    """Decode on every dispatcher, print, and write the files."""
    need("rich", "matplotlib")
    check_out(args.out)
    model = chosen_model(args)
    layers = model.attention_layers if args.layers is None else check_int("layers", args.layers, 1)
    spec = DecodeSpec(model.shape, layers, args.tokens, args.dtype, not args.no_prepare)
    with ExitStack() as stack:
        devices = open_devices(stack, [args.device], args.runtime)
        info = devices[0].info
        note_cpu(info)
        with progress_bar() as progress:
            runs = [decode_run(device, spec, progress) for device in devices]
    rows = [row for run in runs for row in run.rows]
    title = f"{model.name}: {layers} layers of {model.shape}, {spec.dtype}, one token a step"
    if args.json:
        print_json(row.record() for row in rows)
    else:
        print(f"{title}, {args.tokens:,} steps; {info.name} ({info.driver})")
        print_rows(_COLUMNS, [_line(run) for run in runs], 1)
        print(f"stalls: steps above {STALL_RATIO:g} times the median of their neighbors, or {STALL_MS:g} ms above it.")
    leave_files(args, "decode", info, rows, steps_png(runs, title))
    return 1 if any(run.differ for run in runs) else 0


def _line(run: DecodeRun) -> list[str]:
    ms = np.array([row.ms for row in run.rows], float)
    slowest = int(ms.argmax())
    return [
        run.rows[0].runtime,
        f"{run.prepare_s:.2f}" if run.rows[0].prepared else "none",
        str(run.recordings),
        f"{ms[0]:.2f}",
        f"{np.median(ms):.2f}",
        f"{ms[slowest]:.2f}",
        f"{slowest + 1:,}",
        str(sum(bool(row.stall) for row in run.rows)),
        f"{run.differ} of {run.compared} DIFFER" if run.differ else f"{run.compared} equal",
    ]
