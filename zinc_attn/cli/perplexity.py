"""``zinc-attn perplexity``: what a cache's dtype costs a model, on real text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..checks import check_int
from ..dtypes import storage_dtype
from ..files import read_text
from ..storage import STORAGE
from ..tools import generate
from ..tools.harness.tables import MISSING
from ..tools.measure import PAGE_SIZE
from .arguments import (
    Subparsers,
    add_arithmetic,
    add_checkpoint_argument,
    add_command,
    add_device_arguments,
    add_shared,
)
from .checkpoint import named, opened
from .terminal import arithmetic_text, print_json, print_rows, progress_bar


def add_perplexity(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "perplexity",
        "measure what a cache's dtype costs a model on real text",
        "Reads the first tokens of a text with a cache of each dtype, and with transformers' eager attention. The\n"
        "model computes in float32 every time, so that only attention and the storage of K and V differ. The\n"
        "default text is the first chapter of Jane Austen's Pride and Prejudice (1813, public domain).",
        "  zinc-attn perplexity --model SmolLM2-135M-Instruct.Q4_1.gguf\n"
        "  zinc-attn perplexity --model ~/models/Qwen3-0.6B --text essay.txt --context 2048 --dtype f16,q8_0",
    )
    add = parser.add_argument
    add_checkpoint_argument(parser, required=True)
    add("--text", metavar="FILE", type=Path, default=generate.TEXT, help="a text in UTF-8 (default: see above)")
    most = f"{generate.CONTEXT:,}, or as many as the model takes"
    add("--context", type=int, metavar="N", help=f"tokens of the text that are read (default: {most})")
    names = ",".join(STORAGE)
    add_shared(parser, "--dtype", said=f"{names}; with matrix units all but f32", several=True)
    add_arithmetic(parser)
    add_shared(parser, "--page-size", PAGE_SIZE)
    add("--json", action="store_true", help="a JSON line per cache on stdout")
    add_device_arguments(parser)
    parser.set_defaults(run=run_perplexity)


def run_perplexity(args: argparse.Namespace) -> int:
    """Measure, and print."""
    canonical = args.arithmetic == "canonical"
    names = args.dtype or ",".join(name for name in STORAGE if canonical or name != "f32")
    dtypes = [word.strip() for word in names.split(",")]
    for dtype in dtypes:
        storage_dtype(dtype)
    if args.context is not None:
        check_int("context", args.context, 2)
    settings = generate.Settings(page_size=args.page_size, arithmetic=args.arithmetic)
    text = read_text(args.text, "a text file in UTF-8")
    what = "perplexity: {} has no tokenizer, expected a checkpoint with one"
    with opened(args, tokenizer=what, float32=True, dtypes=dtypes) as (host, tokenizer, device):
        info = device.info
        context = args.context or min(generate.CONTEXT, host.max_positions or generate.CONTEXT)
        ids = generate.text_ids(tokenizer, text, context)
        with progress_bar() as progress:
            found = generate.measure_perplexity(host, device, ids, dtypes, settings, progress)
        about = named(host, device) | {"arithmetic": args.arithmetic}
    if args.json:
        print_json(about | {"text": args.text.name, "context": len(ids)} | asdict(one) for one in found)
        return 0
    print(f"{info.name} ({info.driver}), {about['runtime']}{arithmetic_text(args.arithmetic)}")
    print(f"{host.name} in float32: the first {len(ids):,} tokens of {args.text.name}")
    lines = [[found[0].cache, f"{found[0].perplexity:.4f}", *[MISSING] * 3]]
    for one in found[1:]:
        change = 100 * (one.perplexity / found[0].perplexity - 1)
        same_best = f"{one.same_best:.2%}".replace("%", " %")
        lines.append([one.cache, f"{one.perplexity:.4f}", f"{change:+.4f} %", f"{one.kl:.2e}", same_best])
    print_rows(("cache", "perplexity", "change", "KL divergence\nin nats", "same best\ntoken"), lines, left=1)
    print("KL divergence: of the next token's distribution from that of eager attention, the mean over all tokens.")
    return 0
