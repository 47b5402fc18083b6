"""A submission of a call: its work records, and the key under which its recording can be used again.

The records hold everything that changes from token to token.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.matrix import MatrixWorkgroup
from ..kernels.records import APPEND, ITEM, Records, no_records
from ..limits import MAX_HEADS_PER_WORKGROUP
from .arithmetic import Arithmetic


class RowSlice(NamedTuple):
    """Query rows [begin, end) of request number ``request`` of a call."""

    request: int
    begin: int
    end: int


class RecordingKey(NamedTuple):
    """The sizes and programs that a recorded submission has; it serves every submission of the same key.

    Sizes are powers of two, rounded up, LEAST_ITEMS or LEAST_PAGES at least; surplus workgroups return at once.
    """

    single_pass: bool  # every row has at most one state, or its whole context, and pass 1 writes the output
    items: int
    rows: int
    states: int
    appends: int  # 0: nothing is appended
    tables: int
    scoring: int = 0
    partial: bool = False  # pass 1 alone; the host reads the states
    unmerged: bool = False  # pass 1 of some keys of its row; a later submission has the others, and merges
    shared: int = 0  # items of keys that rows share; 0: none
    shared_rows: int = 1  # query rows that one workgroup of them serves
    walks: bool = True  # some item has several nodes
    masks: int = 0  # words of masks; 0: there is none
    most_heads: int = MAX_HEADS_PER_WORKGROUP  # query heads of a row that a workgroup serves at most
    matrix: MatrixWorkgroup | None = None  # of pass 1 with matrix units
    arithmetic: Arithmetic = "canonical"  # of pass 1 without matrix units
    whole_context: bool = False  # its workgroups keep their rows' totals where the states would be


@dataclass(frozen=True, eq=False)
class Submission:
    """One submission of a call. tables: the page tables, one after another, each with room for the pages of whole
    leaves; the records' ``page_table`` words count from their begin, and ``mask`` words from the begin of ``masks``.
    spans: the items of each slice; tables_at: the begin of its request's table; uploads: the requests whose new rows
    the submission uploads, in order."""

    key: RecordingKey
    slices: tuple[RowSlice, ...]
    items: Records
    rows: Records
    tables: NDArray[np.uint32]
    spans: tuple[slice, ...]
    tables_at: tuple[int, ...] = ()
    uploads: tuple[int, ...] = ()
    appends: Records = field(default_factory=lambda: no_records(APPEND))
    shared_items: Records = field(default_factory=lambda: no_records(ITEM))
    masks: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
