"""``zinc-attn proof``: a report from a card, for a bug report or a first run on hardware."""

from __future__ import annotations

import argparse
import os
from datetime import datetime, timezone
from pathlib import Path

from ..runtime.device import list_devices
from ..runtime.devices import choose, memory_budget
from ..tools import proof
from ..tools.harness.inputs import parse_contexts
from ..tools.models import slug
from .arguments import Subparsers, add_command, add_device_arguments, add_shared, parse_shapes
from .terminal import need, note_cpu, say, say_written


def add_proof(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "proof",
        "prove and measure a device, and leave a report",
        "Runs check (its quick set with --quick and on a CPU device), sweep and bench in processes of their own, all\n"
        "of it --restarts times, each time with new devices and an empty pipeline cache. Reads temperature and\n"
        "clocks before, during and after each step, where the system shows them (amdgpu and others in sysfs,\n"
        "nvidia-smi). Leaves report.md and report.json in --out, written anew after every step: the device's facts,\n"
        "digests and whether all agree with the committed record, times and their spread, and the model's times\n"
        "beside the measured ones, which a CPU device has not. The raw rows and streams lie beside them, a folder\n"
        "per restart and step.\n\n"
        "The report is made to be attached to a public bug report. It has no name of the user or the host, no path\n"
        "of a home folder, no device UUID and no environment variables but a few that change what drivers do. Have\n"
        "a look at the raw files before you attach them.\n\n"
        "exit status:\n"
        "  0  every step ended well, and all restarts have the same digest\n"
        "  1  a step failed or was refused; the report says which and why\n"
        "  2  wrong arguments or no device; nothing ran",
        "  zinc-attn proof\n  zinc-attn proof --quick\n"
        "  zinc-attn proof --device 1 --shape 32/8/128 --contexts 8k,32k --restarts 5 --out r9700",
    )
    add_device_arguments(parser)
    add = parser.add_argument
    add_shared(parser, "--shape", proof.SHAPES, several=True)
    contexts = "of 1k,8k,32k,128k what the memory holds; on a CPU 1k,8k; with --quick 1k,4k"
    add_shared(parser, "--contexts", said=contexts, several=True)
    restarts = f"how often everything is repeated (default: {proof.RESTARTS}; with --quick 1)"
    add("--restarts", type=int, metavar="N", help=restarts)
    add("--timeout", type=float, default=proof.TIMEOUT_S, metavar="S", help="seconds of a step (default: %(default)g)")
    add_shared(parser, "--out", said="proof-DEVICE-TIME", text="a new or an empty folder")
    add("--quick", action="store_true", help="one restart, short contexts, 5 timed runs: minutes on a CPU device")
    parser.set_defaults(run=run_proof)


def run_proof(args: argparse.Namespace) -> int:
    """Prove, print a line per step, and write the report. 0: all is well; 1: a step is not."""
    need("rich", "matplotlib")
    shapes = parse_shapes(args.shape)
    contexts = parse_contexts(args.contexts) if args.contexts else None
    device = args.device if args.device is not None else os.environ.get("ZINC_ATTN_DEVICE") or None
    info = choose(list_devices(), device)
    spec = proof.ProofSpec(
        info,
        args.runtime or os.environ.get("ZINC_ATTN_RUNTIME") or "vulkan",
        shapes,
        contexts,
        restarts=args.restarts if args.restarts is not None else 1 if args.quick else proof.RESTARTS,
        quick=args.quick,
        timeout_s=args.timeout,
        free_bytes=memory_budget(info.index)[1],
    )
    made = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    folder = Path(args.out or f"proof-{slug(info.name)}-{made}")
    proof.check_folder(folder)
    note_cpu(info)
    print(f"{info.name} ({info.driver}), {spec.runtime}; {len(spec.steps())} steps", flush=True)
    if info.kind == "cpu":
        say("a step takes up to some minutes on a CPU; the report is written anew after each")
    report = proof.prove(spec, folder, on_begin=say_step, on_end=print_step)
    print("passed" if report["passed"] else "NOT passed: the report says which steps failed or were refused")
    say_written([folder / "report.md", folder / "report.json"])
    return 0 if report["passed"] else 1


def say_step(step: proof.Step, number: int, steps: int) -> None:
    """Say on stderr what begins."""
    say(f"{number + 1}/{steps}: restart {step.restart}, zinc-attn {' '.join(step.words)}")


def print_step(result: proof.StepResult) -> None:
    """A line per step that has ended."""
    status = result.status if result.status == "ok" else result.status.upper()
    line = f"{status:<9}{result.step.restart:>2}  {result.step.name:<24}{result.seconds:>8.1f} s  {result.note}"
    print(line.rstrip(), flush=True)
