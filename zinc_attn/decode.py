"""Attention over sequences of a KVCache: append the new rows, attend, merge, in one submission per call.

What changes from token to token lives in a work buffer of a few hundred words; the command buffers are recorded once
per layout bucket and layer, with room for a power of two of items, rows and pages, and unused places leave early.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import kernels, rows
from .attention import Scoring, check_scale, check_score_bound, check_sinks, check_softcap, check_window
from .cache import KVCache, Sequence, power_of_two
from .errors import ArgumentError, DTypeError, LimitError, RuntimeUnavailableError, ShapeError
from .kernels import APPEND_KERNEL, MERGE, MERGE_DIMS, Build
from .kompute import HostTensor, KomputeBuffer, KomputeRuntime
from .pages import Reservation, commit_all
from .planner import SplitPlan, first_seen, plan_splits
from .reference import key_ranges
from .rows import NEVER, Work, item_table, row_table
from .runtime import Buffer, Dispatch, Recording, Use
from .shapes import LEAF, NODE, check_int

F32 = NDArray[np.float32]

APPEND_ROWS: Final = 4096  # new tokens up to which a call is one submission
SCRATCH_BYTES: Final = 128 << 20  # partial states of one submission; longer calls go in blocks of rows


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


@dataclass(eq=False)
class _Part:
    """One sequence of a call: its rows, plan and new tokens."""

    sequence: Sequence
    q: NDArray[Any]
    keys: Any = None  # stored values (n, kv_heads, head_dim)
    values: Any = None
    reservation: Reservation | None = None
    tokens: int = 0


def _room(n: int, limit: int) -> int:
    """The least power of two that is at least ``n`` and 1, but not beyond ``limit``."""
    return max(min(power_of_two(n), limit), n)


Block = tuple[_Part, int, int]  # rows [begin, end) of a part
Layout = tuple[SplitPlan, NDArray[np.int64], Build]  # with the plan's leaf ranges (splits, 2) and build


def _seen(block: Block, window: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """(first, limit) of the rows of a block."""
    part, begin, end = block
    firsts, limits = key_ranges(part.tokens, len(part.q), True, window)
    return firsts[begin:end], limits[begin:end]


class _Frame(NamedTuple):
    """Where a steady call's parts lie in its bucket's work buffer; it stays while the sequences grow within a leaf."""

    bucket: Bucket
    items: tuple[slice, ...]  # of each part


def _items(block: list[Block], plans: list[Layout], direct: bool, window: int | None) -> list[NDArray[np.int64]]:
    """The items of each part's rows."""
    return [
        item_table(*_seen(one, window), ranges, plan, keep_empty=direct)
        for one, (plan, ranges, _) in zip(block, plans, strict=True)
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
) -> tuple[slice, ...]:
    """Fill the work words of ``rig`` for a block's rows; where each part's items lie.

    plans, items: one per part of the block, see ``_items``; tables: the page table of every part, of ``new`` too.
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
        work.items[span, :5] = mine[:, :5] + np.array([row, 0, 0, 0, state])
        work.items[span, 5:9] = page_tables[part], begin_fresh, fresh_rows.get(part, 0), plan.unit_leaves
        work.items[span, 9] = mine[:, 5]
        work.rows[row : row + n] = row_table(*seen, plan) + np.array([state, 0, 0, 0])
        spans.append(span)
        item, row, state = item + len(mine), row + n, state + n * plan.states
    work.items[item:, 2:4] = 0  # no leaves
    work.rows[row:] = 0  # no states
    return tuple(spans)


class Attention:
    """Attention of query rows over sequences of ``cache``.

    ``num_splits`` or ``split_size`` fix the layout of every call; neither: the split rule. The bits depend on neither.
    scale: None is 1 / sqrt(head_dim). window: keys that a row sees at most, its own position counted, or a list with an
    int or None per layer. softcap: scores become softcap * tanh(score / softcap). sinks: float32 (q_heads,), a logit
    per query head that joins the softmax without a value; or (num_layers, q_heads), or a list with an array or None per
    layer.
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
    ) -> None:
        if num_splits is not None and split_size is not None:
            raise ArgumentError(f"num_splits, split_size: got {num_splits}, {split_size}, expected at most one")
        self.cache, self.device = cache, cache.device
        self.num_splits, self.split_size = num_splits, split_size
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
                for buffer in rig.work_buffers:
                    buffer.close()
            for buffer in self._pool.values():
                buffer.close()
            self._recordings.clear()
            self._rigs.clear()
            self._pool.clear()
            self._frames.clear()

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
        sequences = [seq] if isinstance(seq, Sequence) else list(seq)
        columns = [q, k, v] if batch else [[q], None if k is None else [k], None if v is None else [v]]
        for name, column in zip("qkv", columns, strict=True):
            if column is not None and (not isinstance(column, (list, tuple)) or len(column) != len(sequences)):
                raise ArgumentError(f"{name}: expected a list of {len(sequences)} arrays, one per sequence")
        if (k is None) != (v is None):
            raise ArgumentError(f"{'v' if v is None else 'k'}: got None, expected both k and v, or neither")
        with self.cache.lock:
            outs, lses = self._run(sequences, columns, layer)
        if not batch:
            return (outs[0], lses[0]) if return_lse else outs[0]
        return (outs, lses) if return_lse else outs

    # --- a call -------------------------------------------------------------------------------------------

    def _run(self, sequences: list[Sequence], columns: list[Any], layer: int) -> tuple[list[F32], list[F32]]:
        cache = self.cache
        layer = cache.check_layer(layer)
        parts, q_max, k_max = [], 0.0, cache.max_k
        for i, sequence in enumerate(sequences):
            cache.check_sequence(sequence)
            q, largest = self._check_q(columns[0][i])
            q_max = max(q_max, largest)
            keys = values = None
            if columns[1] is not None:
                keys, values, largest = cache.check_rows(columns[1][i], columns[2][i])
                k_max = max(k_max, largest)
            parts.append(_Part(sequence, q, keys, values))
        check_score_bound(q_max, k_max, cache.shape.head_dim, self.scale)
        if not parts:
            return [], []
        held: list[Reservation] = []
        try:
            for part in parts:
                part.tokens = part.sequence.pages.lengths[layer]
                if part.keys is not None:
                    part.reservation = part.sequence.pages.reserve(layer, len(part.keys))
                    held.append(part.reservation)
                    part.tokens += len(part.keys)
                    cache.copy_pages(part.reservation.copies)
            outs, lses = self._attend(parts, layer)
            cache.max_k = k_max  # before the commit: an interrupt in between leaves it too large, not too small
            commit_all(held)
        finally:  # after a commit this does nothing
            for reservation in held:
                reservation.rollback()
        shapes = [np.shape(x) for x in columns[0]]
        return (
            [out.reshape(shape) for out, shape in zip(outs, shapes, strict=True)],
            [lse.reshape(shape[:-1]) for lse, shape in zip(lses, shapes, strict=True)],
        )

    def _check_q(self, q: Any) -> tuple[NDArray[Any], float]:
        array, shape = np.asarray(q), self.cache.shape
        want = (shape.q_heads, shape.head_dim)
        if array.ndim not in (2, 3) or array.shape[-2:] != want or array.shape[0] == 0:
            raise ShapeError(f"q: got shape {array.shape}, expected {want} or (q_len, {want[0]}, {want[1]})")
        if array.dtype not in (np.float32, np.float16):
            raise DTypeError(f"q: got dtype {array.dtype}, expected float32 or float16")
        values, largest = rows.checked_values("q", array)
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
        new = parts if parts[0].keys is not None else []
        if sum(len(part.keys) for part in new) > APPEND_ROWS:  # a prompt: in submissions of its own
            for part in new:
                assert part.reservation is not None
                encoded = rows.encode(part.keys, part.values, self.cache.dtype)
                self.cache.write_rows(part.sequence, layer, part.reservation, encoded)
            new = []
        blocks = self._blocks(parts, self.scorings[self.scoring_of[layer]].window)
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
            rig.holds, rig.tokens = key, ()
            if key:
                if len(self._frames) > 256:
                    self._frames.clear()
                self._frames[key] = _Frame(bucket, spans)
        n = sum(end - begin for _, begin, end in block)
        q = block[0][0].q[block[0][1] : block[0][2]]
        if len(block) > 1:
            q = np.concatenate([part.q[begin:end] for part, begin, end in block])
        runtime.write(rig.q, np.ascontiguousarray(q, np.float32).reshape(-1).view(np.uint32))
        if rig.rows is not None:
            at = 0
            for part in new:
                rows.encode_into(rig.row_words[at : at + len(part.keys)], part.keys, part.values, cache.dtype)
                at += len(part.keys)
            runtime.write(rig.rows, rig.row_words[:at].reshape(-1))
        if changed:
            for i, buffer in enumerate(rig.work_buffers):
                if len(rig.work_buffers) > 1:
                    cache.set_cache(rig.work, cache.layers[layer][i])
                runtime.write(buffer, rig.work.words)
            rig.tokens = tokens
        runtime.run(self._recording(bucket, rig, layer))
        words = runtime.read(rig.out).view(np.float32)
        size = bucket.rows * shape.q_heads * shape.head_dim
        out = words[:size].reshape(bucket.rows, shape.q_heads, shape.head_dim)[:n]
        lse = words[size : size + bucket.rows * shape.q_heads].reshape(bucket.rows, shape.q_heads)
        return out, lse[:n]

    def _fill(
        self, block: list[Block], new: list[_Part], fresh: bool, which: int, tables: dict[_Part, NDArray[np.uint32]]
    ) -> tuple[Bucket, tuple[slice, ...]]:
        """Fill the work words of the block's bucket; where each part's items lie."""
        window = self.scorings[which].window
        plans = [self._plan(part.tokens, len(part.q), window) for part, _, _ in block]
        direct = all(plan.states == 1 for plan, _, _ in plans)
        items, sizes = _items(block, plans, direct, window), [end - begin for _, begin, end in block]
        bucket = Bucket(
            "loop" if any(build == "loop" for _, _, build in plans) else "single",
            direct,
            fresh,
            _room(sum(map(len, items)), self.device.info.max_workgroups[0]),
            _room(sum(sizes), self.device.info.max_workgroups[2]),
            _room(sum(n * plan.states for n, (plan, _, _) in zip(sizes, plans, strict=True)), self._most_states()),
            power_of_two(sum(len(part.keys) for part in new)) if new else 0,
            power_of_two(sum(map(len, tables.values()))),
            which,
        )
        rig = self._rig(bucket)
        rig.holds = ()  # until the caller says what it holds
        return bucket, fill(rig, block, plans, items, new, bucket, window, tables)

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
            state_words = 0 if bucket.direct else bucket.states * shape.q_heads * (shape.head_dim + 2)
            out_words = bucket.rows * shape.q_heads * (shape.head_dim + 1)
            if host:
                states, out = buffer(state_words, Use.SCRATCH), buffer(out_words, Use.OUTPUT)
                q, new_rows = host
            else:  # calls wait for each other, so buckets can share
                states, out = (
                    self._shared("states", state_words, Use.SCRATCH),
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
        return _Rig(work, work_buffers, q, states, out, new_rows, row_words)

    def _shared(self, name: str, words: int, use: Use) -> Buffer:
        """A tensor of at least ``words`` words, at most a power of two, that every bucket of its size class uses."""
        size = _room(words, max(words, self.device.info.max_buffer_bytes // 4))
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
        capped = int(self.scorings[bucket.scoring].softcap is not None)
        spec = (shape.head_dim, shape.heads_per_workgroup, kernels.chunks_ahead(device.info.kind), cache.tile, capped)
        for shard, work in zip(cache.layers[layer], rig.work_buffers, strict=True):
            fresh: tuple[Buffer, ...] = ()
            if rig.rows is not None:
                kernel = device.kernel(APPEND_KERNEL, cache.append_spec())
                grid = (bucket.appends, shard.heads, 1)
                appends.append(Dispatch(kernel, (work, rig.rows, shard.k, shard.v), grid))
                fresh = (rig.rows,) if bucket.fresh else ()
            kernel = device.kernel(kernels.attend(bucket.build, cache.dtype, bucket.fresh), spec)
            buffers = (work, rig.q, shard.k, shard.v, target, target, *fresh)
            attends.append(Dispatch(kernel, buffers, (bucket.items, shard.heads, shape.head_chunks)))
        if not bucket.direct:
            grid = (-(-shape.head_dim // MERGE_DIMS), shape.q_heads, bucket.rows)
            kernel = device.kernel(MERGE, (shape.head_dim,))
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
        edges = [min((first + i * nodes // self.splits) * NODE * LEAF, part.tokens) for i in range(self.splits + 1)]
        plan = SplitPlan(part.tokens, shape, (begin, *edges[1:]), NODE, self.q_len, begin)
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
