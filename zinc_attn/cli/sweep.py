"""``zinc-attn sweep``: verified and timed decode attention over context lengths."""

from __future__ import annotations

import argparse

from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.measure import PAGE_SIZE, CallSpec
from .arguments import Subparsers, add_command, chosen_model
from .measured import run_calls
from .terminal import arithmetic_text, model_text, plural


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.model(layers=True)
    parser.measuring()
    parser.share("--dtype", "f16")
    parser.number("--batch", "sequences in a call, each of the same context", 1)
    parser.share("--rows", 1, text="query rows of a sequence in a call, which appends as many")
    parser.share("--page-size", PAGE_SIZE)
    parser.device()


def run(args: argparse.Namespace) -> int:
    model = chosen_model(args)
    spec = CallSpec(
        model.shape,
        model.attention_layers,
        parse_contexts(args.contexts),
        parse_split_specs(args.splits),
        q_len=args.rows,
        model=model.name,
        **{name: getattr(args, name) for name in ("dtype", "batch", "page_size", "repeats", "arithmetic")},
    )
    layers = plural(spec.layers, "attention layer")
    if model.windowed_layers:
        layers += f" ({model.windowed_layers} more with a window of {model.window} keys are not counted)"
    call = f"{plural(spec.batch, 'sequence')}, {plural(spec.q_len, 'row')}{' each' * (spec.batch > 1)} per call"
    title = f"{model_text(model, spec.dtype)}, {layers}\n{call}; cache with pages of {spec.page_size} tokens"
    title += arithmetic_text(spec.arithmetic)
    return run_calls(args, [[spec]], title, ("tokens_s", "tokens/s, attention alone"))
