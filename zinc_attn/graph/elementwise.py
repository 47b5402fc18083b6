"""Operations element by element, with the bits of shaders/graph/binary.comp and its siblings."""

from __future__ import annotations

import numpy as np

from ..canonical.state import F32, flush


def binary(op: str, a: F32, b: F32) -> F32:
    """a op b, one rounding; b's sizes divide a's, and it repeats."""
    repeated = np.tile(b, [n // m for n, m in zip(a.shape, b.shape, strict=True)])
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    return flush(function(flush(a), flush(repeated)))
