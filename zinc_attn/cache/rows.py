"""What the host writes for the kernels, in uint32 words: rows of K and V, tiles of K and V, the work buffer.

A row is one token's K and V of every KV head, (kv_heads, words): per KV head K values, V values, K scales, V scales,
in uint32 words (see shaders/cache.glsl).

q8_0: 32 consecutive head dimensions share a scale d = float16(max|x| / 127), rounded to nearest even, and are stored
as int8 q = rint(x / float32(d)), held within -127 ... 127; a block whose d is 0 stores zeros. The value is q * d,
exact in float32. (ggml's block format; its rounding of ties differs.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.reference import as_input
from ..errors import DTypeError, ValueRangeError
from ..kernels import contract as kernels
from ..kernels.contract import APPEND_WORDS, HEADER, HEADER_WORDS, ITEM_WORDS, ROW_WORDS
from ..planning.splits import SplitPlan
from ..shapes import CHUNK, LEAF, MAX_INPUT, MIN_INPUT, Q8_BLOCK, AttnShape, scale_words, value_words

F32 = NDArray[np.float32]
Words = NDArray[np.uint32]

_F16_INFINITY: Final = np.uint16(0x7C00)
_F32_MOST: Final = np.float32(MAX_INPUT).view(np.uint32)
_F32_LEAST: Final = np.float32(MIN_INPUT).view(np.uint32)
_Q8_MAX: Final = 127.0 * 65504.0  # beyond it the scale is no float16
_TAKES: Final = {
    "f32": "float32 or float16",
    "f16": "float16",
    "bf16": "bfloat16 (ml_dtypes), or float32 or float16 values that bfloat16 holds exactly",
    "q8_0": "float32 or float16",
}


def checked_values(name: str, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """``x`` with tiny float32 values flushed, and its largest magnitude. ValueRangeError names the first bad index.

    Magnitudes are compared as bits, whose order is that of the numbers, NaN and infinities behind all of them.
    """
    if x.size == 0:
        return x, 0.0
    if x.dtype == np.float16:
        top = (x.view(np.uint16) & np.uint16(0x7FFF)).max()
        largest, bad = float(top.view(np.float16)), top >= _F16_INFINITY
    else:
        bits = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
        top = bits.max()
        largest, bad = float(top.view(np.float32)), top > _F32_MOST
    if bad:
        at = tuple(np.argwhere(~(np.abs(x.astype(np.float32)) <= MAX_INPUT))[0])
        where = ", ".join(map(str, at))
        raise ValueRangeError(f"{name}[{where}]: got {float(x[at]):g}, expected a finite value of at most 2**60")
    if x.dtype != np.float16:
        bits -= np.uint32(1)  # zeros become the largest number
        if bits.min() < _F32_LEAST - np.uint32(1) or x.dtype != np.float32:
            x = as_input(x)
    return x, largest


def stored_values(name: str, x: Any, dtype: str) -> tuple[NDArray[Any], float]:
    """``x`` as the values a cache of ``dtype`` takes, checked, and its largest magnitude.

    Nothing is cast down: a float16 cache takes float16, a bfloat16 cache values that bfloat16 holds. q8_0 quantises,
    by the rule above. float16 arrays stay float16, all others come back as float32.
    """
    array = np.asarray(x)
    if array.dtype != np.float16 and (array.dtype != np.float32 or dtype == "f16"):
        if array.dtype.name != "bfloat16" or dtype != "bf16":
            raise DTypeError(f"{name}: got dtype {array.dtype}, a {dtype} cache takes {_TAKES[dtype]}")
        array = array.astype(np.float32)
    values, largest = checked_values(name, array)
    if dtype == "bf16":
        values = values.astype(np.float32)
        if np.any(values.view(np.uint32) & np.uint32(0xFFFF)):
            at = ", ".join(map(str, np.argwhere(values.view(np.uint32) & np.uint32(0xFFFF))[0]))
            raise ValueRangeError(f"{name}[{at}]: not a bfloat16 value; a bf16 cache takes {_TAKES[dtype]}")
    if dtype == "q8_0" and largest > _Q8_MAX:
        raise ValueRangeError(f"{name}: got a magnitude of {largest:g}, a q8_0 cache takes at most {_Q8_MAX:g}")
    return values, largest


def quantise_q8_0(x: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """int8 values (..., head_dim) and float16 scales (..., head_dim / 32) of x (..., head_dim)."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, Q8_BLOCK)
    scale = (np.abs(blocks).max(axis=-1) / np.float32(127.0)).astype(np.float16)
    step = scale.astype(np.float32)[..., None]
    ratio = np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)
    return np.clip(np.rint(ratio), -127, 127).astype(np.int8).reshape(x.shape), scale


