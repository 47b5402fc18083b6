"""``zinc-attn export``: SPIR-V and a manifest for a runtime without Python."""

import argparse
from pathlib import Path

from ..shapes import KV_LAYOUTS
from ..tools import export
from ..tools.measure import PAGE_SIZE
from .arguments import DEFAULT_COMPUTE_UNITS, Subparsers, add_command, parse_shapes
from .terminal import binary_size, print_json, say


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.add_argument("directory", metavar="DIR", help="made where it is missing; files in it are replaced")
    parser.share("--shape", several=True)
    parser.share("--dtype", "f16")
    parser.share("--page-size", PAGE_SIZE)
    parser.add_argument("--kv-layout", default="tiles", choices=KV_LAYOUTS, help="of the cache: rows (NHD) or tiles")
    parser.share("--cu", DEFAULT_COMPUTE_UNITS, text="compute units of the device that the split tables are for")
    parser.flag("--json", "the manifest on stdout too, as one line")


def run(args: argparse.Namespace) -> int:
    shapes = parse_shapes(args.shape) if args.shape else []
    options = {"dtype": args.dtype, "page_size": args.page_size, "compute_units": args.cu, "kv_layout": args.kv_layout}
    manifest = export.export(args.directory, shapes, **options)
    if args.json:
        print_json([manifest])
    modules = {kernel["file"]: kernel["bytes"] for kernel in manifest["kernels"]}  # several kernels share one
    size = binary_size(sum(modules.values()))
    say(f"written: {Path(args.directory) / export.MANIFEST} and {len(modules)} SPIR-V modules ({size})")
    return 0
