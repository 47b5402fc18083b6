"""A batch of requests that share a prefix: its time with and without sharing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...checks import check_int
from ...limits import MAX_CONTEXT
from ...planning.inputs import Request
from ...shapes import AttnShape
from .assumptions import CACHED_RATE
from .cards import Card
from .pass1 import dispatches_us
from .planned import PAGE, PlannedCall, PlannedSubmission
from .predict import Modeled, merge_us, written_bytes


@dataclass(frozen=True)
class CascadePrediction(Modeled):
    """A modeled decode call of ``requests`` sequences that share the pages of ``prefix`` keys and have ``suffix`` keys
    of their own, with one row each.

    rows_each: requests that a workgroup serves at a time on the shared keys; 1: none are shared. keys_read: of one KV
    head, by all workgroups. keys_alone, alone_us: without sharing.
    """

    card: str
    shape: str
    dtype: str
    requests: int
    prefix: int
    suffix: int
    rows_each: int
    keys_read: int
    keys_alone: int
    total_us: float
    alone_us: float

    @property
    def pays(self) -> bool:
        """Whether sharing takes less time."""
        return self.total_us < self.alone_us

    @property
    def speed_up(self) -> float:
        """Time without sharing over time with it."""
        return self.alone_us / self.total_us


def predict_cascade(
    shape: AttnShape,
    card: Card,
    requests: int,
    prefix: int,
    suffix: int,
    dtype: str = "f16",
    cascade: bool | None = None,
) -> CascadePrediction:
    """The time of ``requests`` rows on ``card``. cascade: as ``Attention`` takes it."""
    check_int("suffix", suffix, 0, MAX_CONTEXT - prefix)
    whole, pages = prefix // PAGE if suffix else -(-prefix // PAGE), -(-(prefix + suffix) // PAGE)
    tables = np.tile(np.arange(pages, dtype=np.uint32), (requests, 1))
    tables[:, whole:] += pages * np.arange(requests, dtype=np.uint32)[:, None]
    batch = [Request(1, prefix + suffix, 0, table) for table in tables]
    shared, alone = (
        [call.submission(at) for at in range(len(call.cut))]
        for call in (PlannedCall.of(shape, card, dtype, batch, how) for how in (cascade, False))
    )
    return CascadePrediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        requests=requests,
        prefix=prefix,
        suffix=suffix,
        rows_each=shared[0].made.key.shared_rows,
        keys_read=sum(one.keys_read for one in shared),
        keys_alone=sum(one.keys_read for one in alone),
        total_us=sum(_submission_us(one, prefix, suffix, card, dtype) for one in shared),
        alone_us=sum(_submission_us(one, prefix, suffix, card, dtype) for one in alone),
    )


def _submission_us(one: PlannedSubmission, prefix: int, suffix: int, card: Card, dtype: str) -> float:
    """Pass 1 of the shared keys, a gap, pass 1 of the others, pass 2.

    K and V that are read again come CACHED_RATE times faster where the caches hold the prefix and the states.
    Workgroups for the same shared keys lie side by side in the grid and always find them there.
    """
    n, key_bytes = len(one.made.rows), one.shape.kv_bytes_per_token(dtype)
    begins = one.made.shared_items["leaf_begin"]
    nodes = len(np.unique(begins))
    shared, groups = nodes * KEYS_PER_NODE, len(begins) // max(nodes, 1)
    distinct = key_bytes * (prefix + n * suffix)
    written = one.of_states(lambda plan: written_bytes(plan, distinct, card))
    held = key_bytes * prefix + one.of_states(lambda plan: plan.scratch_bytes) <= card.cache_bytes
    again = 1 / CACHED_RATE if held else 1.0
    share = nodes * LEAVES_PER_NODE / -(-(prefix + suffix) // KEYS_PER_LEAF)  # of the leaves, and so of the states
    moved = [key_bytes * (n * suffix + (prefix - shared) * (1 + (n - 1) * again)) + written * (1 - share)]
    if nodes:
        moved.insert(0, key_bytes * shared * (1 + (groups - 1) / CACHED_RATE) + written * share)
    work = [group.spread(sizes, nbytes) for (group, sizes), nbytes in zip(one.dispatches, moved, strict=False)]
    in_turn = max(spread.leaves for spread in work)
    return dispatches_us(work, 0.0) + one.of_states(lambda plan: merge_us(plan, card, distinct, in_turn))
