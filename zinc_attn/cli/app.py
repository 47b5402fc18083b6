"""The command line: ``zinc-attn COMMAND``, with the commands of COMMANDS.

Each command is a module of its own. Its ``add_<name>(subparsers)`` declares the arguments and sets ``run``, a function
of the parsed arguments that returns the exit status. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from .. import __version__
from ..errors import ZincAttnError
from .arguments import FAULT, STATUSES, CommandParser
from .bench import add_bench
from .check import add_check
from .decode import add_decode
from .devices import add_devices
from .export import add_export
from .generate import add_generate
from .perplexity import add_perplexity
from .plan import add_plan
from .proof import add_proof
from .rdna4 import add_rdna4
from .sweep import add_sweep
from .terminal import open_streams, say, stdout_trouble
from .validate import add_validate

COMMANDS: Final = (  # in the order of the help
    add_devices,
    add_plan,
    add_sweep,
    add_check,
    add_bench,
    add_proof,
    add_decode,
    add_rdna4,
    add_validate,
    add_generate,
    add_perplexity,
    add_export,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is one of STATUSES. argparse ends with 0 behind --help, with 2 for a usage."""
    open_streams()
    try:
        status = _run(argv)
    except SystemExit:
        if (trouble := stdout_trouble()) is not None:
            return trouble
        raise
    trouble = stdout_trouble()
    return status if trouble is None else trouble


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except ZincAttnError as error:
        say(f"zinc-attn: error: {error}")
        return 2
    except MemoryError as error:
        say(f"zinc-attn: error: this machine has no memory for it: {error or 'MemoryError'}")
        return 2
    except KeyboardInterrupt:
        say("zinc-attn: interrupted")
        return 130
    except Exception as error:  # a status of 1 would say that a bit is wrong
        if isinstance(error, OSError) and (trouble := stdout_trouble(write=True)) is not None:
            return trouble
        say(traceback.format_exc() + "zinc-attn: this is a fault of zinc-attn; please report it")
        return FAULT


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = CommandParser(
        prog="zinc-attn",
        description="Split-KV decode attention on Vulkan whose bits never change.",
        epilog=f"Each command has its own --help with an example. {STATUSES}",
    )
    parser.add_argument("--version", action="version", version=f"zinc-attn {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for add in COMMANDS:
        add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
