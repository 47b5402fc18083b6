"""Buffers are kp tensors of uint32, with a staging twin in host memory or without one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..protocol import Use, Words
from .lifetime import Lifetime

CHAINED_BYTES: Final = 512 * 1024  # SCRATCH up to here has a staging twin: its copy costs less than a submission
MAX_TENSOR_BYTES: Final = (1 << 32) - 4  # kp counts bytes in 32 bits and wraps silently


def is_staged(nbytes: int, use: Use, chained: bool) -> bool:
    """Whether a buffer has a staging twin: all but CACHE, and SCRATCH that is large and not ``chained``."""
    return use is not Use.CACHE and (use is not Use.SCRATCH or chained or nbytes <= CHAINED_BYTES)


class KomputeBuffer:
    """A kp tensor of uint32.

    view: its host memory, where it has a staging twin; chained: it is SCRATCH with one, whose copy to the host orders
    two steps of a sequence.
    """

    def __init__(self, kp: Any, manager: Any, lifetime: Lifetime, nbytes: int, use: Use, staged: bool) -> None:
        self.nbytes, self.use = nbytes, use
        self._lifetime = lifetime
        self.chained = staged and use is Use.SCRATCH
        kind = kp.TensorTypes.device if staged else kp.TensorTypes.storage
        self.tensor = manager.tensor_t(np.zeros(nbytes // 4, np.uint32) if staged else _unread(nbytes), kind)
        self.view: Words | None = self.tensor.data() if staged else None
        self.closed = False

    def close(self) -> None:
        """Free the tensor. Recordings that use it must not be run afterwards."""
        if not self.closed:
            self.closed = True
            self.view = None
            if not self._lifetime.kept:
                self.tensor.destroy()


class HostTensor(KomputeBuffer):
    """A kp tensor that belongs to the host program: bound, never synced, never freed."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.view, self.closed, self.chained = tensor, None, False, False
        self.nbytes, self.use = 4 * int(tensor.size()), Use.DATA

    def close(self) -> None:
        """Nothing to free."""


def _unread(nbytes: int) -> Words:
    """An array of the right size for kp's constructor, which does not read it; costs address space only."""
    return np.empty(nbytes // 4, np.uint32)
