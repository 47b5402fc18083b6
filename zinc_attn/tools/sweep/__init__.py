"""Decode attention over context lengths and layouts: every point is verified against the oracle, then timed.

A point is one context under one layout: a call on one layer of a resident KVCache that appends q_len rows to each
sequence of a batch and attends them. Its output is compared bit for bit with the oracle on the values as the cache
stores them. The call before it has other query rows, so that an element which a call does not write is seen. Only then
is the point timed. The layouts of a context take turns, so that their ratios come from the same seconds, and the bits
of every timed call are compared too. A point with a wrong bit has no time.

Without a page size there is no cache: K and V of one sequence are two arrays, and nothing is appended.
``distributed_sweep`` is the same with the nodes of one sequence on MPI ranks.
"""

from .distributed import distributed_sweep
from .local import sweep
from .plots import plot_png
from .rows import PAGE_SIZE, SweepRow, SweepSpec

__all__ = ["PAGE_SIZE", "SweepRow", "SweepSpec", "distributed_sweep", "plot_png", "sweep"]
