"""Quantized types of weights: their blocks in ggml's bytes, and the pieces that layout R32 cuts them into.

R32 holds a matrix in groups of 32 rows; its last group has what is left, w rows. A group has a plane for each piece of
the type: piece 0 of block 0 of the w rows, then of block 1, ..., then piece 1. So a lane that owns a row reads its
pieces beside its neighbors', and a group begins where the first of its rows began in ggml's bytes:

    byte = first row * row bytes + blocks * w * (sizes of the pieces before) + (block * w + row of the group) * size

Pieces of 16 bytes come first, then those of 4, 2 and 1. The matrices of a tensor of more dimensions stay apart.
"""

from dataclasses import dataclass
from typing import Final

GROUP: Final = 32  # rows


@dataclass(frozen=True)
class Run:
    """Pieces of one size that lie one after another in ggml's block."""

    offset: int
    size: int
    count: int


@dataclass(frozen=True)
class WeightType:
    """A quantized type: values and bytes of a block, and its pieces in their order.

    halves: scales are of 16 values, else of 32 or of the whole block. minimum: a block has minima, too. ahead:
    superblocks that a wave of mul_mat_vec loads before it uses them.
    """

    values: int
    size: int
    runs: tuple[Run, ...]
    halves: bool = False
    minimum: bool = False
    ahead: int = 1

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(offset in ggml's block, size) of each piece."""
        return tuple((run.offset + i * run.size, run.size) for run in self.runs for i in range(run.count))

    def count(self, size: int) -> int:
        """Pieces of so many bytes."""
        return sum(piece == size for _, piece in self.pieces)


TYPES: Final = {
    "q4_0": WeightType(32, 18, (Run(2, 16, 1), Run(0, 2, 1))),
    "q4_1": WeightType(32, 20, (Run(4, 16, 1), Run(0, 4, 1)), minimum=True),
    "q5_0": WeightType(32, 22, (Run(6, 16, 1), Run(2, 4, 1), Run(0, 2, 1))),
    "q5_1": WeightType(32, 24, (Run(8, 16, 1), Run(4, 4, 1), Run(0, 4, 1)), minimum=True),
    "q8_0": WeightType(32, 34, (Run(2, 16, 2), Run(0, 2, 1))),
    "iq4_nl": WeightType(32, 18, (Run(2, 16, 1), Run(0, 2, 1))),
    "mxfp4": WeightType(32, 17, (Run(1, 16, 1), Run(0, 1, 1)), ahead=2),
    "q2_K": WeightType(256, 84, (Run(0, 16, 5), Run(80, 4, 1)), halves=True, minimum=True, ahead=2),
    "q3_K": WeightType(256, 110, (Run(0, 16, 6), Run(96, 4, 3), Run(108, 2, 1)), halves=True, ahead=2),
    "q4_K": WeightType(256, 144, (Run(0, 16, 9),), minimum=True),
    "q5_K": WeightType(256, 176, (Run(0, 16, 11),), minimum=True),
    "q6_K": WeightType(256, 210, (Run(0, 16, 13), Run(208, 2, 1)), halves=True),
    "iq4_xs": WeightType(256, 136, (Run(8, 16, 8), Run(0, 4, 2))),
}
