"""``zinc-attn bench``: times of the kernels, dispatchers, dtypes and layouts in turns."""

from __future__ import annotations

import argparse

from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.measure import CallSpec
from .arguments import Subparsers, add_command, add_measuring, add_shared, installed_runtimes, parse_shapes
from .measured import run_calls
from .terminal import arithmetic_text


def add_bench(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "bench",
        "compare the kernels' dispatchers, dtypes and layouts, and time their passes",
        "Verifies every call as sweep does, then times dispatchers, dtypes and layouts of a context in turns: calls\n"
        "that submit a recording and wait, of one layer whose K and V lie in two arrays. Timestamps of the device add\n"
        "the whole call, both passes and the gap between them. GB/s count each stored byte of K and V once.\n"
        "Leaves bench.jsonl and bench.png in --out.",
        "  zinc-attn bench\n  zinc-attn bench --runtime vulkan --shape 32/8/128 --contexts 8k --dtype f16,q8_0 --json",
    )
    add_shared(parser, "--device")
    add_shared(parser, "--runtime", said=installed_runtimes(), several=True)
    add_shared(parser, "--shape", "16/2/256,32/4/128", several=True)
    add_shared(parser, "--dtype", "f16", several=True)
    add_measuring(parser)
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Benchmark, print, and write the files."""
    args.runtime = args.runtime or installed_runtimes()
    contexts, splits = parse_contexts(args.contexts), parse_split_specs(args.splits)
    options = {"splits": splits, "page_size": None, "repeats": args.repeats, "arithmetic": args.arithmetic}
    specs = [
        [CallSpec(shape, 1, contexts, dtype=dtype.strip(), **options) for dtype in args.dtype.split(",")]
        for shape in parse_shapes(args.shape)
    ]
    title = f"one layer, {args.shape}, {args.dtype}{arithmetic_text(args.arithmetic)}"
    return run_calls(args, specs, title, ("kv_gb_s", "KV GB/s of the call"))
