"""``zinc-attn generate --chat``: a conversation, a line of stdin per turn; and the figures of a generation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from ..errors import ArgumentError
from ..runtime.protocol import DeviceInfo
from ..tools import generate
from ..tools.harness.tables import figure
from .checkpoint import COMPILING, opened
from .terminal import arithmetic_text, plural, print_json, progress_bar, say


def run_chat(args: argparse.Namespace, settings: generate.Settings) -> int:
    """Answer line by line until stdin ends."""
    turns: list[generate.Turn] = []
    with ExitStack() as stack:
        what = "chat: {} has no tokenizer, expected a checkpoint with one"
        host, tokenizer, device = stack.enter_context(opened(args, tokenizer=what))
        with progress_bar(COMPILING):
            talk = stack.enter_context(generate.open_conversation(host, tokenizer, device, settings))
        say(f"{host.name}: a line is a turn; Ctrl-D ends the conversation, Ctrl-C an answer")
        for line in read_turns():
            turns.append(talk.answer(line, (lambda piece: None) if args.json else show))
            end_turn(turns, args.json)
        figures = [turn.made for turn in turns if turn.made is not None]
        if figures:
            made = generate.combined(figures, talk.warm_up_s)
            kept = sum(turn.kept_tokens for turn in turns)
            say(f"{plural(len(turns), 'turn')}; {plural(kept, 'token')} of prompts were in the cache already")
            say_figures(host, device.info, made, args.arithmetic)
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


def show(piece: str) -> None:
    """A piece of an answer on stdout, at once."""
    print(piece, end="", flush=True)


def end_turn(turns: list[generate.Turn], as_json: bool) -> None:
    """End the last answer's line, or print its record, and say why it ended early."""
    turn = turns[-1]
    stopped = "interrupted" if turn.made is None else turn.made.stopped
    if as_json:
        figures = {} if turn.made is None else turn.made.figures
        record = {"turn": len(turns), "text": turn.text, "ids": turn.ids, "stopped": stopped}
        print_json([figures | record | {"prompt_tokens": turn.prompt_tokens, "kept_tokens": turn.kept_tokens}])
        sys.stdout.flush()
    else:
        print(flush=True)
    if stopped == "length":
        say(f"the answer ends after {plural(len(turn.ids), 'token')}: see --max-new-tokens and --capacity")
    if stopped == "interrupted":
        say("interrupted: what is above stays in the conversation" if turn.ids else "interrupted before the answer")


def say_figures(host: generate.HFModel, info: DeviceInfo, made: generate.Generation, arithmetic: str) -> None:
    """Tokens per second and attention's share, on stderr."""
    figures = made.figures
    say(f"{host.name} on the CPU, attention on {info.name}, cache {made.dtype}{arithmetic_text(arithmetic)}")
    say(f"warm-up  {made.warm_up_s:.3g} s, which is in no other figure")
    rate = figure(figures["prefill_tokens_s"])
    say(f"prefill  {plural(made.prompt_tokens, 'token')} in {made.prefill_s:.3g} s: {rate} tokens/s")
    if figures["decode_tokens_s"] is not None:
        say(
            f"decode   {plural(len(made.steps_s), 'token')} in {figures['decode_s']:.3g} s: "
            f"{figure(figures['decode_tokens_s'])} tokens/s, median {figure(figures['median_step_ms'])} ms; "
            f"attention {100 * figures['attention_share']:.3g} %"
        )
