"""``zinc-attn sweep``: verified and timed decode attention over context lengths."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..checks import plain
from ..errors import ArgumentError
from ..files import json_of, read_text
from ..tools.cost import CARDS, find_card
from ..tools.measure import PAGE_SIZE, CallSpec, Row, measure_calls, with_card
from .arguments import Subparsers, add_command, chosen_model
from .measured import call_spec, run_calls
from .terminal import arithmetic_text, model_text, plural

SAME: Final = ("layers", "batch", "q_len", "weights_ms", "arithmetic")  # of rows that one picture shows
SHOWN: Final = ("device", "device_kind", "runtime", "dtype", "layout", "context", "measure", "tokens_s")


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.model(layers=True)
    parser.measuring()
    parser.share("--dtype", "f16")
    parser.number("--batch", "sequences in a call, each of the same context", 1)
    parser.share("--rows", 1, text="query rows of a sequence in a call, which appends as many")
    parser.share("--page-size", PAGE_SIZE)
    weights = "what the rest of a step takes; adds tokens/s of the whole step, which the picture shows then"
    parser.add_argument("--weights-ms", type=float, metavar="MS", help=weights)
    parser.add_argument("--card", metavar="C", help=f"model the calls on it, too: one of {', '.join(CARDS)}")
    parser.path("--beside", "a sweep.jsonl, of another device perhaps, that the picture shows, too")
    parser.device()


def run(args: argparse.Namespace) -> int:
    model = chosen_model(args)
    more = {name: getattr(args, name) for name in ("batch", "page_size", "weights_ms")}
    spec = call_spec(args, model, args.dtype, q_len=args.rows, **more)
    card = find_card(args.card) if args.card else None
    if card and (spec.batch > 1 or spec.arithmetic not in ("canonical", "fused")):
        raise ArgumentError("card: got --batch above 1 or --arithmetic integer or matrix, which sweep does not model")
    beside = read_rows(args.beside, spec) if args.beside else ()
    layers = plural(spec.layers, "attention layer")
    if model.windowed_layers:
        layers += f" ({model.windowed_layers} more with a window of {model.window} keys are not counted)"
    call = f"{plural(spec.batch, 'sequence')}, {plural(spec.q_len, 'row')}{' each' * (spec.batch > 1)} per call"
    about = f"{model_text(model, spec.dtype)}, {layers}\n{call}; cache with pages of {spec.page_size} tokens"
    about += arithmetic_text(spec.arithmetic)
    figure_of = "tokens_s", "Tokens per second by context, decode attention alone"
    if spec.weights_ms is not None:
        about += f"; rest of a step {spec.weights_ms:g} ms"
        figure_of = "step_tokens_s", f"Tokens per second by context, attention and {spec.weights_ms:g} ms for the rest"

    def measure(*arguments: Any, **options: Any) -> Iterator[Row]:
        rows = measure_calls(*arguments, **options)
        return with_card(rows, card) if card else rows

    return run_calls(args, [[spec]], about, figure_of, measure=measure, beside=beside)


def read_rows(path: Path, spec: CallSpec) -> list[dict[str, Any]]:
    """The rows of a sweep.jsonl. ArgumentError where they lack something, or are of another call than ``spec``."""
    expected = "a sweep.jsonl of the same shape, layers and call"
    same = {"shape": str(spec.shape), **{name: getattr(spec, name) for name in SAME}}
    rows = [json_of(line, path, expected) for line in read_text(path, expected).splitlines()]
    if not all(isinstance(row, dict) and {*same, *SHOWN} <= row.keys() and row | same == row for row in rows):
        raise ArgumentError(f"{plain(path)}: got rows of another call, expected {expected}")
    return rows
