"""``zinc-attn proof``: a report from a card, for a bug report or a first run on hardware."""

import argparse
import importlib.util
from datetime import datetime, timezone
from pathlib import Path

from ..runtime.device import find_device, runtime_of
from ..tools import proof
from ..tools.harness.files import check_out
from ..tools.harness.inputs import parse_contexts
from ..tools.models import slug
from .arguments import Subparsers, add_command, parse_shapes
from .terminal import note_cpu, say_written


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.device()
    parser.share("--shape", proof.SHAPES, several=True)
    said = f"{proof.CONTEXTS['gpu']}; on a CPU {proof.CONTEXTS['cpu']}; with --quick {proof.CONTEXTS['quick']}"
    parser.share("--contexts", said=said, several=True)
    parser.number("--restarts", f"how often everything is repeated (default: {proof.RESTARTS}; with --quick 1)")
    seconds = "seconds of a step (default: %(default)g)"
    parser.add_argument("--timeout", type=float, default=proof.TIMEOUT_S, metavar="S", help=seconds)
    minutes = "of the whole proof, after which no step runs (default: no limit)"
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="M", help=minutes)
    parser.path("--kit", "the models of a kit (scripts/kit), beside llama.cpp's programs; adds their logits and speed")
    parser.share("--out", said="proof-DEVICE-TIME")
    parser.flag("--quick", "one restart, short contexts, 5 timed runs: minutes on a CPU device")


def run(args: argparse.Namespace) -> int:
    """Prove, print a line per step, and write the report. 0: all is well; 1: a step is not."""
    info = find_device(args.device, args.runtime)
    contexts = args.contexts or proof.CONTEXTS["quick" if args.quick else "cpu" if info.kind == "cpu" else "gpu"]
    spec = proof.ProofSpec(
        info,
        runtime_of(info, args.runtime),
        parse_shapes(args.shape),
        parse_contexts(contexts),
        restarts=args.restarts if args.restarts is not None else 1 if args.quick else proof.RESTARTS,
        quick=args.quick,
        timeout_s=args.timeout,
        budget_s=60 * args.minutes,
        kit=args.kit,
        pictures=importlib.util.find_spec("matplotlib") is not None,
    )
    started = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    folder = Path(args.out or f"proof-{slug(info.name)}-{started}")
    check_out(folder)
    note_cpu(info)
    print(f"{info.name} ({info.driver}), {spec.runtime}", flush=True)
    report = proof.prove(spec, folder, print_step)
    well = proof.passed(report)
    print("passed" if well else "NOT passed: the report says which steps failed or were refused")
    say_written([folder / "report.md", folder / "report.json"])
    return 0 if well else 1


def print_step(step: proof.Record) -> None:
    what = f"{step['tool']} {step['shape'] or ''}"
    print(f"restart {step['restart']}  {what:<28}{step['seconds']:>8.1f} s  {proof.outcome(step)}", flush=True)
