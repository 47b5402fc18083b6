"""The command line: ``zinc-attn COMMAND``, with the commands of COMMANDS.

Each command is a module of its own. Its ``declare(subparsers)`` declares the arguments, its ``run`` takes the parsed
ones and returns the exit status. Results go to stdout, everything else to stderr.
"""

import argparse
import traceback
from collections.abc import Sequence
from typing import Final

from .. import __version__
from ..errors import ZincAttnError
from . import bench, check, compilers, decode, devices, export, llama, plan, proof, sweep
from .arguments import FAULT, CommandParser
from .terminal import open_streams, say, stdout_trouble

# in the order of the help
COMMANDS: Final = (devices, plan, sweep, check, bench, proof, decode, llama, compilers, export)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the status is one of STATUSES. argparse ends with 0 after --help."""
    open_streams()
    try:
        status = _run(argv)
    except SystemExit:
        if (trouble := stdout_trouble()) is not None:
            return trouble
        raise
    return status if (trouble := stdout_trouble()) is None else trouble


def _run(argv: Sequence[str] | None) -> int:
    try:
        args, unknown = build_parser().parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except ZincAttnError as error:
        say(f"zinc-attn: error: {error}")
        return 2
    except MemoryError as error:
        say(f"zinc-attn: error: this machine has no memory for it: {str(error) or 'MemoryError'}")
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
    parser = CommandParser(
        prog="zinc-attn",
        description="Split-KV decode attention on Vulkan whose bits never change.",
        epilog="Each command has its own --help with an example.",
    )
    parser.add_argument("--version", action="version", version=f"zinc-attn {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in COMMANDS:
        command.declare(subparsers)
    return parser
