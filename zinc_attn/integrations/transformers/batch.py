"""The batch rows of a ZincCache: a Sequence for each row and layer shape, and which columns are padding."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from ...cache.sequence import Sequence
from ...canonical.state import F32
from ...checks import check_int
from ...decode.attention import Attention
from ...errors import ArgumentError, ShapeError, UnsupportedError
from ...shapes import AttnShape
from .dense_masks import RowMasks
from .groups import LayerGroup
from .masks import Columns
from .tensors import host_array


class BatchRows:
    """The rows of a batch, and the columns that they have seen. A Sequence holds a row's tokens without its padding."""

    def __init__(self) -> None:
        self.sequences: dict[AttnShape, list[Sequence]] = {}  # of each row
        self.kept: Columns | None = None  # (rows, columns), False at padding; None while there is no padding
        self.columns = 0  # of the layer that has seen most
        # the row that each row was when a step began; None: all are where they were
        self.origin: list[int] | None = None

    @property
    def size(self) -> int:
        """The number of rows, -1 before the first forward."""
        return len(next(iter(self.sequences.values()))) if self.sequences else -1

    def start(self, groups: Iterable[LayerGroup], rows: int) -> None:
        for group in groups:
            self.sequences[group.shape] = [group.kv_cache.new_sequence() for _ in range(rows)]

    def check_size(self, rows: int, max_batch: int) -> None:
        """Refuse more rows than there is memory for, or another number than the tokens in the cache have."""
        if rows > max_batch:
            raise ArgumentError(
                f"batch: got {rows} rows (times beams), expected at most max_batch = {max_batch}; make the "
                "ZincCache with a larger max_batch"
            )
        if self.columns and self.size != rows:
            raise ShapeError(f"batch: got {rows} rows, expected the {self.size} that the cache holds; reset() it first")

    def with_padding(self, new: Columns, columns: int) -> Columns | None:
        """The columns of ``columns`` that are tokens; the last are new unless a layer has seen all of them.

        new: (rows, n), False where the new token is padding. None where all columns are tokens.
        """
        fresh = columns - self.columns
        if fresh <= 0:
            return None if self.kept is None else self.kept[:, :columns]
        before = np.ones((len(new), self.columns), np.bool_) if self.kept is None else self.kept
        kept = np.concatenate([before, new[:, new.shape[1] - fresh :]], axis=1)
        return None if kept.all() else kept

    def check_padding(self, kept: Columns | None, rows: int, columns: int) -> Columns | None:
        """Return which of ``columns`` columns are tokens, (rows, columns), or None where all are.

        kept: by the mask. UnsupportedError: it changes a column that an earlier call has stored or dropped.
        """
        if kept is not None and kept.shape != (rows, columns):
            raise ShapeError(f"attention_mask: got shape {kept.shape}, expected ({rows}, {columns})")
        if kept is self.kept:
            return kept
        stated = np.ones((rows, columns), np.bool_) if kept is None else kept
        known = np.ones((rows, self.columns), np.bool_) if self.kept is None else self.kept
        both = min(columns, self.columns)
        if not np.array_equal(stated[:, :both], known[:, :both]):
            raise UnsupportedError(
                "attention_mask: got another padding for tokens that the cache has seen already, expected the same "
                "columns as before; pass the whole 2-D mask with every forward, or reset() the cache"
            )
        return kept

    def advance(self, columns: int, kept: Columns | None) -> None:
        """A layer has seen ``columns`` columns; the first layer of a step brings their padding."""
        if columns > self.columns:
            self.columns, self.kept = columns, kept

    def truncate(self, columns: int) -> None:
        for sequences in self.sequences.values():
            for i, sequence in enumerate(sequences):
                sequence.truncate(columns if self.kept is None else int(self.kept[i, :columns].sum()))
        if self.kept is not None:
            kept = self.kept[:, :columns]
            self.kept = None if kept.all() else kept
        self.columns = columns

    def free(self) -> None:
        """Give back the pages of all rows."""
        for sequences in self.sequences.values():
            for sequence in sequences:
                sequence.free()
        self.sequences.clear()

    def select(self, name: str, rows: list[int], max_batch: int) -> bool:
        """Row i becomes what row rows[i] was. Returns False where there is nothing to do.

        A row selected again is a fork; a failed fork changes nothing. ArgumentError of ``name``: no row, or too many.
        """
        if not self.sequences or rows == list(range(self.size)):
            return False
        for i in rows:
            check_int(name, i, 0, self.size - 1)
        if not 1 <= len(rows) <= max_batch:
            raise ArgumentError(f"batch: got {len(rows)} rows, expected 1 to max_batch = {max_batch}")
        with ExitStack() as undo:
            chosen = {
                shape: [_forked(each[row], undo) if row in rows[:i] else each[row] for i, row in enumerate(rows)]
                for shape, each in self.sequences.items()
            }
            undo.pop_all()
        self.origin = [row if self.origin is None else self.origin[row] for row in rows]  # first: from here on no step
        old, self.sequences = self.sequences, chosen  # can be rolled back
        if self.kept is not None:
            self.kept = self.kept[rows]
        for sequences in old.values():
            for i, sequence in enumerate(sequences):
                if i not in rows:
                    sequence.free()
        return True

    def moved(self) -> bool:
        """Whether a row is not where it was when the step began."""
        return self.origin not in (None, list(range(self.size)))

    def fork(self) -> BatchRows:
        """Return rows with the same tokens, which share full pages with these. Where one fork fails, none is left."""
        twin = BatchRows()
        twin.kept, twin.columns = self.kept, self.columns
        with ExitStack() as undo:
            items = self.sequences.items()
            twin.sequences = {shape: [_forked(sequence, undo) for sequence in rows] for shape, rows in items}
            undo.pop_all()
        return twin


def _forked(sequence: Sequence, undo: ExitStack) -> Sequence:
    """Return a fork of ``sequence``, which ``undo`` frees when it is closed."""
    fork = sequence.fork()
    undo.callback(fork.free)
    return fork


def append_and_attend(
    attend: Attention,
    layer: int,
    sequences: list[Sequence],
    query: Any,
    new: tuple[Any, Any | None] | None,
    kept: Columns | None,
    dense: RowMasks | None = None,
) -> F32:
    """Append ``new`` keys and values and attend, in one submission for the batch: (batch, q_len, q_heads, v_head_dim).

    new: of a latent shape k alone, and None. layer: the index in the KVCache; kept: (batch, q_len), False at padding,
    whose output is 0; None: there is none. dense: in place of the causal rule; rows that see no key have output 0.
    """
    q = host_array(query)
    k, v = (None if x is None else host_array(x) for x in new or (None, None))
    out = np.zeros((*q.shape[:3], attend.cache.shape.v_head_dim), np.float32)
    live = list(range(len(q))) if kept is None else [i for i, columns in enumerate(kept) if columns.any()]
    options: dict[str, Any] = {}
    if dense is not None:
        options = {"causal": dense.causal, "allow_empty": True}
        if any(mask is not None for mask in dense.masks):
            options["mask"] = [dense.masks[i] for i in live]
    if kept is None:
        ks, vs = (None if x is None else list(x) for x in (k, v))
        attend(list(q), sequences, layer, ks, vs, out=list(out), **options)
        return out
    ks, vs = (None if x is None else [x[i][kept[i]] for i in live] for x in (k, v))
    outs = attend([q[i][kept[i]] for i in live], [sequences[i] for i in live], layer, ks, vs, **options)
    for i, rows in zip(live, outs, strict=True):
        out[i, kept[i]] = rows
    return out
