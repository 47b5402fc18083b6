"""``zinc-attn bench``: times of the kernels, dispatchers, dtypes and layouts in turns."""

import argparse
from typing import Final

from ..tools.measure import OTHERS, check_others
from .arguments import Subparsers, add_command, chosen_model, installed_runtimes, parse_shapes, shape_model
from .measured import call_spec, run_calls
from .terminal import arithmetic_text, model_text

FIGURE: Final = "kv_gb_s", "GB/s of K and V by context, one call of one layer"


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.share("--device")
    parser.share("--runtime", installed_runtimes(), several=True)
    parser.model(shapes="16/2/256,32/4/128")
    parser.share("--dtype", "f16", several=True)
    parser.measuring()
    text = f"{' and '.join(OTHERS)}: time these on the CPU in turns with the device, and print every error"
    parser.add_argument("--against", dest="others", metavar="P,…", help=text)


def run(args: argparse.Namespace) -> int:
    against = [name.strip() for name in args.others.split(",")] if args.others else []
    check_others(against)
    models = [chosen_model(args)] if args.model else [shape_model(shape) for shape in parse_shapes(args.shape)]
    dtypes, more = [dtype.strip() for dtype in args.dtype.split(",")], {"page_size": None, "against": against}
    specs = [[call_spec(args, model, dtype, **more) for dtype in dtypes] for model in models]
    names = ", ".join(model_text(model, args.dtype) for model in models)
    return run_calls(args, specs, f"one layer, {names}{arithmetic_text(args.arithmetic)}", FIGURE)
