"""scripts/gfx1201 [OPTIONS]: zinc-attn check of RADV's machine code for gfx1201, executed by an interpreter.

OPTIONS are those of `zinc-attn check`. Without any, a few small cases that reach every kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from unittest.mock import patch

from zinc_attn.cli import app, check
from zinc_attn.errors import NoVulkanError
from zinc_attn.planning.arithmetic import EXACT
from zinc_attn.runtime.device import Device
from zinc_attn.tools.check import Case

from . import CASES
from .runtime import Gfx1201


def of_cases(arithmetic: str) -> list[str]:
    """The options of the small cases of an arithmetic."""
    return ["--arithmetic", arithmetic, "--cases", ",".join(x for x in CASES if Case.parse(x).arithmetic == arithmetic)]


def run(options: list[str], seed: int) -> int:
    """The exit status of ``check``. Prints what was executed, too."""
    begin, runtime = time.process_time(), Gfx1201(seed)
    with Device(runtime) as device, patch.object(check, "open_devices", lambda *_: [device]):
        status = app.main(["check", *options])
    print(
        f"{len(runtime.programs)} programs, {runtime.dispatches} dispatches, {runtime.issued / 1e6:.1f} M wave "
        f"instructions, {runtime.loads_outside} loads out of bounds, {time.process_time() - begin:.0f} s of CPU time"
    )
    return status


def main() -> int:
    """The largest exit status of its runs."""
    parser = argparse.ArgumentParser("scripts/gfx1201", description=__doc__)
    parser.add_argument("--full", action="store_true", help="--quick, by default in every exact arithmetic in turn")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which waves and workgroups run")
    args, options = parser.parse_known_args()
    if args.full:
        runs = [["--quick", *options]] if options else [["--quick", "--arithmetic", name] for name in EXACT]
    else:
        runs = [options] if options else [of_cases("canonical"), of_cases("fused")]
    return max(run(words, args.seed) for words in runs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoVulkanError as error:
        sys.exit(str(error))