def encode_into(out: Words, k: NDArray[Any], v: NDArray[Any], dtype: str) -> None:
    """Write the rows of stored values k, v (n, kv_heads, head_dim) to ``out`` (n, kv_heads, words)."""
    size = value_words(k.shape[2], dtype)
    for x, values, scales in ((k, 0, 2 * size), (v, size, 2 * size + scale_words(k.shape[2], dtype))):
        if dtype == "q8_0":
            quants, steps = quantise_q8_0(x)
            out[..., values : values + size] = quants.view(np.uint32)
            halves = out.view(np.float16)
            halves[..., 2 * scales : 2 * scales + steps.shape[-1]] = steps
        elif dtype == "bf16":
            out.view(np.uint16)[..., 2 * values : 2 * (values + size)] = (
                np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16
            )
        elif dtype == "f16":
            out.view(np.float16)[..., 2 * values : 2 * (values + size)] = x
        else:
            out.view(np.float32)[..., values : values + size] = x


def encode(k: NDArray[Any], v: NDArray[Any], dtype: str) -> Words:
    """(n, kv_heads, words) of stored values k, v (n, kv_heads, head_dim); see ``stored_values``."""
    n, kv_heads, head_dim = k.shape
    out = np.zeros((n, kv_heads, 2 * (value_words(head_dim, dtype) + scale_words(head_dim, dtype))), np.uint32)
    encode_into(out, k, v, dtype)
    return out


def decode(words: Words, head_dim: int, dtype: str) -> tuple[F32, F32]:
    """The float32 values k, v (n, kv_heads, head_dim) that rows hold; the inverse of ``encode``."""
    size, scales = value_words(head_dim, dtype), scale_words(head_dim, dtype)
    parts = np.split(words, [size, 2 * size, 2 * size + scales], axis=2)
    return _join(parts[0], parts[2], head_dim, dtype), _join(parts[1], parts[3], head_dim, dtype)


