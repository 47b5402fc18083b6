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
    parser = add_command(
        subparsers,
        run,
        "verify, then time decode attention over context lengths",
        "A point is one call at one context under one split layout: append the new rows to the resident KV cache,\n"
        "attend, merge. Its out and lse are compared bit for bit with the NumPy oracle on the values as stored (those\n"
        "of some KV heads, where all would take long; it says so). With matrix units (--arithmetic) they must be\n"
        "within the bound of their roundings from float64, and have the first layout's bits. Verified points are\n"
        "timed: host clock, warm, layouts in turns; the sequences are cut back to the context, untimed, behind every\n"
        "call. The cache has one layer; a step's figures are that layer's times --layers. A point with wrong output\n"
        "FAILED and has no time; one for which the device has no room is refused.\n"
        "Leaves sweep.jsonl and sweep.png, in place of an earlier sweep's in the same folder.",
        "  zinc-attn sweep --model qwen3.6-35b-a3b --contexts 1k,8k,32k,128k --splits auto,1\n"
        "  zinc-attn sweep --model qwen3-8b --contexts 1k,8k --dtype q8_0 --batch 3 --rows 2\n"
        "  zinc-attn sweep --shape 32/8/128 --layers 36 --contexts 4k --splits auto,8,size:2048 --json",
    )
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
