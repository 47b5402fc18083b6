"""scripts/gfx1201 [CASES…]: RADV's machine code for gfx1201, executed by an interpreter and checked against the oracle.

Without CASES, a few small ones that reach every kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

from zinc_attn.cli.check import outcome_lines, summary
from zinc_attn.cli.check_graph import check_models
from zinc_attn.errors import NoVulkanError
from zinc_attn.planning.arithmetic import EXACT
from zinc_attn.runtime.device import Device
from zinc_attn.tools.check import Case, check
from zinc_attn.tools.check.record import make_entry, maker
from zinc_attn.tools.graph.check import CASES as MODELS
from zinc_attn.tools.harness.split_spec import VARIED_LAYOUTS, parse_split_specs

from . import CASES
from .runtime import Gfx1201


def run(seed: int, checked: Callable[[Device], bool]) -> bool:
    """What ``checked`` says of the device. Prints what was executed."""
    begin, runtime = time.process_time(), Gfx1201(seed)
    with Device(runtime) as device:
        passed = checked(device)
    print(
        f"{len(runtime.programs)} programs, {runtime.dispatches} dispatches, {runtime.issued / 1e6:.1f} M wave "
        f"instructions, {runtime.loads_outside} loads out of bounds, {time.process_time() - begin:.0f} s of CPU time"
    )
    return passed


def attention(cases: list[Case], device: Device) -> bool:
    """Whether all bits are the oracle's. Prints what ``check`` prints."""
    outcomes = []
    for outcome in check([device], cases, parse_split_specs(VARIED_LAYOUTS)):
        outcomes.append(outcome)
        print("\n".join(outcome_lines(outcome, False, max(len(str(case)) for case in cases) + 2)), flush=True)
    entry = make_entry({str(outcome.case): outcome.digest for outcome in outcomes if outcome.result}, maker(device))
    print("\n".join(summary(outcomes, [entry], {})))
    return all(outcome.status == "pass" for outcome in outcomes)


def graph(cases: list[str], device: Device) -> bool:
    """The same of what ``check --graph`` prints."""
    return not check_models([device], {}, cases=cases)[1]


def main() -> int:
    parser = argparse.ArgumentParser("scripts/gfx1201", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASES", help="'9/3/64 f16 600 sinks', as `check --cases` has them")
    parser.add_argument("--full", action="store_true", help="the cases of `check --quick`")
    parser.add_argument("--graph", action="store_true", help="the random models of `check --graph`, or CASES of them")
    parser.add_argument("--arithmetic", choices=EXACT, help="with --full by default all")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which waves and workgroups run")
    args = parser.parse_args()
    if args.graph:
        return int(not run(args.seed, partial(graph, args.cases or MODELS)))
    if not args.full:
        cases = [Case.parse(text, args.arithmetic or "canonical") for text in args.cases or CASES]
        return int(not run(args.seed, partial(attention, cases)))
    chosen = [args.arithmetic] if args.arithmetic else EXACT
    return int(not all([run(args.seed, partial(attention, Case.quick(arithmetic))) for arithmetic in chosen]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoVulkanError as error:
        sys.exit(str(error))
