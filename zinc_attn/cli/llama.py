"""``zinc-attn llama``: a program of llama.cpp with the back end that a platform wheel carries."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Final

from ..errors import ArgumentError, RuntimeUnavailableError
from ..runtime.cpu.building import LIBRARIES
from .arguments import Subparsers, add_command
from .terminal import say

BACK_END: Final = "libggml-zinc.so"
DEFAULTS: Final = {"LLAMA_ARG_DEVICE": "ZINC0", "LLAMA_ARG_N_GPU_LAYERS": "99", "LLAMA_ARG_FLASH_ATTN": "on"}


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="a name on PATH, or a path")
    parser.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="arguments of the program")


def run(args: argparse.Namespace) -> int:
    """The program takes this process's place, and its status is the command's."""
    if args.program is None:
        raise ArgumentError("llama: got no PROGRAM, expected one of llama.cpp's, or another that loads it")
    back_end = LIBRARIES / BACK_END
    if not back_end.exists():
        raise RuntimeUnavailableError(
            f"this installation has no {BACK_END}; install the wheel that scripts/wheel builds, or run scripts/llama"
        )
    if (path := shutil.which(args.program)) is None:
        raise ArgumentError(f"PROGRAM: got {args.program}, expected one on PATH, or a path; is llama.cpp installed?")
    say(f"zinc-attn: GGML_BACKEND_PATH={back_end}")
    environment = {**DEFAULTS, **os.environ, "GGML_BACKEND_PATH": str(back_end)}
    try:
        os.execve(path, [args.program, *args.arguments], environment)
    except OSError as error:
        raise ArgumentError(f"PROGRAM: {path}: {error.strerror}; expected a program of this system") from error
