"""The work buffer as NumPy sees it: record dtypes derived from the declarations, which say the buffer's order.

``WorkBuffer`` names all parts of the buffer, so that no index of a word appears outside ``declarations``.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import LOG2E
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
HEAD: Final = _record(declarations.HEAD, declarations.HEAD_WORDS)


def no_records(dtype: np.dtype[Any]) -> Records:
    """An empty array of records."""
    return np.zeros(0, dtype)


class HeadValues(NamedTuple):
    """The values of each head, float32, or None: sinks (q_heads,) in log2 units (see ``canonical.state.sink_scores``);
    masks (q_heads,), the factors of masks, times log2(e); scales (2 * kv_heads,) of fp8_e4m3, of K's heads and then
    V's; biases: slopes (q_heads,) times log2(e)."""

    sinks: NDArray[np.float32] | None = None
    masks: NDArray[np.float32] | None = None
    scales: NDArray[np.float32] | None = None
    biases: Mapping[str, NDArray[np.float32]] = MappingProxyType({})

    def write(self, heads: Records) -> None:
        """Fill the HEAD records (q_heads,) of a work buffer."""
        fields = {"sink": self.sinks, "mask": self.masks, **self.biases}
        if self.scales is not None:
            scales = self.scales.reshape(2, -1)
            fields["k_scale"], fields["v_scale"] = scales.repeat(len(heads) // scales.shape[1], axis=1)
        heads["sink"], heads["mask"] = declarations.HIDDEN, declarations.float_bits(LOG2E)
        for name, values in fields.items():
            if values is not None:
                heads[name] = values.view(np.uint32)


class WorkBuffer:
    """The words of a work buffer with room for given numbers of records; every attribute is a view of ``words``.

    header: one HEADER record; items: (items,) ITEM; rows: (rows,) ROW; appends: (appends,) APPEND; copies: the same
    words as (appends,) COPY; tables: (tables,) page-table words, from word ``tables_at`` on; heads: (heads,) HEAD;
    masks: (masks,) words of masks, from word ``masks_at`` on.
    """

    def __init__(
        self, items: int = 0, rows: int = 0, appends: int = 0, tables: int = 0, heads: int = 0, masks: int = 0
    ) -> None:
        sizes = (
            declarations.HEADER_WORDS,
            items * declarations.ITEM_WORDS,
            rows * declarations.ROW_WORDS,
            appends * declarations.APPEND_WORDS,
            tables,
            heads * declarations.HEAD_WORDS,
            masks,
        )
        ends = np.cumsum(sizes)
        self.words: Words = np.zeros(int(ends[-1]), np.uint32)
        header, item, row, append, self.tables, head, self.masks = np.split(self.words, ends[:-1])
        self.header = header.view(HEADER)[0]
        self.items, self.rows, self.heads = item.view(ITEM), row.view(ROW), head.view(HEAD)
        self.appends, self.copies = append.view(APPEND), append.view(COPY)
        self.tables_at, self.masks_at = int(ends[3]), int(ends[5])
        self.set(row_table=int(ends[1]), append_table=int(ends[2]), head_table=int(ends[4]))

    def set(self, **values: int) -> None:
        """Set header words by name."""
        for name, value in values.items():
            self.header[name] = value

    def set_shape(self, shape: AttnShape, kv_heads: int, kv_first: int = 0) -> None:
        """The header's words about the shape; the K and V buffers hold ``kv_heads`` heads from ``kv_first`` on."""
        self.set(
            q_heads=shape.q_heads, kv_heads=kv_heads, kv_first=kv_first, row_kv_heads=shape.kv_heads, group=shape.group
        )
