"""Decode attention over context lengths and layouts: every point is verified against the oracle, then timed.

A point is one context under one layout: a call on one layer of a resident KVCache that appends q_len rows to each
sequence of a batch and attends them. Its output is compared bit for bit with the oracle on the values as the cache
stores them. The call before it has other query rows, so that an element which a call does not write is seen. Only then
is the point timed. The layouts of a context take turns, so that their ratios come from the same seconds, and the bits
of every timed call are compared too. A point with a wrong bit has no time.

Without a page size there is no cache: K and V of one sequence are two arrays, and nothing is appended.
``distributed_sweep`` is the same with the nodes of one sequence on MPI ranks.
"""

from ..harness.bits import F32, first_difference
from ..harness.files import csv_text, json_line, write_file
from ..harness.inputs import Inputs, parse_contexts
from ..harness.oracle import ORACLE_PRODUCTS
from ..harness.progress import Progress
from ..harness.split_spec import SplitSpec, parse_split_specs
from .calls import AttentionCall
from .distributed import distributed_sweep
from .local import sweep
from .plots import plot_png
from .points import WARM_UP_RUNS, Expected, Sample, expected_output, samples
from .rows import SweepRow
from .spec import PAGE_SIZE, SweepSpec

# The names that tools/generate.py still has.
Layout = SplitSpec
parse_layouts = parse_split_specs


def difference(name: str, got: F32, want: F32) -> str | None:
    """The text of ``first_difference``; tools/generate.py still calls it by this name."""
    found = first_difference(name, got, want)
    return found.text() if found else None


__all__ = [
    "ORACLE_PRODUCTS",
    "PAGE_SIZE",
    "WARM_UP_RUNS",
    "AttentionCall",
    "Expected",
    "Inputs",
    "Layout",
    "Progress",
    "Sample",
    "SplitSpec",
    "SweepRow",
    "SweepSpec",
    "csv_text",
    "difference",
    "distributed_sweep",
    "expected_output",
    "first_difference",
    "json_line",
    "parse_contexts",
    "parse_layouts",
    "parse_split_specs",
    "plot_png",
    "samples",
    "sweep",
    "write_file",
]
