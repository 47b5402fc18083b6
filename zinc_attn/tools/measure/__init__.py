"""Calls that are verified against the oracle and then timed, over contexts and in turns; and the steps of a decode.

A call appends q_len rows to each sequence of a resident KVCache and attends them, or, without a page size, attends K
and V of one sequence in two arrays. Its output is compared bit for bit with the oracle on the values as they are
stored. What the output was before is spoiled, so that an element which a call does not write is seen. Only then are
the calls of a context timed. They take turns, so that their ratios come from the same seconds, and the bits of every
timed call are compared too. What has a wrong bit has no time.
"""

from .picture import rows_png
from .points import WARM_UP_RUNS, measure_calls
from .rows import Row
from .spec import PAGE_SIZE, CallSpec
from .steps import decode_steps, stalls

__all__ = ["PAGE_SIZE", "WARM_UP_RUNS", "CallSpec", "Row", "decode_steps", "measure_calls", "rows_png", "stalls"]
