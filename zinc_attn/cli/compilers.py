"""``zinc-attn compilers``: each kernel under the compilers of GPUs that are not here, and the broken gates."""

import argparse
from pathlib import Path

from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..tools import compilers
from .arguments import UNMET, Subparsers, add_command, parse_shapes
from .terminal import plural, print_rows, say


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run, alias="rdna4")
    names = ", ".join(compilers.TARGETS)
    parser.add_argument("--target", metavar="T,…", default="gfx1201", help=f"of {names} (default: %(default)s)")
    text = "Debian's packages of another Mesa, unpacked, with its C library (default: the system's Mesa)"
    parser.add_argument("--mesa", metavar="FOLDER", type=Path, help=text)
    parser.share("--shape", said="those of the preset models, of other targets than gfx1201 four", several=True)
    parser.share("--dtype", said=f"with --shape {','.join(compilers.USUAL)}", several=True)


def run(args: argparse.Namespace) -> int:
    if args.dtype and not args.shape:
        raise ArgumentError("dtype: got --dtype without --shape, expected both, or neither")
    dtypes = [storage_dtype(text.strip()) for text in args.dtype.split(",")] if args.dtype else compilers.USUAL
    shapes = parse_shapes(args.shape) if args.shape else []
    statuses = []
    for compiler in [compilers.Compiler(name.strip(), args.mesa) for name in args.target.split(",")]:
        layout = compilers.layout_for(compiler)
        wanted = [spec for shape in shapes for spec in compilers.specs_for(shape, 0, dtypes, layout)]
        statuses.append(report(compiler, list(dict.fromkeys(wanted))))
    return max(statuses)


def report(compiler: compilers.Compiler, specs: list[compilers.Spec]) -> int:
    """Print a target's table and its broken gates; without ``specs`` of all variants, and of the graph."""
    if not specs:
        say("compiling every variant: about a minute on two free cores, four on a busy machine")
    reports = compilers.compile_variants(specs or None, compiler)
    print(f"{compiler.name} ({compiler.target.title}), Mesa {reports[0].compiled.mesa}")
    print_rows(*compilers.table(reports), left=1)
    broken = [*compilers.violations(reports), *(() if specs else compilers.graph_violations(compiler))]
    for sentence in broken:
        say(f"{compiler.name}: {sentence}")
    if not broken:
        programs = plural(len(compilers.graph_programs(compiler)), "program")
        print(f"{len(reports)} variants{'' if specs else f', and {programs} of the graph'}: every gate holds")
    return UNMET if broken else 0
