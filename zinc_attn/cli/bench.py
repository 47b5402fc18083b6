"""``zinc-attn bench``: times of the kernels, dispatchers, dtypes and layouts in turns."""

from __future__ import annotations

import argparse
from typing import Final

from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.measure import OTHERS, CallSpec, check_others
from .arguments import Subparsers, add_command, chosen_model, installed_runtimes, parse_shapes, shape_model
from .measured import run_calls
from .terminal import arithmetic_text, model_text

FIGURE: Final = "kv_gb_s", "GB/s of K and V by context, one call of one layer"


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.share("--device")
    parser.share("--runtime", installed_runtimes(), several=True)
    parser.model(shapes="16/2/256,32/4/128")
    parser.share("--dtype", "f16", several=True)
    parser.measuring()
    others = f"{' and '.join(OTHERS)}: time these on the CPU in turns with the device, and print every error"
    parser.add_argument("--against", metavar="P,…", help=others)


def run(args: argparse.Namespace) -> int:
    against = [name.strip() for name in args.against.split(",")] if args.against else []
    check_others(against)
    options = {name: getattr(args, name) for name in ("repeats", "arithmetic")}
    options |= {"splits": parse_split_specs(args.splits), "page_size": None, "against": against}
    contexts, dtypes = parse_contexts(args.contexts), [dtype.strip() for dtype in args.dtype.split(",")]
    models = [chosen_model(args)] if args.model else [shape_model(shape) for shape in parse_shapes(args.shape)]
    specs = [
        [CallSpec(m.shape, m.attention_layers, contexts, dtype=dtype, model=m.name, **options) for dtype in dtypes]
        for m in models
    ]
    names = ", ".join(model_text(model, args.dtype) for model in models)
    return run_calls(args, specs, f"one layer, {names}{arithmetic_text(args.arithmetic)}", FIGURE)
