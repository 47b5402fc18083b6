"""The caller's arrays that a call writes its results to: ``out=`` and ``lse=``."""

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ..canonical.state import F32
from ..checks import check_output
from ..errors import ArgumentError


class Target(NamedTuple):
    """The arrays for one sequence's results: out like its q, lse like q without head_dim; None for a new array."""

    out: F32 | None = None
    lse: F32 | None = None

    def write(self, out: F32, lse: F32) -> None:
        """Write results (q_len, q_heads, head_dim) and (q_len, q_heads)."""
        for target, values in ((self.out, out), (self.lse, lse)):
            if target is not None:
                target[...] = values.reshape(target.shape)


NEW_ARRAYS: Final = Target()


def check_targets(shapes: Seq[tuple[int, ...]], out: Seq[Any] | None, lse: Seq[Any] | None) -> list[Target]:
    """The targets of sequences with results out of ``shapes``; out, lse: an array for each, or None for new arrays.

    ArgumentError: an array cannot be written to as it is, or two of them overlap.
    """
    targets = []
    for i, shape in enumerate(shapes):
        rows = None if out is None else check_output("out", out[i], shape)
        sums = None if lse is None else check_output("lse", lse[i], shape[:-1])
        targets.append(Target(rows, sums))
    spans = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for target in targets for x in target if x is not None)
    if any(second[0] < first[1] for first, second in pairwise(spans)):
        raise ArgumentError("out, lse: got arrays that overlap in memory, expected one for each result")
    return targets
