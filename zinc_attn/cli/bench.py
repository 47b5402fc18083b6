"""``zinc-attn bench``: times of the kernels, dispatchers, dtypes and layouts in turns."""

from __future__ import annotations

import argparse

from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.measure import CallSpec
from .arguments import Subparsers, add_command, installed_runtimes, parse_shapes
from .measured import run_calls
from .terminal import arithmetic_text


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.share("--device")
    parser.share("--runtime", installed_runtimes(), several=True)
    parser.share("--shape", "16/2/256,32/4/128", several=True)
    parser.share("--dtype", "f16", several=True)
    parser.measuring()


def run(args: argparse.Namespace) -> int:
    contexts, splits = parse_contexts(args.contexts), parse_split_specs(args.splits)
    options = {"splits": splits, "page_size": None, "repeats": args.repeats, "arithmetic": args.arithmetic}
    specs = [
        [CallSpec(shape, 1, contexts, dtype=dtype.strip(), **options) for dtype in args.dtype.split(",")]
        for shape in parse_shapes(args.shape)
    ]
    title = f"one layer, {args.shape}, {args.dtype}{arithmetic_text(args.arithmetic)}"
    return run_calls(args, specs, title, ("kv_gb_s", "KV GB/s of the call"))
