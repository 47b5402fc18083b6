"""``zinc-attn validate``: a model at long contexts, with every split layout."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..checks import check_int
from ..dtypes import storage_dtype
from ..tools import generate
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import VARIED_LAYOUTS, parse_split_specs
from .arguments import UNMET, Subparsers, add_command
from .checkpoint import named, opened
from .terminal import arithmetic_text, print_json, print_rows, progress_bar


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run, steps=generate.STEPS)
    given = parser.add_mutually_exclusive_group(required=True)
    parser.checkpoint(given)
    given.add_argument("--config", metavar="FILE", help="a config.json; weights are random, of --seed")
    contexts = f"{generate.CONTEXTS}, and none beyond the model's maximum"
    parser.share("--contexts", said=contexts, several=True)
    parser.share("--splits", VARIED_LAYOUTS, several=True)
    parser.cache()
    parser.arithmetic()
    parser.share("--seed", 0, text="seed of keys, values, token ids and weights")
    parser.flag("--json", "JSON lines on stdout, one per layout and oracle as it is ready")
    parser.device()


def run(args: argparse.Namespace) -> int:
    """Validate, and print. A wrong bit is more than an unmet bound, and that more than a context without room."""
    contexts, layouts = parse_contexts(args.contexts or generate.CONTEXTS), parse_split_specs(args.splits)
    for context in contexts:
        check_int("contexts", context, generate.STEPS)
    settings = generate.Settings(**{name: getattr(args, name) for name in ("dtype", "seed", "page_size", "arithmetic")})
    found: list[generate.Finding] = []
    with opened(args) as (host, _, device), progress_bar() as progress:
        dtype, most = storage_dtype(args.dtype or host.dtype), host.max_positions
        if args.contexts is None and most is not None:
            contexts = list(dict.fromkeys(min(context, most) for context in contexts))
        about = named(host, device) | {"arithmetic": args.arithmetic, "dtype": dtype}
        for one in generate.validate(host, device, contexts, layouts, settings, progress):
            found.append(one)
            if args.json:
                print_json([about | asdict(one)])
    if not args.json:
        print(f"{about['device']} ({about['driver']}), {about['runtime']}")
        print(f"{host.name}; cache {dtype}{arithmetic_text(args.arithmetic)}")
        lines = [(f"{one.context:,}", one.what, one.status) for one in found]
        print_rows(("context", "layout", "bits"), lines, sections=1)
        print("Layouts are compared with a single split in each layer's attention and in logits, that with the oracle.")
        for one in found:
            if one.text:
                print(f"{one.context:,} keys, {one.what or 'all'}: {one.status}: {one.text}")
    statuses = {one.status for one in found}
    if "DIFFERENT" in statuses:
        return 1
    return UNMET if statuses & {"host differs", "beyond bound"} else 2 if "refused" in statuses else 0
