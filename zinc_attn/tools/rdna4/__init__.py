"""The compiler gate: the shipped kernels under RADV's compiler for RDNA4, on a machine without the card."""

from .command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
