"""``zinc-attn validate``: a model at long contexts, with every split layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..checks import check_int
from ..tools import generate
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.split_spec import parse_split_specs
from ..tools.harness.tables import figure
from .arguments import (
    UNMET,
    Subparsers,
    add_arithmetic,
    add_cache_arguments,
    add_checkpoint_argument,
    add_command,
    add_device_arguments,
    add_shared,
)
from .checkpoint import named, opened
from .terminal import arithmetic_text, need, plural, print_json, print_rows, progress_bar


def add_validate(subparsers: Subparsers) -> None:
    """Declare the command."""
    steps = generate.STEPS
    parser = add_command(
        subparsers,
        "validate",
        "decode a model at long contexts with every split layout",
        f"Fills the cache with seeded normal keys and values up to {steps} tokens before each context (no prefill;\n"
        f"linear-attention layers begin with a fresh state), then decodes the last {steps} positions on fixed token\n"
        "ids with every layout. Attention outputs, layer by layer, and logits must have the bits of a single split,\n"
        f"and the outputs a relative L2 error of at most {generate.BOUND:g} against float64 (with matrix units one\n"
        "within the bound of their roundings).\n\n"
        "exit status:\n"
        "  0  every bit is as it must be\n"
        "  1  some are not\n"
        "  3  those of attention are, but the model's own differ, or the error is beyond the bound\n"
        "  2  wrong arguments, no device, a model that cannot be run, or a context there is no room for",
        "  zinc-attn validate --config examples/qwen3.6-style-tiny.json\n"
        "  zinc-attn validate --model ~/models/Qwen3.6-35B-A3B --contexts 32k,128k --splits 8,auto",
    )
    add = parser.add_argument
    given = parser.add_mutually_exclusive_group(required=True)
    add_checkpoint_argument(given)
    given.add_argument("--config", metavar="FILE", help="a config.json; weights are random, of --seed")
    contexts = f"{generate.CONTEXTS}, and none beyond the model's maximum"
    add_shared(parser, "--contexts", said=contexts, several=True)
    add_shared(parser, "--splits", generate.LAYOUTS, several=True)
    add_cache_arguments(parser)
    add_arithmetic(parser)
    add_shared(parser, "--seed", 0, text="seed of keys, values, token ids and weights")
    add("--json", action="store_true", help="JSON lines on stdout, one per context as it is ready")
    add_device_arguments(parser)
    parser.set_defaults(run=run_validate)


def run_validate(args: argparse.Namespace) -> int:
    """Validate, and print. A wrong bit is more than an unmet bound, and that more than a context without room."""
    need("rich")
    contexts, layouts = parse_contexts(args.contexts or generate.CONTEXTS), parse_split_specs(args.splits)
    seed = check_int("seed", args.seed, 0)
    for context in contexts:
        check_int("contexts", context, generate.STEPS)
    options = generate.ValidationOptions(args.dtype, args.page_size, seed, args.arithmetic)
    with opened(args) as (host, _, device):
        info, most = device.info, host.max_positions
        if args.contexts is None and most is not None:
            contexts = list(dict.fromkeys(min(context, most) for context in contexts))
        about = named(host, device) | {"arithmetic": args.arithmetic}
        found: list[generate.ContextResult] = []
        with progress_bar() as progress:
            for one in generate.validate(host, device, contexts, layouts, options, progress):
                found.append(one)
                if args.json:
                    print_json([about | one.to_dict()])
    if not args.json:
        print(f"{info.name} ({info.driver}), {about['runtime']}")
        print(f"{host.name}: {host.describe()}; cache {found[0].dtype}{arithmetic_text(args.arithmetic)}")
        print_validation(found)
    words = {one.status for one in found}
    if any(row.status == "DIFFERENT" for one in found for row in one.layouts):
        return 1
    return UNMET if "FAIL" in words else 2 if "refused" in words else 0


def print_validation(found: Sequence[generate.ContextResult]) -> None:
    """A line per context and layout; then what float64 says, and what went wrong."""
    lines = []
    for one in found:
        for row in one.layouts:
            cells = (row.layout, f"{row.splits:,}", row.status, figure(row.step_ms), figure(row.attention_ms))
            lines.append([f"{one.context:,}", *cells])
        if one.refused:
            lines.append([f"{one.context:,}", "–", "–", "refused", "", ""])
    print_rows(("context", "layout", "splits", "bits", "ms per\nstep", "attn\nms/step"), lines, sections=1)
    print("equal: attention of every layer, and logits, have the bits of the baseline, a single split.")
    for one in found:
        if one.refused:
            print(f"{one.context:,} keys: refused: {one.refused}")
            continue
        word = "at most" if all(layer.in_bound for layer in one.layers) else "FAIL, expected at most"
        bound = f"{word} {generate.BOUND:g}"
        if (share := one.worst("bound_share")) is not None:
            bound = f"{share:.2%} of the bound of matrix units, {word} 100 %"
        print(
            f"{one.context:,} keys against float64: max abs error {one.worst('max_abs'):.2g}, relative L2 "
            f"{one.worst('relative_l2'):.2g} ({bound}), the worst of {plural(len(one.layers), 'layer')}"
        )
        for row in one.layouts:
            if row.difference:
                print(f"{one.context:,} keys, layout {row.layout}: {row.status}: {row.difference}")
