"""``zinc-attn rdna4``: the compiler gate, a table of what the compiler made of each kernel and the broken gates."""

from __future__ import annotations

import argparse

from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..tools import rdna4
from .arguments import UNMET, Subparsers, add_command, parse_shapes
from .terminal import plural, print_rows, say


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.share("--shape", said="those of the preset models", several=True)
    parser.share("--dtype", said=f"with --shape {','.join(rdna4.USUAL)}", several=True)


def run(args: argparse.Namespace) -> int:
    if args.dtype and not args.shape:
        raise ArgumentError("dtype: got --dtype without --shape, expected both, or neither")
    dtypes = [storage_dtype(text.strip()) for text in args.dtype.split(",")] if args.dtype else rdna4.USUAL
    shapes = parse_shapes(args.shape) if args.shape else []
    specs = list(dict.fromkeys(spec for shape in shapes for spec in rdna4.specs_for(shape, dtypes=dtypes)))
    if not specs:
        say("compiling the variants of all presets: about a minute on two free cores, four on a busy machine")
    reports = rdna4.compile_variants(specs or None)
    print_rows(*rdna4.table(reports), left=1)
    broken = [*rdna4.violations(reports), *(() if specs else rdna4.graph_violations())]
    for sentence in broken:
        say(sentence)
    if not broken:
        most = max(r.lds_bytes for r in reports)
        also = "" if specs else f", and {plural(len(rdna4.graph_programs()), 'program')} of the graph"
        print(f"{len(reports)} variants: all wave32, no spills, LDS at most {most} bytes{also}: every gate holds")
    return UNMET if broken else 0
