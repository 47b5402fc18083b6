"""``zinc-attn generate``: a Hugging Face checkpoint whose attention runs on the device; with --chat a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from typing import Final

from ..checks import parse_digits, shown
from ..errors import ArgumentError
from ..runtime.protocol import DeviceInfo
from ..tools import generate
from ..tools.harness.split_spec import SplitSpec
from ..tools.harness.tables import figure
from .arguments import Subparsers, add_command
from .checkpoint import named, opened
from .terminal import arithmetic_text, plural, print_json, progress_bar, say

ENDS: Final = {  # why an answer ended before the model ended it
    "length": "the answer is cut off: see --max-new-tokens and --capacity",
    "interrupted": "interrupted: what was shown stays in the conversation",
}


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.checkpoint()
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="as it is, without a chat template; - reads stdin")
    given.add_argument("--prompt-ids", metavar="N,…", help="token ids; ids come out, too")
    given.add_argument("--chat", action="store_true", help="hold a conversation, a line of stdin per turn")
    parser.number("--max-new-tokens", "tokens to generate at most", 128)
    best = "0 always takes the best token (default: 0)"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=best)
    parser.number("--seed", "seed of the draws, at temperatures above 0", 0)
    parser.number("--prefill-chunk", "prompt tokens per forward (default: all)")
    parser.cache()
    parser.share("--splits", "auto")
    parser.arithmetic()
    parser.number("--capacity", "tokens that the cache holds (default: what is needed; --chat: 4096)")
    parser.flag("--json", "one JSON object on stdout, in place of the text")
    parser.device()


def run(args: argparse.Namespace) -> int:
    layout = SplitSpec.parse(args.splits)
    options = {"num_splits": layout.num_splits, "split_size": layout.split_size} | vars(args)
    settings = generate.Settings(**{one.name: options[one.name] for one in fields(generate.Settings)})
    if args.chat:
        return run_chat(args, settings)
    prompt, need_words = list[int](), "prompt: {} has no tokenizer, expected --prompt-ids, for example 1,2,3"
    if args.prompt is None:
        prompt, need_words = parse_ids(args.prompt_ids), ""
    pieces: list[str] = []

    waiting = ExitStack()

    def show(piece: str) -> None:
        waiting.close()
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)

    with opened(args, tokenizer=need_words) as (host, tokenizer, device), waiting:
        if tokenizer:
            on_token, end = generate.stream_text(tokenizer, show)
            prompt = [int(i) for i in tokenizer(read_stdin() if args.prompt == "-" else args.prompt)["input_ids"]]
        else:
            on_token, end = lambda token: show(f"{',' if pieces else ''}{token}"), lambda: None
        waiting.enter_context(progress_bar(f"reading a prompt of {plural(len(prompt), 'token')}"))
        made = generate.generate_ids(host, device, prompt, settings, on_token)
        end()
        if args.json:
            record = named(host, device) | {"settings": {**asdict(settings), "dtype": made.dtype}}
            record |= {"ids": made.ids, "text": "".join(pieces) if tokenizer else None, "stopped": made.stopped}
            print_json([record | {"digest": made.digest} | made.figures])
        else:
            print(flush=True)
            say_figures(host, device.info, made, args.arithmetic)
    return 0


def parse_ids(text: str) -> list[int]:
    """``1,2,3`` to token ids."""
    ids = [number for number in map(parse_digits, text.split(",")) if number is not None]
    if len(ids) < text.count(",") + 1:
        raise ArgumentError(f"prompt_ids: got {shown(text)}, expected token ids such as 1,2,3")
    return ids


def run_chat(args: argparse.Namespace, settings: generate.Settings) -> int:
    """Answer line by line until stdin ends."""
    if args.json:
        raise ArgumentError("json: got --chat, expected --prompt or --prompt-ids")
    what = "chat: {} has no tokenizer, expected a checkpoint with one"
    with (
        opened(args, tokenizer=what) as (host, tokenizer, device),
        generate.open_conversation(host, tokenizer, device, settings) as talk,
    ):
        say(f"{host.name}: a line is a turn; Ctrl-D ends the conversation, Ctrl-C an answer")
        for line in read_turns():
            turn = talk.answer(line, lambda piece: print(piece, end="", flush=True))
            print(flush=True)
            if turn.stopped in ENDS:
                say(ENDS[turn.stopped])
    return 0


def read_turns() -> Iterator[str]:
    """The lines of stdin that are not blank, asked for on a terminal. ArgumentError where it is no text."""
    ask = "> " if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() else ""
    while sys.stdin is not None:
        try:
            line = input(ask)
        except (EOFError, KeyboardInterrupt) as error:
            if not ask and isinstance(error, KeyboardInterrupt):
                raise
            print(end="\n" if ask else "")
            return
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"chat: stdin cannot be read: {error}; expected text") from error
        if line.strip():
            yield line


def read_stdin() -> str:
    """All of stdin. ArgumentError where it is closed, or no text."""
    try:
        return "" if sys.stdin is None else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"prompt: stdin cannot be read: {error}; expected text") from error


def say_figures(host: generate.HFModel, info: DeviceInfo, made: generate.Generation, arithmetic: str) -> None:
    """Tokens per second, attention's share, and the digest, on stderr."""
    figures = made.figures
    say(f"{host.name} on the CPU, attention on {info.name}, cache {made.dtype}{arithmetic_text(arithmetic)}")
    rate = figure(figures["prefill_tokens_s"])
    say(f"prefill  {plural(made.prompt_tokens, 'token')} in {made.prefill_s:.3g} s with compiling: {rate} tokens/s")
    if figures["decode_tokens_s"] is not None:
        say(
            f"decode   {plural(len(made.steps_s), 'token')} in {figures['decode_s']:.3g} s: "
            f"{figure(figures['decode_tokens_s'])} tokens/s, median {figure(figures['median_step_ms'])} ms; "
            f"attention {100 * figures['attention_share']:.3g} %"
        )
    say(f"digest   {made.digest} of the token ids and logits")
