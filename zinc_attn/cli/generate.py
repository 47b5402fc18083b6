"""``zinc-attn generate``: a Hugging Face checkpoint whose attention runs on the device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields

from ..errors import ArgumentError
from ..tools import generate
from ..tools.harness.split_spec import SplitSpec
from .arguments import (
    Subparsers,
    add_arithmetic,
    add_cache_arguments,
    add_checkpoint_argument,
    add_command,
    add_device_arguments,
    add_shared,
    parse_numbers,
)
from .chat import run_chat, say_figures
from .checkpoint import COMPILING, named, opened
from .terminal import need, print_json, print_rows, progress_bar, say


def add_generate(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "generate",
        "run a Hugging Face checkpoint with its attention on the device",
        "The model runs in transformers on the CPU, its keys and values live on the Vulkan device. Text goes to\n"
        "stdout as it comes; tokens/s, and the attention function's share of decode time, to stderr, without the\n"
        "warm-up before. Nothing is ever downloaded. --selfcheck generates again with other split layouts, page\n"
        "sizes and prefill chunks. --chat reads turns from stdin, a line each, and answers with the checkpoint's\n"
        "chat template: Ctrl-C ends an answer, and at the prompt, like Ctrl-D, the conversation.\n\n"
        "exit status:\n"
        "  0  fine\n"
        "  1  --selfcheck: a layout or a page size gave other bits\n"
        "  2  wrong arguments, no device, no room, or a model that cannot be run",
        "  zinc-attn generate --model ~/models/Qwen3-0.6B --prompt 'The sea is' --max-new-tokens 64\n"
        "  zinc-attn generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat\n"
        "  zinc-attn generate --model checkpoint --prompt-ids 1,2,3 --dtype q8_0 --selfcheck",
    )
    add = parser.add_argument
    add_checkpoint_argument(parser, required=True)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="as it is, without a chat template; - reads stdin")
    given.add_argument("--prompt-ids", metavar="N,…", help="token ids; ids come out, too")
    given.add_argument("--chat", action="store_true", help="hold a conversation, a line of stdin per turn")
    add(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (default: %(default)s)"
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 always takes the best token (default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draws, at temperatures above 0 (default: 0)")
    add("--prefill-chunk", type=int, metavar="N", help="prompt tokens per forward (default: all)")
    add_cache_arguments(parser)
    add_shared(parser, "--splits", "auto")
    add_arithmetic(parser)
    add("--capacity", type=int, metavar="N", help="tokens that the cache holds (default: what is needed; --chat: 4096)")
    add("--selfcheck", action="store_true", help="compare layouts, page sizes and prefill chunks")
    add("--json", action="store_true", help="one JSON object on stdout, in place of the text; --chat: one per turn")
    add_device_arguments(parser)
    parser.set_defaults(run=run_generate)


def run_generate(args: argparse.Namespace) -> int:
    """Generate, and check."""
    need("rich")
    layout = SplitSpec.parse(args.splits)
    options = {"num_splits": layout.num_splits, "split_size": layout.split_size} | vars(args)
    settings = generate.Settings(**{one.name: options[one.name] for one in fields(generate.Settings)})
    if args.chat:
        if args.selfcheck:
            raise ArgumentError("selfcheck: got --chat, expected --prompt or --prompt-ids")
        return run_chat(args, settings)
    given, need_words = None, "prompt: {} has no tokenizer, expected --prompt-ids, for example 1,2,3"
    if args.prompt is None:
        given, need_words = parse_numbers("prompt_ids", args.prompt_ids, "token ids such as 1,2,3"), ""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)

    def show_id(token: int) -> None:
        show(f"{',' if pieces else ''}{token}")

    with opened(args, tokenizer=need_words) as (host, tokenizer, device):
        if tokenizer is None:
            say("token ids in, token ids out: no tokenizer is used")
        on_token, end = generate.stream_text(tokenizer, show) if tokenizer else (show_id, lambda: None)
        text = read_stdin() if args.prompt == "-" else args.prompt
        prompt = given or [int(i) for i in tokenizer(text)["input_ids"]]
        traced = generate.AttentionTrace(digests=args.selfcheck)
        made = generate.generate_ids(
            host, device, prompt, settings, on_token=on_token, trace=traced, warm=progress_bar(COMPILING)
        )
        end()
        if not args.json:
            print(flush=True)
            say_figures(host, device.info, made, args.arithmetic)
        checks: list[generate.Check] = []
        if args.selfcheck:
            with progress_bar() as progress:
                checks = generate.selfcheck(host, device, prompt, settings, made, traced, progress)
        if args.json:
            record = named(host, device) | {"settings": {**asdict(settings), "dtype": made.dtype}}
            record |= {"ids": made.ids, "text": "".join(pieces) if tokenizer else None, "stopped": made.stopped}
            print_json([record | made.figures | {"selfcheck": [asdict(one) for one in checks] or None}])
    if checks and not args.json:
        print_checks(checks)
    return 1 if any(one.status == "DIFFERENT" for one in checks) else 0


def read_stdin() -> str:
    """All of stdin. ArgumentError where it is closed, or no text."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"prompt: stdin cannot be read: {error}; expected text") from error


def print_checks(checks: Sequence[generate.Check]) -> None:
    """The self-check's table and what it says."""
    lines = []
    for one in checks:
        bits = "not compared" if one.bits_equal is None else "equal" if one.bits_equal else one.status
        lines.append([one.kind, one.value, bits, "equal" if one.ids_equal else "differ"])
    print_rows(("varied", "value", "bits of attention and logits", "token ids"), lines, left=4)
    for one in checks:
        if one.text:
            print(f"{one.kind} {one.value}: {one.text}")
    if any(one.kind == "chunks" and not one.ids_equal for one in checks):
        print("The model's own sums may round differently for other numbers of rows; attention's do not.")
