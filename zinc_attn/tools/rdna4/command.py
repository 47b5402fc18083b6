"""The command: ``zinc-attn rdna4``, or ``python -m zinc_attn.tools.rdna4``, prints the table and the broken gates."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import KernelError
from ...runtime.device import SPIRV
from .compiler import compile_variants, isa_text, missing
from .gates import table, violations
from .variants import FAMILIES, Spec


def main(argv: Sequence[str] | None = None) -> int:
    """0: every gate holds; 3: one does not; 2: it cannot be known here."""
    about = "The shipped kernels under RADV's compiler for RDNA4, on a machine without the card."
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.tools.rdna4", description=about)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--family", default="gfx1201", choices=FAMILIES)
    parser.add_argument("--json", action="store_true", help="every number, one object per variant")
    parser.add_argument("--isa", metavar="KERNEL:HEAD_DIM:HEADS", help="print one variant's program")
    parser.add_argument("--spirv", type=Path, default=SPIRV, help="folder of the modules (default: the shipped ones)")


def run(args: argparse.Namespace) -> int:
    """0: every gate holds; 3: one does not; 2: it cannot be known here."""
    if why := missing(args.family):
        print(why, file=sys.stderr)
        return 2
    try:
        if args.isa:
            kernel, *constants = args.isa.split(":")
            print(isa_text(Spec(kernel, *map(int, constants)), args.family, args.spirv))
            return 0
        reports = compile_variants(None, args.family, args.spirv)
    except (KernelError, TypeError, ValueError) as e:  # ArgumentError is a ValueError
        print(e, file=sys.stderr)
        return 2
    print(json.dumps([r.to_dict() for r in reports], indent=1) if args.json else table(reports))
    broken = violations(reports)
    for sentence in broken:
        print(sentence, file=sys.stderr)
    if not args.json and not broken:
        most = max(r.lds_bytes for r in reports)
        print(f"{len(reports)} variants: all wave32, no spills, LDS at most {most} bytes: every gate holds")
    return 3 if broken else 0
