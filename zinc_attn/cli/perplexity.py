"""``zinc-attn perplexity``: what a cache's dtype costs a model, on real text."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..checks import check_int
from ..dtypes import storage_dtype
from ..files import read_text
from ..planning.arithmetic import EXACT
from ..storage import STORAGE
from ..tools import generate
from ..tools.harness.tables import MISSING
from ..tools.measure import PAGE_SIZE
from .arguments import Subparsers, add_command
from .checkpoint import named, opened
from .terminal import arithmetic_text, print_json, print_rows, progress_bar


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.checkpoint()
    parser.path("--text", "a text in UTF-8 (default: see above)", generate.TEXT)
    most = f"{generate.CONTEXT:,}, or as many as the model takes"
    parser.number("--context", f"tokens of the text that are read (default: {most})")
    parser.share("--dtype", said=f"{','.join(STORAGE)}; with matrix units all but f32", several=True)
    parser.arithmetic()
    parser.share("--page-size", PAGE_SIZE)
    parser.flag("--json", "a JSON line per cache on stdout")
    parser.device()


def run(args: argparse.Namespace) -> int:
    every = [name for name in STORAGE if args.arithmetic in EXACT or name != "f32"]
    dtypes = [storage_dtype(word.strip()) for word in args.dtype.split(",")] if args.dtype else every
    if args.context is not None:
        check_int("context", args.context, 2)
    settings = generate.Settings(page_size=args.page_size, arithmetic=args.arithmetic)
    text = read_text(args.text, "a text file in UTF-8")
    what = "perplexity: {} has no tokenizer, expected a checkpoint with one"
    with opened(args, tokenizer=what, float32=True, dtypes=dtypes) as (host, tokenizer, device):
        context = args.context or min(generate.CONTEXT, host.max_positions or generate.CONTEXT)
        ids = generate.text_ids(tokenizer, text, context)
        with progress_bar() as progress:
            found = generate.measure_perplexity(host, device, ids, dtypes, settings, progress)
        about = named(host, device) | {"arithmetic": args.arithmetic}
    if args.json:
        print_json(about | {"text": args.text.name, "context": len(ids)} | asdict(one) for one in found)
        return 0
    print(f"{about['device']} ({about['driver']}), {about['runtime']}{arithmetic_text(args.arithmetic)}")
    print(f"{host.name} in float32: the first {len(ids):,} tokens of {args.text.name}")
    eager, *others = found
    lines = [[eager.cache, f"{eager.perplexity:.4f}", *[MISSING] * 3]]
    for one in others:
        change, same_best = one.perplexity / eager.perplexity - 1, f"{one.same_best:.2%}"
        cells = [one.cache, f"{one.perplexity:.4f}", f"{change:+.4%}", f"{one.kl:.2e}", same_best]
        lines.append([cell.replace("%", " %") for cell in cells])
    print_rows(("cache", "perplexity", "change", "KL divergence\nin nats", "same best\ntoken"), lines, left=1)
    print("KL divergence: of the next token's distribution from that of eager attention, the mean over all tokens.")
    return 0
