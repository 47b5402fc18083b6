"""The work buffer as NumPy sees it: record dtypes derived from the declarations, and the buffer's layout.

A call's work buffer is a header, then one ITEM record per workgroup row of pass 1, one ROW record per query row, one
APPEND (or COPY) record per new token (or page pair), the page tables, the attention sinks, ALiBi slopes, scales of
heads, slopes of masks and masks.
``WorkBuffer`` names all of them, so that no index of a word appears outside ``declarations``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..shapes import AttnShape
from . import declarations

Words = NDArray[np.uint32]
Records = NDArray[Any]  # a structured array of one of the dtypes below


def _record(names: Collection[str], words: int) -> np.dtype[Any]:
    """``words`` uint32 words: the named ones, then reserved ones."""
    reserved = tuple(f"reserved_{i}" for i in range(words - len(names)))
    return np.dtype([(name, np.uint32) for name in (*names, *reserved)])


HEADER: Final = _record(declarations.HEADER, declarations.HEADER_WORDS)
ITEM: Final = _record(declarations.ITEM, declarations.ITEM_WORDS)
ROW: Final = _record(declarations.ROW, declarations.ROW_WORDS)
APPEND: Final = _record(declarations.APPEND, declarations.APPEND_WORDS)
COPY: Final = _record(declarations.COPY, declarations.COPY_WORDS)


def no_records(dtype: np.dtype[Any]) -> Records:
    """An empty array of records."""
    return np.zeros(0, dtype)


class HeadTables(NamedTuple):
    """float32 per head, None where there are none: sinks (q_heads,), scores in log2 units (see
    ``canonical.reference.sink_scores``); alibi (q_heads,), slopes times log2(e); scales (2 * kv_heads,) of fp8_e4m3, of
    K's heads and then V's; mask_slopes (q_heads,), what masks are multiplied with, times log2(e)."""

    sinks: NDArray[np.float32] | None = None
    alibi: NDArray[np.float32] | None = None
    scales: NDArray[np.float32] | None = None
    mask_slopes: NDArray[np.float32] | None = None


class WorkBuffer:
    """The words of a work buffer with room for given numbers of records; every attribute is a view of ``words``.

    header: one HEADER record; items: (items,) ITEM; rows: (rows,) ROW; appends: (appends,) APPEND; copies: the same
    words as (appends,) COPY; tables: (tables,) page-table words, from word ``tables_at`` on; sinks, alibi, scales,
    mask_slopes: words of HeadTables or none; masks: (masks,) words of masks, from word ``masks_at`` on.
    """

    def __init__(
        self,
        items: int = 0,
        rows: int = 0,
        appends: int = 0,
        tables: int = 0,
        heads: HeadTables = HeadTables(),  # noqa: B008  (it cannot be changed)
        masks: int = 0,
    ) -> None:
        sizes = (
            declarations.HEADER_WORDS,
            items * declarations.ITEM_WORDS,
            rows * declarations.ROW_WORDS,
            appends * declarations.APPEND_WORDS,
            tables,
            *(0 if one is None else len(one) for one in heads),
            masks,
        )
        ends = np.cumsum(sizes)
        self.words: Words = np.zeros(int(ends[-1]), np.uint32)
        parts = np.split(self.words, ends[:-1])
        header, item, row, append, self.tables = parts[:5]
        self.sinks, self.alibi, self.scales, self.mask_slopes, self.masks = parts[5:]
        self.header = header.view(HEADER)[0]
        self.items, self.rows = item.view(ITEM), row.view(ROW)
        self.appends, self.copies = append.view(APPEND), append.view(COPY)
        self.tables_at, self.masks_at = int(ends[3]), int(ends[8])
        self.set(row_table=int(ends[1]), append_table=int(ends[2]))
        names = ("sink_table", "alibi_table", "scale_table", "mask_slope_table")
        for name, words, begin, one in zip(names, parts[5:9], ends[4:8], heads, strict=True):
            if one is not None:
                self.set(**{name: int(begin)})
                words[:] = one.view(np.uint32)

    def set(self, **values: int) -> None:
        """Set header words by name."""
        for name, value in values.items():
            self.header[name] = value

    def set_shape(self, shape: AttnShape, kv_heads: int, kv_first: int = 0) -> None:
        """The header's words about the shape; the K and V buffers hold ``kv_heads`` heads from ``kv_first`` on."""
        self.set(
            q_heads=shape.q_heads, kv_heads=kv_heads, kv_first=kv_first, row_kv_heads=shape.kv_heads, group=shape.group
        )
