"""Calls that are verified against the oracle and then timed, over contexts and in turns; and the steps of a decode.

A call appends q_len rows to each sequence of a resident KVCache and attends them; without a page size it attends the
last rows of one sequence, and its submission alone is timed. The output is spoiled before a call, so that an element
which the call does not write is seen. Every timed call is compared, too, and a call with a wrong bit has no time.
"""

from .modeled import with_card
from .others import OTHERS, check_others
from .picture import rows_png
from .points import WARM_UP_RUNS, measure_calls
from .rows import MODELED, Row
from .spec import PAGE_SIZE, CallSpec
from .steps import decode_steps, stalls

__all__ = [
    "MODELED", "OTHERS", "PAGE_SIZE", "WARM_UP_RUNS", "CallSpec", "Row", "check_others", "decode_steps",
    "measure_calls", "rows_png", "stalls", "with_card",
]  # fmt: skip
