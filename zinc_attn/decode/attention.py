"""Attention over sequences of a KVCache: append the new rows, attend, merge, in one submission per call.

What changes from token to token lives in a work buffer of a few hundred words; the command buffers are recorded once
per layout bucket and layer, with room for a power of two of items, rows and pages, and unused places leave early.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cache import rows
from ..cache.kv_cache import KVCache, Sequence, power_of_two
from ..cache.pages import Reservation, commit_all
from ..cache.rows import NEVER, Work, item_table, row_table
from ..canonical.reference import PartialState, empty_state, key_ranges
from ..errors import ArgumentError, LimitError, RuntimeUnavailableError, ShapeError
from ..kernels import contract as kernels
from ..kernels.contract import APPEND_KERNEL, MERGE, MERGE_DIMS, SCRATCH_BYTES, Build
from ..planning.splits import SplitPlan, first_seen, plan_splits, sharing_pays
from ..runtime.kompute import HostTensor, KomputeBuffer, KomputeRuntime
from ..runtime.protocol import Buffer, Dispatch, Recording, Use
from ..shapes import KEYS_PER_NODE, LEAF, MAX_CONTEXT, NODE, check_array, check_bool, check_int, shown
from .one_shot import Scoring, check_scale, check_score_bound, check_sinks, check_softcap, check_window

F32 = NDArray[np.float32]
T = TypeVar("T")

APPEND_ROWS: Final = 4096  # new tokens up to which a call is one submission


class Bucket(NamedTuple):
    """The sizes that a recording has room for; all but ``build``, ``direct`` and ``fresh`` are powers of two."""

    build: Build
    direct: bool
    fresh: bool  # the new rows are read from the row tensor, and reach the cache behind the attend
    items: int
    rows: int
    states: int
    appends: int  # 0: attend only
    tables: int
    scoring: int = 0  # of Attention.scorings
    partial: bool = False  # pass 1 alone; the host reads the states
    shared: int = 0  # items of keys that rows share; 0: none
    shared_rows: int = 1  # rows that a workgroup of them serves
    shared_build: Build = "single"


@dataclass
class _Rig:
    """Buffers of a bucket, shared by the layers: work words (one set per shard), q, states, out, rows."""

    work: Work
    work_buffers: list[Buffer]
    q: Buffer
    states: Buffer
    out: Buffer
    rows: Buffer | None
    row_words: NDArray[np.uint32]  # (appends, kv_heads, words) on the host
    holds: tuple[Any, ...] = ()  # what ``work`` was filled for, see _Frame
    tokens: tuple[int, ...] = ()  # and for which lengths
    shared: Work | None = None  # the items of shared keys, in a work buffer of their own
    shared_buffers: tuple[Buffer, ...] = ()


Seen = tuple[NDArray[Any], NDArray[Any]]  # (first, limit) of each row: it sees keys [first, limit)


@dataclass(eq=False)
class _Part:
    """One sequence of a call: its rows, plan and new tokens."""

    sequence: Sequence
    q: NDArray[Any]
    keys: Any = None  # stored values (n, kv_heads, head_dim)
    values: Any = None
    reservation: Reservation | None = None
    tokens: int = 0
    seen: Seen | None = None  # of its rows, where the sequence is a shard of a longer one


def padded(n: int, limit: int) -> int:
    """The least power of two that is at least ``n`` and 1, but not beyond ``limit``."""
    return max(min(power_of_two(n), limit), n)


Block = tuple[_Part, int, int]  # rows [begin, end) of a part
Layout = tuple[SplitPlan, NDArray[np.int64], Build]  # with the plan's leaf ranges (splits, 2) and build


def _seen(block: Block, window: int | None) -> Seen:
    """Of the rows of a block."""
    part, begin, end = block
    firsts, limits = part.seen or key_ranges(part.tokens, len(part.q), True, window)
    return firsts[begin:end], limits[begin:end]


class _Frame(NamedTuple):
    """Where a steady call's parts lie in its bucket's work buffer; it stays while the sequences grow within a leaf."""

    bucket: Bucket
    items: tuple[slice, ...]  # of each part


def _items(
    block: list[Block],
    plans: list[Layout],
    direct: bool,
    window: int | None,
    shared: list[NDArray[np.int64]] | None = None,
) -> list[NDArray[np.int64]]:
    """The items of each part's rows. shared: leaves of each part's rows that other items attend."""
    return [
        item_table(*_seen(one, window), ranges, keep_empty=direct, shared=None if shared is None else shared[i])
        for i, (one, (_, ranges, _)) in enumerate(zip(block, plans, strict=True))
    ]


def fill(
    rig: _Rig,
    block: list[Block],
    plans: list[Layout],
    items: list[NDArray[np.int64]],
    new: list[_Part],
    bucket: Bucket,
    window: int | None,
    tables: dict[_Part, NDArray[np.uint32]],
    common: NDArray[np.int64] | None = None,
) -> tuple[slice, ...]:
    """Fill the work words of ``rig`` for a block's rows; where each part's items lie.

    plans, items: one per part of the block, see ``_items``; tables: the page table of every part, of ``new`` too;
    common: items of what rows share, see ``rows.shared_table``.
    """
    work, at = rig.work, 0
    page_tables, fresh_rows = {}, {}
    for part, table in tables.items():
        page_tables[part] = work.tables_at + at
        work.tables[at : at + len(table)] = table
        at += len(table)
    at = 0
    for part in new:
        assert part.reservation is not None
        fresh_rows[part] = at
        records = work.appends[at : at + len(part.keys)]
        records[:, 0] = np.arange(part.reservation.start, part.tokens)
        records[:, 1] = page_tables[part]
        at += len(part.keys)
    work.appends[at:, 0] = kernels.NO_TOKEN
    item = row = state = 0
    spans = []
    for one, (plan, _, _), mine in zip(block, plans, items, strict=True):
        part, seen = one[0], _seen(one, window)
        n, span = len(seen[0]), slice(item, item + len(mine))
        begin_fresh = part.reservation.start if part.reservation and bucket.fresh else NEVER
        work.items[span, :5] = mine[:, :5] + np.array([row, 0, 0, 0, 0])
        work.items[span, 5:9] = page_tables[part], begin_fresh, fresh_rows.get(part, 0), plan.unit_leaves
        work.items[span, 9] = mine[:, 5]
        work.rows[row : row + n] = row_table(*seen, plan) + np.array([state, 0, 0, 0])
        spans.append(span)
        item, row, state = item + len(mine), row + n, state + n * plan.states
    work.items[item:, 2:4] = 0  # no leaves
    work.rows[row:] = 0  # no states
    if rig.shared is not None:
        rig.shared.tables[:] = work.tables
        rig.shared.rows[:] = work.rows
        sharing = np.zeros((len(rig.shared.items), 9), np.int64)
        if common is not None:
            owner = np.concatenate([np.full(end - begin, i) for i, (_, begin, end) in enumerate(block)])
            sharing[: len(common), :5] = common[:, :5]
            for i, (part, _, _) in enumerate(block):
                mine = np.flatnonzero(owner[common[:, 0]] == i)
                begin_fresh = part.reservation.start if part.reservation and bucket.fresh else NEVER
                offset = rig.shared.tables_at - work.tables_at
                words = page_tables[part] + offset, begin_fresh, fresh_rows.get(part, 0), plans[i][0].unit_leaves
                sharing[mine, 5:] = words
        rig.shared.items[:, :9] = sharing
    return tuple(spans)


class Attention:
    """Attention of query rows over sequences of ``cache``.

    ``num_splits`` or ``split_size`` fix the layout of every call; neither: the split rule. The bits depend on neither.
    scale: None is 1 / sqrt(head_dim). window: keys that a row sees at most, its own position counted, or a list with an
    int or None per layer. softcap: scores become softcap * tanh(score / softcap). sinks: float32 (q_heads,), a logit
    per query head that joins the softmax without a value; or (num_layers, q_heads), or a list with an array or None per
    layer. cascade: keys that rows of a call share, in pages that sequences share or in a chunk of one sequence, are
    attended for several of these rows at once: where it saves enough (None), wherever it can (True), or never (False).
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        num_splits: int | None = None,
        split_size: int | None = None,
        scale: float | None = None,
        window: int | Seq[int | None] | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        cascade: bool | None = None,
    ) -> None:
        if num_splits is not None and split_size is not None:
            raise ArgumentError(
                f"num_splits, split_size: got {shown(num_splits)}, {shown(split_size)}, expected at most one"
            )
        if not isinstance(cache, KVCache):
            raise ArgumentError(
                f"cache: got {type(cache).__name__}, expected a KVCache (a ShardedKVCache has ShardedAttention)"
            )
        if cascade is not None and not isinstance(cascade, bool):
            raise ArgumentError(f"cascade: got {shown(cascade)}, expected True, False or None")
        self.cache, self.device = cache, cache.device
        self.num_splits, self.split_size, self.cascade = num_splits, split_size, cascade
        self._last: _Rig | None = None  # of the last call's last submission
        self._read, self._shared_keys = 0, False
        self.scale = check_scale(scale, cache.shape.head_dim)
        self.scorings, self.scoring_of = self._scorings(window, check_softcap(softcap), sinks)
        self._rigs: dict[Bucket, _Rig] = {}
        self._recordings: dict[tuple[Bucket, int], Recording] = {}
        self._frames: dict[tuple[Any, ...], _Frame] = {}
        self._plans: dict[tuple[int, int, int], Layout] = {}
        if num_splits is not None or split_size is not None:
            SplitPlan.fixed(0, cache.shape, num_splits=num_splits, split_size=split_size)  # refuses what is no layout
        self._pool: dict[tuple[str, int], Buffer] = {}  # tensors that buckets share, by name and power of two of words

        cache.users.add(self)

    def _scorings(self, window: Any, softcap: float | None, sinks: Any) -> tuple[list[Scoring], list[int]]:
        """The different scorings of the layers, and which of them each layer has."""
        layers, q_heads = self.cache.num_layers, self.cache.shape.q_heads
        if isinstance(window, (list, tuple)) and len(window) != layers:
            raise ArgumentError(f"window: got {len(window)} entries, expected an int, None or one per layer ({layers})")
        windows = list(window) if isinstance(window, (list, tuple)) else [window] * layers
        if not isinstance(sinks, (list, tuple)) and sinks is not None:
            sinks = check_array("sinks", sinks)
        if isinstance(sinks, (list, tuple)) or np.ndim(sinks) == 2:
            if len(sinks) != layers:
                raise ArgumentError(
                    f"sinks: got {len(sinks)} rows, expected ({q_heads},) or a row per layer ({layers})"
                )
            rows = [check_sinks(one, q_heads) for one in sinks]
        else:
            rows = [check_sinks(sinks, q_heads)] * layers
        found: dict[tuple[Any, ...], int] = {}
        scorings: list[Scoring] = []
        which = []
        for one, row in zip(map(check_window, windows), rows, strict=True):
            key = one, None if row is None else row.tobytes()
            if key not in found:
                found[key] = len(scorings)
                scorings.append(Scoring(self.scale, one, softcap, row))
            which.append(found[key])
        return scorings, which

    def close(self) -> None:
        """Free the command buffers and tensors of every bucket; KVCache.close does it. A later call makes them anew."""
        with self.cache.lock:
            for recording in self._recordings.values():
                recording.close()
            for rig in self._rigs.values():
                for buffer in (*rig.work_buffers, *rig.shared_buffers):
                    buffer.close()
            for buffer in self._pool.values():
                buffer.close()
            self._recordings.clear()
            self._rigs.clear()
            self._pool.clear()
            self._frames.clear()

    @property
    def keys_read(self) -> int:
        """Keys (of one KV head) that the workgroups of the last call read; without ``cascade``, what its rows see."""
        return self._read + (self._keys(self._last) if self._last else 0)

    @property
    def shared(self) -> bool:
        """Whether workgroups of the last call read keys for several rows at once."""
        return self._shared_keys

    def _keys(self, rig: _Rig) -> int:
        total = 0
        for work, chunks in [(rig.work, self.cache.shape.head_chunks)] + ([(rig.shared, 1)] if rig.shared else []):
            limit, begin, end, first = work.items[:, [1, 2, 3, 9]].astype(np.int64).T
            keys = np.minimum(limit, end * LEAF) - np.maximum(first, begin * LEAF)
            total += chunks * int(keys[end > begin].sum())
        return total

    def _ready(self) -> None:
        """Before a rig is filled: count what the call's submission before read, since both may be of one bucket."""
        self._read, self._last = self.keys_read, None

    def _ran(self, rig: _Rig) -> None:
        self._last, self._shared_keys = rig, self._shared_keys or rig.shared is not None

    @property
    def recordings(self) -> int:
        """Command buffers recorded so far; steady decode adds none."""
        return len(self._recordings)

    def __call__(
        self,
        q: Any,
        seq: Sequence | Seq[Sequence],
        layer: int,
        k: Any = None,
        v: Any = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Append k, v to ``seq``, then attend; without k and v, attend only.

        q: (q_heads, head_dim) or (q_len, q_heads, head_dim), float32 or float16; k, v: (tokens, kv_heads, head_dim),
        or (kv_heads, head_dim) for one token, as the cache's dtype takes them. Row i of q_len sees keys up to position
        tokens - q_len + i. Returns out like q, float32; with return_lse (out, lse), lse like q without head_dim.
        A batch: ``seq`` a list, and q, k, v lists of arrays, one per sequence, lengths may differ; returns lists.
        Each output has the bits of the sequence attended alone. A failed call leaves the cache as it was.
        """
        batch = not isinstance(seq, Sequence)
        if batch and not isinstance(seq, (list, tuple)):
            raise ArgumentError(f"seq: got {type(seq).__name__}, expected a Sequence or a list of them")
        return_lse = check_bool("return_lse", return_lse)
        sequences = [seq] if isinstance(seq, Sequence) else list(seq)
        columns = [q, k, v] if batch else [[q], None if k is None else [k], None if v is None else [v]]
        for name, column in zip("qkv", columns, strict=True):
            if column is not None and (not isinstance(column, (list, tuple)) or len(column) != len(sequences)):
                raise ArgumentError(f"{name}: expected a list of {len(sequences)} arrays, one per sequence")
        if (k is None) != (v is None):
            raise ArgumentError(f"{'v' if v is None else 'k'}: got None, expected both k and v, or neither")
        with self.cache.lock:
            found = self._run(sequences, columns, layer, self._attend)
        given = [q] if not batch else q
        outs = [out.reshape(np.shape(x)) for out, x in zip(found[0], given, strict=True)]
        lses = [lse.reshape(np.shape(x)[:-1]) for lse, x in zip(found[1], given, strict=True)]
        if not batch:
            return (outs[0], lses[0]) if return_lse else outs[0]
        return (outs, lses) if return_lse else outs

    def partial(
        self,
        q: Any,
        seq: Sequence,
        layer: int,
        k: Any = None,
        v: Any = None,
        *,
        nodes: Any = None,
        tokens: int | None = None,
        within: tuple[int, int] | None = None,
    ) -> PartialState:
        """Append k, v to ``seq``, then attend without the last fold: a state per row and node of 512 keys.

        q, k, v as in a call. nodes: the absolute numbers, ascending, of the nodes that ``seq`` holds, a shard of a
        longer sequence; None: 0, 1, ... tokens: of the whole sequence, whose last ones are the rows' own positions;
        None: those of ``seq``. within: (first, end) absolute nodes to attend, None for all. ``fold`` of the
        partials that together hold every node gives a call's bits. ArgumentError: tokens, nodes and ``seq`` do not fit
        each other.
        """
        if (k is None) != (v is None):
            raise ArgumentError(f"{'v' if v is None else 'k'}: got None, expected both k and v, or neither")
        if nodes is not None and (not isinstance(nodes, (list, tuple, np.ndarray)) or getattr(nodes, "ndim", 1) != 1):
            raise ArgumentError(f"nodes: got {shown(nodes)}, expected a list of node numbers, or None")
        last = MAX_CONTEXT // KEYS_PER_NODE
        held = None if nodes is None else np.array([check_int("nodes", n, 0, last) for n in nodes], np.int64)
        if held is not None and np.any(held[1:] <= held[:-1]):
            raise ArgumentError(f"nodes: got {list(held)}, expected ascending numbers")

        if within is not None:
            if not isinstance(within, (tuple, list)) or len(within) != 2:
                raise ArgumentError(f"within: got {shown(within)}, expected (first, end), node numbers, or None")
            first = check_int("within[0]", within[0], 0, last)
            within = first, check_int("within[1]", within[1], first, last)

        def attend(parts: list[_Part], layer: int) -> PartialState:
            return self._attend_nodes(parts[0], layer, held, tokens, within)

        with self.cache.lock:
            state = self._run([seq], [[q], None if k is None else [k], None if v is None else [v]], layer, attend)
        assert isinstance(state, PartialState)
        return state

    # --- a call -------------------------------------------------------------------------------------------

    def _run(
        self,
        sequences: list[Sequence],
        columns: list[Any],
        layer: int,
        attend: Callable[[list[_Part], int], T],
    ) -> T:
        """Check the arguments, reserve the new rows' places, ``attend``, and let the rows count."""
        cache = self.cache
        self._last, self._read, self._shared_keys = None, 0, False
        layer = cache.check_layer(layer)
        parts, q_max, k_max = [], 0.0, cache.max_k
        for i, sequence in enumerate(sequences):
            cache.check_sequence(sequence)
            if columns[1] is not None and sequence in sequences[:i]:
                raise ArgumentError(
                    f"seq: items {sequences.index(sequence)} and {i} are the same sequence, expected each once where k "
                    "and v are given; fork() it"
                )
            q, largest = self._check_q(columns[0][i])
            q_max = max(q_max, largest)
            keys = values = None
            if columns[1] is not None:
                keys, values, largest = cache.check_rows(columns[1][i], columns[2][i])
                k_max = max(k_max, largest)
            parts.append(_Part(sequence, q, keys, values))
        check_score_bound(q_max, k_max, cache.shape.head_dim, self.scale)
        held: list[Reservation] = []
        try:
            for part in parts:
                part.tokens = part.sequence.pages.lengths[layer]
                if part.keys is not None:
                    part.reservation = part.sequence.pages.reserve(layer, len(part.keys))
                    held.append(part.reservation)
                    part.tokens += len(part.keys)
                    cache.copy_pages(part.reservation.copies)
            found = attend(parts, layer)
            cache.max_k = k_max  # before the commit: an interrupt in between leaves it too large, not too small
            commit_all(held)
        finally:  # after a commit this does nothing
            for reservation in held:
                reservation.rollback()
        return found

    def _check_q(self, q: Any) -> tuple[NDArray[Any], float]:
        array, shape = check_array("q", q), self.cache.shape
        want = (shape.q_heads, shape.head_dim)
        if array.ndim not in (2, 3) or array.shape[-2:] != want or array.shape[0] == 0:
            raise ShapeError(f"q: got shape {array.shape}, expected {want} or (q_len, {want[0]}, {want[1]})")
        if array.ndim == 3 and len(array) > MAX_CONTEXT:
            raise ShapeError(f"q: got {len(array):,} rows, expected at most {MAX_CONTEXT:,}")
        values, largest = rows.checked_values("q", check_array("q", array, ("float32", "float16")))
        return (values if array.ndim == 3 else values[None]), largest

    def _plan(self, tokens: int, q_len: int, window: int | None) -> Layout:
        """The plan of a sequence; the batch never enters."""
        fixed = self.num_splits is not None or self.split_size is not None
        begin = first_seen(tokens, q_len, window)
        if not fixed:  # the split rule looks at whole leaves, a fixed layout at keys
            tokens, begin = -(-tokens // LEAF) * LEAF, begin // LEAF * LEAF
        key = tokens, q_len, begin
        if key not in self._plans:
            if len(self._plans) > (8 if fixed else 256):
                self._plans.clear()
            info, shape = self.device.info, self.cache.shape
            window = tokens - q_len + 1 - begin if begin else None
            if fixed:
                sizes = {"num_splits": self.num_splits, "split_size": self.split_size}
                plan = SplitPlan.fixed(tokens, shape, q_len=q_len, window=window, **sizes)
            else:
                plan = plan_splits(tokens, shape, info.compute_units, self.cache.dtype, q_len, info.kind, window)
            self._plans[key] = plan, np.array(plan.leaf_ranges()), plan.build
        return self._plans[key]

    def _attend(self, parts: list[_Part], layer: int) -> tuple[list[F32], list[F32]]:
        """All rows of a call, in as few submissions as the scratch and the grid allow: nearly always one."""
        if not parts:
            return [], []
        new = parts if parts[0].keys is not None else []
        if sum(len(part.keys) for part in new) > APPEND_ROWS:  # a prompt: in submissions of its own
            for part in new:
                assert part.reservation is not None
                encoded = rows.encode(part.keys, part.values, self.cache.dtype)
                self.cache.write_rows(part.sequence, layer, part.reservation, encoded)
            new = []
        window = self.scorings[self.scoring_of[layer]].window
        order = self._order(parts, window)
        if order is not None:
            parts = [parts[i] for i in order]
            outs, lses = self._attend_blocks(parts, parts if new else [], layer, window)
            back = np.argsort(order)
            return [outs[i] for i in back], [lses[i] for i in back]
        return self._attend_blocks(parts, new, layer, window)

    def _order(self, parts: list[_Part], window: int | None) -> list[int] | None:
        """The parts' places in an order in which those that share pages are neighbours; None: as they are."""
        if self.cascade is False or window is not None or len(parts) < 2:
            return None
        first = [part.sequence.pages.pages[:1] for part in parts]
        if len({page for pages in first for page in pages}) == len(parts):
            return None
        units = [self._plan(part.tokens, len(part.q), window)[0].unit_leaves for part in parts]
        tables = [part.sequence.table(part.reservation).astype(">u4").tobytes() for part in parts]
        return sorted(range(len(parts)), key=lambda i: (units[i], tables[i]))

    def _attend_blocks(
        self, parts: list[_Part], new: list[_Part], layer: int, window: int | None
    ) -> tuple[list[F32], list[F32]]:
        blocks = self._blocks(parts, window)
        if len(blocks) == 1:
            out, lse = self._submit(blocks[0], new, layer)
            if len(parts) == 1:
                return [out], [lse]
            ends = np.cumsum([len(part.q) for part in parts])[:-1]
            return np.split(out, ends), np.split(lse, ends)
        outs = [np.empty(part.q.shape, np.float32) for part in parts]
        lses = [np.empty(part.q.shape[:2], np.float32) for part in parts]
        where = {id(part): i for i, part in enumerate(parts)}
        for n, block in enumerate(blocks):
            # the first submission appends the new rows of all sequences; later ones find them in the cache
            out, lse = self._submit(block, new if n == 0 else [], layer)
            at = 0
            for part, begin, end in block:
                outs[where[id(part)]][begin:end] = out[at : at + end - begin]
                lses[where[id(part)]][begin:end] = lse[at : at + end - begin]
                at += end - begin
        return outs, lses

    def _most_states(self) -> int:
        """Partial states, over all rows, that one submission may have."""
        shape = self.cache.shape
        return min(SCRATCH_BYTES, self.device.info.max_buffer_bytes) // (4 * shape.q_heads * (shape.head_dim + 2))

    def _blocks(self, parts: list[_Part], window: int | None) -> list[list[Block]]:
        """The rows of a call, cut where a submission's partial states or workgroups would be too many."""
        if len(parts) == 1 and len(parts[0].q) == 1:
            return [[(parts[0], 0, 1)]]
        info = self.device.info
        most = self._most_states()
        blocks: list[list[Block]] = [[]]
        states = items = rows_so_far = 0
        for part in parts:
            plan, ranges, _ = self._plan(part.tokens, len(part.q), window)
            cost, width, row = max(plan.states, 1), len(ranges), 0
            while row < len(part.q):
                room = min(
                    (most - states) // cost,
                    (info.max_workgroups[0] - items) // width,
                    info.max_workgroups[2] - rows_so_far,
                    len(part.q) - row,
                )
                if room < 1 and blocks[-1]:
                    blocks.append([])
                    states = items = rows_so_far = 0
                    continue
                room = max(room, 1)
                blocks[-1].append((part, row, row + room))
                states, items, rows_so_far = states + room * cost, items + room * width, rows_so_far + room
                row += room
        return blocks

    def _submit(self, block: list[Block], new: list[_Part], layer: int) -> tuple[F32, F32]:
        """One submission: rows [begin, end) of each part of the block, after appending the new rows of ``new``."""
        self._ready()
        cache, shape, runtime = self.cache, self.cache.shape, self.device.runtime
        fresh, which = bool(new) and runtime.name == "kompute", self.scoring_of[layer]
        window = self.scorings[which].window
        # the first of several blocks appends the rows of parts that it does not attend: it is never steady
        steady = len(new) in (0, len(block)) and all(
            len(part.q) == 1 and len(part.keys if new else part.q) == 1 for part, _, _ in block
        )
        tokens = tuple(part.tokens for part, _, _ in block)
        parts = new if len(block) == len(new) == 1 else dict.fromkeys((*new, *(part for part, _, _ in block)))
        tables = {part: part.sequence.table(part.reservation) for part in parts}
        key: tuple[Any, ...] = ()
        if steady:
            key = (
                fresh,
                bool(new),
                which,
                *((p.sequence.serial, p.sequence.stamp, -(-p.tokens // LEAF)) for p, _, _ in block),
            )
            if window is not None:
                key = (*key, *(first_seen(length, 1, window) // LEAF for length in tokens))
            elif not new:  # a leaf can be shared while it is whole; what a call appends lies in pages of its own
                key = (*key, *(length // LEAF for length in tokens))
        frame = self._frames.get(key) if key else None
        if frame is not None and self._rig(frame.bucket).holds == key:
            bucket, rig = frame.bucket, self._rig(frame.bucket)
            changed = rig.tokens != tokens
            if changed:
                rig.tokens = ()  # an interrupted call leaves words that the next one must fill again
                for at, (length, span) in enumerate(zip(tokens, frame.items, strict=True)):
                    rig.work.items[span, 1] = length
                    if window is not None:
                        rig.work.items[span, 9] = max(length - window, 0)
                    if fresh:
                        rig.work.items[span, 6] = length - 1
                    if new:
                        rig.work.appends[at, 0] = length - 1
        else:
            bucket, spans = self._fill(block, new, fresh, which, tables)
            rig, changed = self._rig(bucket), True
            for i, buffer in enumerate(rig.shared_buffers):
                assert rig.shared is not None
                cache.set_cache(rig.shared, cache.layers[layer][i])
                runtime.write(buffer, rig.shared.words)
            rig.holds, rig.tokens = key, ()
            if key:
                if len(self._frames) > 256:
                    self._frames.clear()
                self._frames[key] = _Frame(bucket, spans)
        n = sum(end - begin for _, begin, end in block)
        q = block[0][0].q[block[0][1] : block[0][2]]
        if len(block) > 1:
            q = np.concatenate([part.q[begin:end] for part, begin, end in block])
        self._upload(rig, q, new, layer, changed)
        if changed:
            rig.tokens = tokens
        runtime.run(self._recording(bucket, rig, layer))
        self._ran(rig)
        words = runtime.read(rig.out).view(np.float32)
        size = bucket.rows * shape.q_heads * shape.head_dim
        out = words[:size].reshape(bucket.rows, shape.q_heads, shape.head_dim)[:n]
        lse = words[size : size + bucket.rows * shape.q_heads].reshape(bucket.rows, shape.q_heads)
        return out, lse[:n]

    def _attend_nodes(
        self,
        part: _Part,
        layer: int,
        held: NDArray[np.int64] | None,
        tokens: int | None,
        within: tuple[int, int] | None,
    ) -> PartialState:
        """The states of a part's rows over the nodes it holds."""
        cache, shape, which = self.cache, self.cache.shape, self.scoring_of[layer]
        scoring, q_len, there = self.scorings[which], len(part.q), part.tokens
        held = np.arange(-(-there // KEYS_PER_NODE)) if held is None else held
        tokens = there if tokens is None else check_int("tokens", tokens, 0, MAX_CONTEXT)
        want = int(np.clip(tokens - held * KEYS_PER_NODE, 0, KEYS_PER_NODE).sum())
        if there != want or (held.size and held[-1] * KEYS_PER_NODE >= tokens):
            raise ArgumentError(
                f"nodes, tokens: got {held.size} nodes of a sequence of {tokens} tokens, which hold {want}, and a seq "
                f"of {there}; expected as many"
            )
        firsts, limits = key_ranges(tokens, q_len, True, scoring.window)
        span = int(firsts.min()) // KEYS_PER_NODE, -(-int(limits.max()) // KEYS_PER_NODE)
        first, end = span if within is None else (max(span[0], within[0]), min(span[1], within[1]))
        begin, last = np.searchsorted(held, (first, max(first, end)))
        mine = held[begin:last]
        empty = empty_state((q_len, len(mine), shape.q_heads), shape.head_dim)
        found = PartialState(
            mine, empty.m, empty.l, empty.o, span, self._identity(part, tokens, scoring), scoring.sinks
        )
        if not len(mine):
            if part.keys is not None:
                assert part.reservation is not None
                encoded = rows.encode(part.keys, part.values, cache.dtype)
                cache.write_rows(part.sequence, layer, part.reservation, encoded)
            return found

        def local(positions: NDArray[Any]) -> Any:
            """Keys of this sequence that lie before absolute positions."""
            inside = np.clip(positions[:, None] - mine * KEYS_PER_NODE, 0, KEYS_PER_NODE)
            return inside.sum(axis=1) + begin * KEYS_PER_NODE

        part.seen = local(firsts), np.minimum(local(limits), there)
        stop = min(int(last) * KEYS_PER_NODE, there)
        edges = (*range(int(begin) * KEYS_PER_NODE, stop, KEYS_PER_NODE), stop)
        plan = SplitPlan(stop, shape, edges, NODE, q_len, int(begin) * KEYS_PER_NODE)
        layout: Layout = plan, np.array(plan.leaf_ranges()), "loop"
        new = [part] if part.keys is not None else []
        if new and len(part.keys) > APPEND_ROWS:
            assert part.reservation is not None
            encoded = rows.encode(part.keys, part.values, cache.dtype)
            cache.write_rows(part.sequence, layer, part.reservation, encoded)
            new = []
        room = max(1, min(self._most_states(), self.device.info.max_workgroups[0]) // plan.states)
        for row in range(0, q_len, room):
            block: list[Block] = [(part, row, min(row + room, q_len))]
            m, total, o = self._submit_nodes(block, layout, new if row == 0 else [], layer, which)
            rows_seen = slice(row, block[0][2])
            there_is = (mine * KEYS_PER_NODE < limits[rows_seen, None]) & (
                (mine + 1) * KEYS_PER_NODE > firsts[rows_seen, None]
            )
            found.m[rows_seen][there_is] = m[there_is]
            found.l[rows_seen][there_is] = total[there_is]
            found.o[rows_seen][there_is] = o[there_is]
        return found

    def _identity(self, part: _Part, tokens: int, scoring: Scoring) -> str:
        """Of a call: partial states with the same one belong together."""
        shape = self.cache.shape
        text = (
            f"{shape} {tokens} {len(part.q)} {scoring.scale!r} {scoring.window} {scoring.softcap!r} {self.cache.dtype}"
        )
        sinks = b"" if scoring.sinks is None else scoring.sinks.tobytes()
        q = np.ascontiguousarray(part.q, np.float32).tobytes()
        return hashlib.sha256(text.encode() + b"\0" + sinks + q).hexdigest()

    def _submit_nodes(
        self, block: list[Block], layout: Layout, new: list[_Part], layer: int, which: int
    ) -> tuple[F32, F32, F32]:
        """m, l (rows, nodes, q_heads) and o (rows, nodes, q_heads, head_dim) of a block's rows: one submission."""
        self._ready()
        (part, begin, end), cache, runtime = block[0], self.cache, self.device.runtime
        shape, n, states = cache.shape, end - begin, layout[0].states
        tables = {part: part.sequence.table(part.reservation)}
        items = _items(block, [layout], False, None)
        bucket = Bucket(
            "loop",
            False,
            bool(new) and runtime.name == "kompute",
            padded(len(items[0]), self.device.info.max_workgroups[0]),
            padded(n, self.device.info.max_workgroups[2]),
            padded(n * states, self._most_states()),
            power_of_two(len(part.keys)) if new else 0,
            power_of_two(len(tables[part])),
            which,
            True,
        )
        rig = self._rig(bucket)
        rig.holds = ()
        fill(rig, block, [layout], items, new, bucket, None, tables)
        self._upload(rig, part.q[begin:end], new, layer, True)
        runtime.run(self._recording(bucket, rig, layer))
        self._ran(rig)
        words, size = runtime.read(rig.states).view(np.float32), shape.q_heads * shape.head_dim
        o = words[: n * states * size].reshape(n, states, shape.q_heads, shape.head_dim)
        behind = words[bucket.states * size :][: 2 * n * states * shape.q_heads]
        ml = behind.reshape(n, states, shape.q_heads, 2)
        return ml[..., 0], ml[..., 1], o

    def _upload(self, rig: _Rig, q: NDArray[Any], new: list[_Part], layer: int, changed: bool) -> None:
        """Write q, the new rows, and, where they ``changed``, the work words for ``layer``."""
        runtime, cache = self.device.runtime, self.cache
        runtime.write(rig.q, np.ascontiguousarray(q, np.float32).reshape(-1).view(np.uint32))
        if rig.rows is not None:
            at = 0
            for part in new:
                rows.encode_into(rig.row_words[at : at + len(part.keys)], part.keys, part.values, cache.dtype)
                at += len(part.keys)
            runtime.write(rig.rows, rig.row_words[:at].reshape(-1))
        for i, buffer in enumerate(rig.work_buffers if changed else ()):
            if len(rig.work_buffers) > 1:
                cache.set_cache(rig.work, cache.layers[layer][i])
            runtime.write(buffer, rig.work.words)

    def _fill(
        self, block: list[Block], new: list[_Part], fresh: bool, which: int, tables: dict[_Part, NDArray[np.uint32]]
    ) -> tuple[Bucket, tuple[slice, ...]]:
        """Fill the work words of the block's bucket; where each part's items lie."""
        window = self.scorings[which].window
        plans = [self._plan(part.tokens, len(part.q), window) for part, _, _ in block]
        direct = all(plan.states == 1 for plan, _, _ in plans)
        alone, common, each = None, None, 1
        if not direct and window is None:
            alone, common, each = self._share(block, plans, tables)
        items, sizes = _items(block, plans, direct, window, alone), [end - begin for _, begin, end in block]
        bucket = Bucket(
            "loop" if any(build == "loop" for _, _, build in plans) else "single",
            direct,
            fresh,
            padded(sum(map(len, items)), self.device.info.max_workgroups[0]),
            padded(sum(sizes), self.device.info.max_workgroups[2]),
            padded(sum(n * plan.states for n, (plan, _, _) in zip(sizes, plans, strict=True)), self._most_states()),
            power_of_two(sum(len(part.keys) for part in new)) if new else 0,
            power_of_two(sum(map(len, tables.values()))),
            which,
            shared=0 if common is None else padded(len(common), self.device.info.max_workgroups[0]),
            shared_rows=each,
            shared_build="single" if common is None or np.all(common[:, 3] - common[:, 2] == 1) else "loop",
        )
        rig = self._rig(bucket)
        rig.holds = ()  # until the caller says what it holds
        return bucket, fill(rig, block, plans, items, new, bucket, window, tables, common)

    def _share(
        self, block: list[Block], plans: list[Layout], tables: dict[_Part, NDArray[np.uint32]]
    ) -> tuple[list[NDArray[np.int64]] | None, NDArray[np.int64] | None, int]:
        """Leaves of each part's rows that items for several rows attend, these items, and the rows each is for."""
        shape, sizes = self.cache.shape, [end - begin for _, begin, end in block]
        units = np.repeat([plan.unit_leaves for plan, _, _ in plans], sizes)
        most = kernels.shared_rows(self.device.info.kind, shape, self.cascade is True)
        if self.cascade is False or sum(sizes) < 2 or most < 2:
            return None, None, 1
        limits = np.concatenate([_seen(one, None)[1] for one in block])
        row_tables = [tables[part] for part, begin, end in block for _ in range(begin, end)]
        shared, alone = rows.shared_leaves(limits, units, row_tables, self.cache.pool.page_size)
        if not shared:
            return None, None, 1
        each = min(most, power_of_two(max(one.rows for one in shared)))
        saved = sum((one.rows - -(-one.rows // each)) * (one.end - one.begin) for one in shared)
        info = self.device.info
        if self.cascade is None and not sharing_pays(saved, shape, info.compute_units, info.kind):
            return None, None, 1
        table = rows.shared_table(shared, units, each)
        if len(table) > info.max_workgroups[0]:  # more than the rows alone need, which the block fits
            return None, None, 1
        return np.split(alone, np.cumsum(sizes)[:-1]), table, each

    # --- in a host's own Kompute sequence ------------------------------------------------------------------

    def record(
        self, sequence: Any, q: Any, seq: Sequence, layer: int, rows: Any = None, *, max_tokens: int | None = None
    ) -> RecordedAttention:
        """Record this call's operations behind what a host's kp.Sequence already holds; nothing is evaluated.

        q: the host's kp tensor of float32 (q_len, q_heads, head_dim); rows: None to attend only, or its tensor of the
        new tokens' rows as the cache stores them, ``rows.encode``'s layout (for f32: per token and KV head, K then V);
        max_tokens: the longest context the recording serves, None for the cache's capacity.
        The host orders its own writes of q and rows: uploaded by OpTensorSyncDevice, or written by a dispatch and then
        named in an OpTensorSyncLocal. Checks of their values are the host's. It runs the sequence inside
        ``with call.step():`` and must not use ``seq`` or the cache's tensors while it runs.
        """
        runtime = self.device.runtime
        if not isinstance(runtime, KomputeRuntime):
            raise RuntimeUnavailableError(f"record: got runtime {runtime.name!r}, expected a Device.from_kompute")
        for name, given, kind in (("sequence", sequence, "Sequence"), ("q", q, "Tensor"), ("rows", rows, "Tensor")):
            made_by_kp = type(given).__module__.split(".")[0] == "kp" and type(given).__name__ == kind
            if not made_by_kp and not (name == "rows" and given is None):
                raise ArgumentError(f"{name}: got {shown(given)}, expected a kp.{kind}")
        with self.cache.lock:
            layer = self.cache.check_layer(layer)
            self.cache.check_sequence(seq)
            return RecordedAttention(self, runtime, sequence, q, seq, layer, rows, max_tokens)

    # --- recordings ---------------------------------------------------------------------------------------

    def _rig(self, bucket: Bucket) -> _Rig:
        if bucket not in self._rigs:
            self._rigs[bucket] = self.new_rig(bucket)
        return self._rigs[bucket]

    def new_rig(self, bucket: Bucket, host: tuple[Buffer, Buffer | None] | None = None) -> _Rig:
        """Buffers for a bucket. ``host``: q and rows tensors of a host, in whose one sequence all is chained."""
        cache, runtime = self.cache, self.device.runtime
        shape, made = cache.shape, list[Buffer]()

        def buffer(words: int, use: Use) -> Buffer:
            nbytes = 4 * max(words, 1)
            if host and use is Use.SCRATCH and isinstance(runtime, KomputeRuntime):
                made.append(runtime.buffer(nbytes, use, chained=True))
            else:
                made.append(runtime.buffer(nbytes, use))
            return made[-1]

        scoring = self.scorings[bucket.scoring]
        work = Work(bucket.items, bucket.rows, bucket.appends, bucket.tables, scoring.sinks)
        cache.set_cache(work, cache.layers[0][0])
        work.set(**scoring.header(shape.head_dim))
        work.set(state_stride=bucket.states, rows=bucket.rows, direct=int(bucket.direct))
        try:
            work_buffers = [buffer(work.words.size, Use.INPUT) for _ in cache.layers[0]]
            shared, shared_buffers = None, tuple[Buffer, ...]()
            if bucket.shared:
                shared = Work(bucket.shared, bucket.rows, 0, bucket.tables)
                cache.set_cache(shared, cache.layers[0][0])
                shared.set(**scoring.header(shape.head_dim), state_stride=bucket.states, rows=bucket.rows)
                shared_buffers = tuple(buffer(shared.words.size, Use.INPUT) for _ in cache.layers[0])
            kept = Use.OUTPUT if bucket.partial else Use.SCRATCH
            state_words = 0 if bucket.direct else bucket.states * shape.q_heads * (shape.head_dim + 2)
            out_words = bucket.rows * shape.q_heads * (shape.head_dim + 1)
            if host:
                states, out = buffer(state_words, Use.SCRATCH), buffer(out_words, Use.OUTPUT)
                q, new_rows = host
            else:  # calls wait for each other, so buckets can share
                states, out = (
                    self._shared("partials" if bucket.partial else "states", state_words, kept),
                    self._shared("out", out_words, Use.OUTPUT),
                )
                q = self._shared("q", bucket.rows * shape.q_heads * shape.head_dim, Use.INPUT)
                appended = bucket.appends * cache.row_words
                new_rows = self._shared("rows", appended, Use.INPUT) if bucket.appends else None
        except BaseException:
            for one in made:
                one.close()
            raise
        row_words = np.zeros((bucket.appends, shape.kv_heads, cache.row_words // shape.kv_heads), np.uint32)
        return _Rig(
            work, work_buffers, q, states, out, new_rows, row_words, shared=shared, shared_buffers=shared_buffers
        )

    def _shared(self, name: str, words: int, use: Use) -> Buffer:
        """A tensor of at least ``words`` words, at most a power of two, that every bucket of its size class uses."""
        size = padded(words, max(words, self.device.info.max_buffer_bytes // 4))
        if (name, size) not in self._pool:
            self._pool[name, size] = self.device.runtime.buffer(4 * size, use)
        return self._pool[name, size]

    def _recording(self, bucket: Bucket, rig: _Rig, layer: int) -> Recording:
        if (bucket, layer) not in self._recordings:
            self._recordings[bucket, layer] = self.device.runtime.record(self.steps(bucket, rig, layer))
        return self._recordings[bucket, layer]

    def steps(self, bucket: Bucket, rig: _Rig, layer: int) -> list[Dispatch]:
        """The dispatches of a call: append, attend, merge; or attend, merge, append where new rows are read fresh."""
        cache, shape, device = self.cache, self.cache.shape, self.device
        appends, attends, merges = [], [], []
        target = rig.out if bucket.direct else rig.states
        ahead = kernels.chunks_ahead(device.info.kind, shape.head_dim)
        capped = int(self.scorings[bucket.scoring].softcap is not None)
        spec = (shape.head_dim, shape.heads_per_workgroup, ahead, cache.tile, capped)
        for i, (shard, work) in enumerate(zip(cache.layers[layer], rig.work_buffers, strict=True)):
            fresh: tuple[Buffer, ...] = ()
            if rig.rows is not None:
                kernel = device.kernel(APPEND_KERNEL, cache.append_spec())
                grid = (bucket.appends, shard.heads, 1)
                appends.append(Dispatch(kernel, (work, rig.rows, shard.k, shard.v), grid))
                fresh = (rig.rows,) if bucket.fresh else ()
            if bucket.shared:
                vectors = shape.group * bucket.shared_rows
                together = (shape.head_dim, vectors, *spec[2:], bucket.shared_rows)
                kernel = device.kernel(kernels.attend(bucket.shared_build, cache.dtype, bucket.fresh), together)
                buffers = (rig.shared_buffers[i], rig.q, shard.k, shard.v, target, target, *fresh)
                attends.append(Dispatch(kernel, buffers, (bucket.shared, shard.heads, 1)))
            kernel = device.kernel(kernels.attend(bucket.build, cache.dtype, bucket.fresh), (*spec, 1))
            buffers = (work, rig.q, shard.k, shard.v, target, target, *fresh)
            attends.append(Dispatch(kernel, buffers, (bucket.items, shard.heads, shape.head_chunks)))
        if not bucket.direct and not bucket.partial:
            grid = (-(-shape.head_dim // MERGE_DIMS), shape.q_heads, bucket.rows)
            kernel = device.kernel(MERGE, (shape.head_dim, kernels.merge_lanes(device.info.kind)))
            merges.append(Dispatch(kernel, (rig.work_buffers[0], rig.states, rig.out), grid))
        return [*attends, *merges, *appends] if bucket.fresh else [*appends, *attends, *merges]


class RecordedAttention:
    """Operations recorded in a host's kp.Sequence, from ``Attention.record``.

    out: kp tensor of float32: (q_len, q_heads, head_dim), then lse (q_len, q_heads); on the device and, after an
    evaluation, in host memory. Close it before the cache.
    """

    def __init__(
        self,
        attention: Attention,
        runtime: KomputeRuntime,
        sequence: Any,
        q: Any,
        seq: Sequence,
        layer: int,
        rows: Any,
        max_tokens: int | None,
    ) -> None:
        cache, shape = attention.cache, attention.cache.shape
        self.attention, self.runtime, self.seq, self.layer = attention, runtime, seq, layer
        self.q_len, rest = divmod(int(q.size()), shape.q_heads * shape.head_dim)
        if rest or not self.q_len:
            raise ShapeError(
                f"q: got a tensor of {q.size()} elements, expected q_len * {shape.q_heads * shape.head_dim}"
            )
        self.count, rest = (0, 0) if rows is None else divmod(int(rows.size()), cache.row_words)
        if rest or (rows is not None and not self.count):
            raise ShapeError(f"rows: got a tensor of {rows.size()} words, expected tokens * {cache.row_words}")
        most = cache.capacity if max_tokens is None else max_tokens
        self.max_tokens = max_tokens = check_int("max_tokens", most, 1, cache.capacity)
        info = attention.device.info
        which = attention.scoring_of[layer]
        self.window = attention.scorings[which].window
        longest = plan_splits(max_tokens, shape, info.compute_units, cache.dtype, self.q_len, window=self.window)
        nodes = -(-max_tokens // (LEAF * NODE))
        if self.window is not None:  # a span of keys that begins anywhere touches one node more than its length says
            nodes = min(nodes, -(-(self.window + self.q_len - 1) // (LEAF * NODE)) + 1)
        self.splits = min(longest.num_splits, nodes)
        self.bucket = Bucket(
            "loop",
            False,
            self.count > 0,
            power_of_two(self.splits * self.q_len),
            self.q_len,
            power_of_two(nodes * self.q_len),
            self.count,
            power_of_two(cache.pool.pages_for(max_tokens)),
            which,
        )
        self._rig = attention.new_rig(self.bucket, (HostTensor(q), None if rows is None else HostTensor(rows)))
        self._recording = runtime.record_into(sequence, attention.steps(self.bucket, self._rig, layer))

    @property
    def out(self) -> Any:
        """The kp tensor of the result."""
        assert isinstance(self._rig.out, KomputeBuffer)
        return self._rig.out.tensor

    @contextmanager
    def step(self, *later: RecordedAttention) -> Iterator[None]:
        """Around one evaluation of the host's sequence: the new rows count when the block ends without an error.

        later: the calls of later layers that the same sequence holds, in order; with them the layers must be in step.
        """
        cache, pages = self.attention.cache, self.seq.pages
        with cache.lock:
            cache.check_sequence(self.seq)
            if any(call.seq is not self.seq for call in later):
                raise ArgumentError("later: got a call of another sequence, expected calls of this one's layers")
            before = len(pages)
            held = self._begin()
            try:
                for call in later:  # a page that one layer's rows need is the sequence's before the next layer asks
                    if held is not None:
                        held.commit()
                    held = call._begin()
                yield
                if held is not None:
                    held.commit()
            except BaseException:
                if held is not None:
                    held.rollback()
                if later and len(pages.lengths) > 1:
                    self.seq.truncate(before)
                raise

    def _begin(self) -> Reservation | None:
        """Reserve the new rows' places and fill the work words."""
        length = self.seq.pages.lengths[self.layer]
        part = _Part(self.seq, np.empty((self.q_len, 0)), range(self.count), tokens=length + self.count)
        if part.tokens > self.max_tokens:
            raise LimitError(f"seq: {part.tokens} tokens, expected at most max_tokens = {self.max_tokens}")
        if self.count:
            part.reservation = self.seq.pages.reserve(self.layer, self.count)
        try:
            if part.reservation:
                self.attention.cache.copy_pages(part.reservation.copies)
            self._fill(part)
        except BaseException:
            if part.reservation:
                part.reservation.rollback()
            raise
        return part.reservation

    def _fill(self, part: _Part) -> None:
        """The work words for the sequence's length: whole nodes per state, so that one grid serves every length."""
        shape, cache = self.attention.cache.shape, self.attention.cache
        begin = first_seen(part.tokens, self.q_len, self.window)
        first = begin // (LEAF * NODE)
        nodes = -(-part.tokens // (LEAF * NODE)) - first
        starts = [(first + i * nodes // self.splits) * NODE * LEAF for i in range(self.splits + 1)]
        edges = [max(min(start, part.tokens), begin) for start in starts]
        plan = SplitPlan(part.tokens, shape, (*edges,), NODE, self.q_len, begin)
        new = [part] if self.count else []
        tables = {part: part.sequence.table(part.reservation)}
        block: list[Block] = [(part, 0, self.q_len)]
        layouts: list[Layout] = [(plan, np.array(plan.leaf_ranges()), "loop")]
        items = _items(block, layouts, False, self.window)
        fill(self._rig, block, layouts, items, new, self.bucket, self.window, tables)
        for i, buffer in enumerate(self._rig.work_buffers):
            cache.set_cache(self._rig.work, cache.layers[self.layer][i])
            self.runtime.write(buffer, self._rig.work.words)

    def close(self) -> None:
        """Free the pipelines and tensors; the host's sequence must not be evaluated afterwards."""
        self._recording.close()
        for buffer in (*self._rig.work_buffers, self._rig.states, self._rig.out):
            buffer.close()
