"""``zinc-attn rdna4``: the compiler gate, a table of what the compiler made of each kernel and the broken gates."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from ..checks import plain
from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..kernels.declarations import KERNELS
from ..runtime.device import SPIRV
from ..tools import rdna4
from .arguments import UNMET, Subparsers, add_command, add_shared, parse_shapes
from .terminal import say


def add_rdna4(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "rdna4",
        "what RADV's compiler makes of every kernel for gfx1201, without the card",
        "Wave size, registers, LDS, spills, occupancy and instructions of each variant, and an estimate of issue\n"
        "cycles per key. Needs Mesa 25.0's RADV.\n\n"
        "exit status: 0 every gate holds, 3 one does not, 2 it cannot be known here",
        "  zinc-attn rdna4\n  zinc-attn rdna4 --family gfx1200 --json\n"
        f"  zinc-attn rdna4 --shape {rdna4.UNEQUAL_SHAPES[0]},{rdna4.UNEQUAL_SHAPES[-1]}",
    )
    add = parser.add_argument
    add("--family", default="gfx1201", choices=rdna4.FAMILIES)
    add("--json", action="store_true", help="every number, one object per variant")
    add_shared(parser, "--shape", said="those of the preset models", several=True)
    add_shared(parser, "--dtype", said=f"with --shape {','.join(rdna4.USUAL)}", several=True)
    add("--isa", metavar="KERNEL:HEAD_DIM:HEADS", help="print one variant's program")
    add("--spirv", type=Path, default=SPIRV, help="folder of the modules (default: the shipped ones)")
    parser.set_defaults(run=run_rdna4)


def run_rdna4(args: argparse.Namespace) -> int:
    """Compile, print, and check the gates."""
    if not os.path.isfile(args.spirv / KERNELS[0].file):
        raise ArgumentError(f"spirv: got {plain(args.spirv)}, expected a folder with the SPIR-V modules")
    if why := rdna4.missing(args.family):
        say(why)
        return 2
    if args.isa:
        print(rdna4.isa_text(rdna4.Spec.parse(args.isa), args.family, args.spirv))
        return 0
    if args.dtype and not args.shape:
        raise ArgumentError("dtype: got --dtype without --shape, expected both, or neither")
    dtypes = [storage_dtype(text.strip()) for text in args.dtype.split(",")] if args.dtype else rdna4.USUAL
    shapes = parse_shapes(args.shape) if args.shape else []
    specs = list(dict.fromkeys(spec for shape in shapes for spec in rdna4.specs_for(shape, dtypes=dtypes)))
    if not specs:
        say("compiling the variants of all presets: about a minute on two free cores, four on a busy machine")
    reports = rdna4.compile_variants(specs or None, args.family, args.spirv)
    print(json.dumps([r.to_dict() for r in reports], indent=1) if args.json else rdna4.table(reports))
    broken = rdna4.violations(reports)
    for sentence in broken:
        say(sentence)
    if not args.json and not broken:
        most = max(r.lds_bytes for r in reports)
        print(f"{len(reports)} variants: all wave32, no spills, LDS at most {most} bytes: every gate holds")
    return UNMET if broken else 0