def _join(values: Words, scales: Words, head_dim: int, dtype: str) -> F32:
    values = np.ascontiguousarray(values)
    if dtype == "f32":
        return values.view(np.float32)
    if dtype == "f16":
        return values.view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    factor = np.ascontiguousarray(scales).view(np.float16)[..., : head_dim // Q8_BLOCK].astype(np.float32)
    return values.view(np.int8).astype(np.float32) * np.repeat(factor, Q8_BLOCK, axis=-1)


def stored(k: NDArray[Any], v: NDArray[Any], dtype: str) -> tuple[F32, F32]:
    """The values a cache of ``dtype`` holds after k and v were appended: what an oracle must be given."""
    head_dim = k.shape[2]
    return decode(encode(stored_values("k", k, dtype)[0], stored_values("v", v, dtype)[0], dtype), head_dim, dtype)


# --- contiguous K and V ------------------------------------------------------------------------------------


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

    sinks: a score in log2 units per query head, see ``reference.sink_scores``.

    items: (items, ITEM_WORDS), rows: (rows, ROW_WORDS), appends: (appends, APPEND_WORDS), tables: (tables,), all
    uint32 views of ``words``; ``tables_at`` is the word where the tables begin.
    """

    def __init__(self, items: int, rows: int, appends: int, tables: int, sinks: F32 | None = None) -> None:
        behind = 0 if sinks is None else len(sinks)
        ends = np.cumsum([HEADER_WORDS, items * ITEM_WORDS, rows * ROW_WORDS, appends * APPEND_WORDS, tables, behind])
        self.words: Words = np.zeros(int(ends[-1]), np.uint32)
        parts = np.split(self.words, ends[:-1])
        self.items = parts[1].reshape(items, ITEM_WORDS)
        self.rows = parts[2].reshape(rows, ROW_WORDS)
        self.appends = parts[3].reshape(appends, APPEND_WORDS)
        self.tables = parts[4]
        self.tables_at = int(ends[3])
        self.set(row_table=int(ends[1]), append_table=int(ends[2]))
        self.sinks = self.words[ends[4] :]
        if sinks is not None:
            self.set(sink_table=int(ends[4]))
            self.sinks[:] = sinks.view(np.uint32)

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
    firsts: NDArray[np.int64],
    limits: NDArray[np.int64],
    ranges: NDArray[np.int64],
    *,
    keep_empty: bool = False,
    shared: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Items (n, 6) of rows that see keys [first, limit) each, over a plan's leaf ranges (splits, 2).

    Columns: row, limit, leaf_begin, leaf_end, rows (1), first. A range without a leaf that the row sees gives no item;
    with ``keep_empty`` a row that sees no key still has its first range, whose state is the empty one. shared: (rows,)
    leaves that other items attend for the row.
    """
    last = -(-limits // LEAF)
    from_leaf = firsts // LEAF if shared is None else np.maximum(firsts // LEAF, shared)
    if keep_empty:
        last = np.maximum(last, 1)
    mine = (ranges[None, :, 0] < last[:, None]) & (ranges[None, :, 1] > from_leaf[:, None])
    row, split = np.nonzero(mine & (ranges[:, 0] < ranges[:, 1])[None])
    begin = np.maximum(ranges[split, 0], from_leaf[row])
    end = np.minimum(ranges[split, 1], last[row])
    return np.stack([row, limits[row], begin, end, np.ones_like(row), firsts[row]], axis=1)


def row_table(firsts: NDArray[np.int64], limits: NDArray[np.int64], plan: SplitPlan) -> NDArray[np.int64]:
    """ROW records (rows, 4) of rows that see keys [first, limit); states count from row * plan.states, one per unit
    from plan.first_unit on."""
    unit = firsts // plan.unit_keys
    count = np.maximum(-(-limits // plan.unit_keys) - unit, 0)
    state = np.arange(len(limits)) * plan.states + unit - plan.first_unit
    return np.stack([state, count, unit, np.full(len(limits), plan.unit_leaves)], axis=1)


class Shared(NamedTuple):
    """Rows [row, row + rows) of a call see all keys of leaves [begin, end), which lie in the same pages."""

    row: int
    rows: int
    begin: int
    end: int


def shared_leaves(
    limits: NDArray[np.int64], units: NDArray[np.int64], tables: list[NDArray[np.uint32]], page_size: int
) -> tuple[list[Shared], NDArray[np.int64]]:
    """What rows have in common, in whole units of their states, and the leaves (rows,) not left to each of them.

    limits: (rows,) keys that each row sees; units: leaves per state of each row; tables: its page table. Rows that
    share a prefix must be neighbours, as they are when sorted by unit and table; those of different units share
    nothing. A prefix of some is followed by a longer one of fewer.
    """
    n = len(limits)
    common = np.zeros(max(n - 1, 0), np.int64)  # leaves that rows i and i + 1 share
    for i in range(n - 1):
        keys = int(min(limits[i], limits[i + 1])) if units[i] == units[i + 1] else 0
        if tables[i] is not tables[i + 1]:
            size = min(len(tables[i]), len(tables[i + 1]))
            differ = np.flatnonzero(tables[i][:size] != tables[i + 1][:size])
            keys = min(keys, (int(differ[0]) if differ.size else size) * page_size)
        common[i] = keys // (LEAF * units[i]) * units[i]
    found: list[Shared] = []
    alone = np.zeros(n, np.int64)
    todo = [(0, n, 0)]
    while todo:
        begin, end, done = todo.pop()
        if end - begin < 2:
            alone[begin:end] = done
            continue
        least = int(common[begin : end - 1].min())
        if least > done:
            found.append(Shared(begin, end - begin, done, least))
        edges = [begin, *(begin + 1 + np.flatnonzero(common[begin : end - 1] == least)).tolist(), end]
        todo += [(a, b, max(least, done)) for a, b in pairwise(edges)]
    return sorted(found), alone


def shared_table(shared: list[Shared], units: NDArray[np.int64], rows_each: int) -> NDArray[np.int64]:
    """Items (n, 6) of what rows share, columns as in ``item_table``: a unit each, for up to ``rows_each`` rows.

    units: (rows,) leaves per state of each row. Items of the same keys lie side by side.
    """
    parts = []
    for row, rows, begin, end in shared:
        unit = int(units[row])
        leaf, first = (
            x.reshape(-1)
            for x in np.meshgrid(np.arange(begin, end, unit), np.arange(row, row + rows, rows_each), indexing="ij")
        )
        count = np.minimum(row + rows - first, rows_each)
        limit = np.full_like(leaf, end * LEAF)
        parts.append(np.stack([first, limit, leaf, leaf + unit, count, np.zeros_like(leaf)], axis=1))
    return np.concatenate([np.zeros((0, 6), np.int64), *parts])
