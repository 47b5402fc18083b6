"""What the host writes for the kernels: K and V in tiles, and the work buffer of a call, as uint32 words."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .kernels import APPEND_WORDS, HEADER, HEADER_WORDS, ITEM_WORDS, ROW_WORDS
from .shapes import CHUNK, LEAF, AttnShape

Words = NDArray[np.uint32]


def tiles(tokens: int) -> int:
    """Tiles of 64 tokens that hold ``tokens``."""
    return -(-tokens // LEAF)


def _padded(x: NDArray[Any]) -> NDArray[Any]:
    """(tokens, kv_heads, head_dim) with tokens filled up by zeros to whole tiles."""
    missing = tiles(len(x)) * LEAF - len(x)
    return np.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else x


def pack_k(k: NDArray[Any]) -> Words:
    """(tokens, kv_heads, head_dim) to (kv_heads, tiles, head_dim / 8, 64, 8), as uint32 words."""
    k = _padded(k)
    split = k.reshape(-1, LEAF, k.shape[1], k.shape[2] // CHUNK, CHUNK)
    return np.ascontiguousarray(split.transpose(2, 0, 3, 1, 4)).reshape(-1).view(np.uint32)


def pack_v(v: NDArray[Any]) -> Words:
    """(tokens, kv_heads, head_dim) to (kv_heads, tiles, 64, head_dim), as uint32 words."""
    return np.ascontiguousarray(_padded(v).transpose(1, 0, 2)).reshape(-1).view(np.uint32)


# --- the work buffer ---------------------------------------------------------------------------------------

NO_TOKEN: Final = kernels.NO_TOKEN
NEVER: Final = 0xFFFFFFFF  # fresh_begin of an item whose keys all lie in the cache


class Work:
    """The work buffer of a call, with room for given numbers of items, rows, append records and page-table words.

    items: (items, ITEM_WORDS), rows: (rows, ROW_WORDS), appends: (appends, APPEND_WORDS), tables: (tables,), all
    uint32 views of ``words``; ``tables_at`` is the word where the tables begin.
    """

    def __init__(self, items: int, rows: int, appends: int, tables: int) -> None:
        ends = np.cumsum([HEADER_WORDS, items * ITEM_WORDS, rows * ROW_WORDS, appends * APPEND_WORDS, tables])
        self.words: Words = np.zeros(int(ends[-1]), np.uint32)
        parts = np.split(self.words, ends[:-1])
        self.items = parts[1].reshape(items, ITEM_WORDS)
        self.rows = parts[2].reshape(rows, ROW_WORDS)
        self.appends = parts[3].reshape(appends, APPEND_WORDS)
        self.tables = parts[4]
        self.tables_at = int(ends[3])
        self.set(row_table=int(ends[1]), append_table=int(ends[2]))

    def set(self, **values: int) -> None:
        """Set header words by name."""
        for name, value in values.items():
            self.words[HEADER.index(name)] = value

    def set_shape(self, shape: AttnShape, kv_heads: int, kv_first: int = 0) -> None:
        """The header's shape words; kv_heads and kv_first are those of the K and V buffers."""
        self.set(
            q_heads=shape.q_heads,
            kv_heads=kv_heads,
            kv_first=kv_first,
            row_kv_heads=shape.kv_heads,
            group=shape.group,
        )


def item_table(
    limits: NDArray[np.int64], ranges: NDArray[np.int64], unit: int, states: int, *, keep_empty: bool = False
) -> NDArray[np.int64]:
    """Items (n, 5) of rows with ``limits`` (rows,) keys each over leaf ranges (splits, 2).

    Columns: row, limit, leaf_begin, leaf_end, state; states are counted from row * ``states``, one per ``unit``
    leaves. A range that begins behind a row's last leaf gives no item; with ``keep_empty`` a row that sees no key
    still has its first range, whose state is the empty one.
    """
    last = -(-limits // LEAF)
    if keep_empty:
        last = np.maximum(last, 1)
    row, split = np.nonzero((ranges[None, :, 0] < last[:, None]) & (ranges[:, 0] < ranges[:, 1])[None])
    begin = ranges[split, 0]
    end = np.minimum(ranges[split, 1], last[row])
    return np.stack([row, limits[row], begin, end, row * states + begin // unit], axis=1)
