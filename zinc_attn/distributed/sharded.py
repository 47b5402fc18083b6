"""The former home of this folder's public names, which are imported from here, too."""

from __future__ import annotations

from .attention import ShardedAttention
from .cache import ShardedKVCache
from .fold import Fold
from .ranks import TIMEOUT_S, RankError, Ranks, start_mpi
from .sequence import ShardedSequence

__all__ = [
    "TIMEOUT_S",
    "Fold",
    "RankError",
    "Ranks",
    "ShardedAttention",
    "ShardedKVCache",
    "ShardedSequence",
    "start_mpi",
]
