"""Calls that are verified against the oracle and then timed: over contexts (sweep), beside baselines (bench), by steps.

A point is one context under one layout: a call on one layer that appends q_len rows to each sequence of a resident
KVCache and attends them, or, without a page size, attends K and V of one sequence in two arrays. Its output is compared
bit for bit with the oracle on the values as they are stored. What the output was before is spoiled, so that an element
which a call does not write is seen. Only then is the point timed. The layouts of a context take turns, so that their
ratios come from the same seconds, and the bits of every timed call are compared too. What has a wrong bit has no time.
"""

from .bench import HOST_ROUNDS, SPLITS, bench, layouts
from .plots import bench_png, sweep_png
from .points import WARM_UP_RUNS, sweep
from .rows import DEVICE_CLOCK, HOST_CLOCK, MEASURES, Row
from .spec import PAGE_SIZE, CallSpec
from .steps import DecodeRun, DecodeSpec, decode_run, steps_png

__all__ = ["DEVICE_CLOCK", "HOST_CLOCK", "HOST_ROUNDS", "MEASURES", "PAGE_SIZE", "SPLITS", "WARM_UP_RUNS", "CallSpec"]
__all__ += ["DecodeRun", "DecodeSpec", "Row", "bench", "bench_png", "decode_run", "layouts", "steps_png", "sweep"]
__all__ += ["sweep_png"]
