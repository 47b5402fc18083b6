"""``zinc-attn decode``: the time of every step while a context grows from nothing."""

import argparse
from collections.abc import Sequence
from functools import partial

import numpy as np

from ..checks import check_int
from ..limits import MAX_CONTEXT
from ..tools.harness.tables import grouped
from ..tools.measure import CallSpec, Row, decode_steps, stalls
from .arguments import Subparsers, add_command, chosen_model, installed_runtimes
from .measured import run_calls
from .terminal import model_text, plural


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.model(layers=True)
    parser.number("--tokens", "steps", 4096)
    parser.share("--dtype", "f16")
    parser.flag("--no-prepare", "leave out Attention.prepare: steps make what they lack")
    parser.share("--device")
    parser.share("--runtime", installed_runtimes(), several=True)
    parser.output()


def run(args: argparse.Namespace) -> int:
    model, tokens = chosen_model(args), check_int("tokens", args.tokens, 1, MAX_CONTEXT)
    contexts = range(1, tokens + 1)
    spec = CallSpec(model.shape, model.attention_layers, contexts, dtype=args.dtype, model=model.name)
    title = f"{model_text(model, spec.dtype)}, {plural(spec.layers, 'layer')}, {tokens:,} steps of one token"
    measure = partial(decode_steps, prepare=not args.no_prepare)
    figure_of = "attention_ms_per_step", "ms per step, all layers"
    return run_calls(args, [[spec]], title, figure_of, measure=measure, show=print_steps)


def print_steps(rows: Sequence[Row]) -> None:
    """A line per dispatcher."""
    for runtime, runtime_rows in grouped((row.runtime, row) for row in rows).items():
        prepared = [row.seconds[0] for row in runtime_rows if row.measure == "prepare"]
        steps = [row for row in runtime_rows if row.measure == "step" and row.seconds]
        wrong = [row for row in runtime_rows if row.error]
        compared = sum(row.verified is not None for row in runtime_rows)
        print(f"{runtime}: {f'prepared in {prepared[0]:.2f} s' if prepared else 'not prepared'}", end="; ")
        if steps:
            times = {row.figures["attention_ms_per_step"] or 0.0: row.context for row in steps}
            print(f"median step {np.median(list(times)):.2f} ms, slowest {max(times):.2f}", end=" ")
            print(f"at {times[max(times)]:,} keys, {plural(len(stalls(steps)), 'stall')}", end="; ")
        print(f"{len(wrong)} DIFFER: {wrong[0].error}" if wrong else f"{compared} outputs compared, all equal")
