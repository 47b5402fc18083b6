"""``zinc-attn bench``: times of the kernels beside a read yardstick and baselines."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from ..tools.harness.files import check_out
from ..tools.harness.inputs import parse_contexts
from ..tools.measure import CallSpec, bench, bench_png
from .arguments import (
    DEFAULT_CONTEXTS,
    Subparsers,
    add_arithmetic,
    add_command,
    add_shared,
    installed_runtimes,
    open_devices,
    parse_shapes,
    refuse_arithmetic,
)
from .measured import BENCH_WORDS, leave_files, print_bench, row_printer
from .terminal import arithmetic_text, need, note_cpu, progress_bar


def add_bench(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "bench",
        "time the kernels beside a read yardstick and baselines",
        "Verifies every layout against the oracle, bit for bit (with matrix units against float64, within the bound\n"
        "of their roundings, and layouts against each other), then times runtimes and layouts in turns: the whole\n"
        "call, both passes, the gap between them, the host's work. Beside them a kernel that only reads K and V, a\n"
        "single split, one workgroup per query head, NumPy, and PyTorch where it is installed. Leaves bench.csv,\n"
        "bench.jsonl and bench.png in --out.\n\n" + "\n".join(BENCH_WORDS),
        "  zinc-attn bench\n  zinc-attn bench --runtime vulkan --shape 32/8/128 --contexts 8k --json",
    )
    add = parser.add_argument
    add_shared(parser, "--device")
    runtimes = installed_runtimes()
    add_shared(parser, "--runtime", said=runtimes, several=True)
    add_shared(parser, "--shape", "16/2/256,32/4/128", several=True)
    add_shared(parser, "--contexts", DEFAULT_CONTEXTS, several=True)
    add_shared(parser, "--dtype", "f16")
    add_arithmetic(parser)
    add("--repeats", type=int, metavar="N", help="rounds per point (default: 5 to 50 within 10 s)")
    add_shared(parser, "--seed", 0)
    add_shared(parser, "--out", said="bench-DEVICE")
    add("--json", action="store_true", help="JSON lines on stdout, as points are ready, in place of the tables")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Benchmark, print, and write the files."""
    need("rich", "matplotlib")
    check_out(args.out)
    shapes, contexts = parse_shapes(args.shape), parse_contexts(args.contexts)
    options = {name: getattr(args, name) for name in ("dtype", "repeats", "seed", "arithmetic")}
    specs = [CallSpec(shape, 1, contexts, page_size=None, **options) for shape in shapes]
    with ExitStack() as stack:
        devices = open_devices(stack, [args.device], args.runtime or installed_runtimes())
        for device in devices:
            refuse_arithmetic(args.arithmetic, device, args.dtype, *shapes)
        info = devices[0].info
        note_cpu(info)
        if not args.json:
            print(f"{info.name} ({info.driver}), {args.dtype}, one layer{arithmetic_text(args.arithmetic)}", flush=True)
        with progress_bar() as progress:
            rows = bench(devices, specs, progress=progress, on_row=row_printer(args))
    if not args.json:
        print_bench(rows)
    leave_files(args, "bench", info, rows, bench_png(rows) if any(row.kv_gb_s for row in rows) else None)
    return 1 if any(row.status == "failed" for row in rows) else 0
