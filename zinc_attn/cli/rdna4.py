"""``zinc-attn rdna4``: the compiler gate, whose options and lines are those of ``python -m zinc_attn.tools.rdna4``."""

from __future__ import annotations

from ..tools import rdna4
from .arguments import Subparsers, add_command


def add_rdna4(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "rdna4",
        "what RADV's compiler makes of every kernel for gfx1201, without the card",
        "Wave size, registers, LDS, spills, occupancy and instructions of each variant, and an estimate of issue\n"
        "cycles per key. Needs Mesa 25.0's RADV.\n\n"
        "exit status: 0 every gate holds, 3 one does not, 2 it cannot be known here",
        "  zinc-attn rdna4\n  zinc-attn rdna4 --family gfx1200 --json",
    )
    rdna4.add_arguments(parser)
    parser.set_defaults(run=rdna4.run)
