"""A batch of requests that share a prefix: how ``Attention`` cuts it, and its time with and without sharing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...checks import check_int
from ...kernels.tuning import SCRATCH_BYTES, LayoutFacts, shared_rows
from ...limits import MAX_CONTEXT
from ...planning.splits import SplitPlan, plan_splits, sharing_pays
from ...planning.walks import row_cost
from ...shapes import AttnShape
from .assumptions import CACHED_RATE, GAP_US, START_US
from .cards import Card
from .pass1 import Workgroup
from .predict import Modeled, merge_us, written_bytes

GRID: Final = 65535  # workgroups along an axis that every device takes


@dataclass(frozen=True)
class Cascade:
    """``requests`` sequences that share the pages of ``prefix`` keys and have ``suffix`` keys of their own, with one
    new row each, as ``Attention`` cuts the batch. cascade: as ``Attention`` takes it."""

    shape: AttnShape
    requests: int
    prefix: int
    suffix: int
    compute_units: int = 64
    dtype: str = "f16"
    kind: str = "discrete"
    page_size: int = 256
    cascade: bool | None = None

    def __post_init__(self) -> None:
        check_int("requests", self.requests, 1)
        check_int("prefix", self.prefix, 0, MAX_CONTEXT)
        check_int("suffix", self.suffix, 0, MAX_CONTEXT - self.prefix)

    @cached_property
    def plan(self) -> SplitPlan:
        """Of each request."""
        return plan_splits(self.prefix + self.suffix, self.shape, self.compute_units, self.dtype, 1, self.kind)

    @property
    def submissions(self) -> list[int]:
        """Requests of each submission; two submissions share nothing."""
        most = submission_rows(self.plan)
        return [min(most, self.requests - at) for at in range(0, self.requests, most)]

    def sharing(self, requests: int) -> tuple[int, int]:
        """(requests that a workgroup serves at a time, shared keys of each) of a submission; (1, 0) for none."""
        keys = self.prefix // self.page_size * self.page_size if self.suffix else self.prefix
        keys -= keys % self.plan.unit_keys
        if self.cascade is False or self.plan.states < 2 or not keys:
            return 1, 0
        device = LayoutFacts(self.compute_units, self.kind)
        rows, pays = rows_together(requests, keys, self.shape, device, self.plan.unit_keys, self.cascade is True)
        return (rows, keys) if pays or (self.cascade and rows > 1) else (1, 0)

    @property
    def keys_read(self) -> int:
        """Keys of one KV head that all workgroups read, as ``Attention.keys_read`` counts them."""
        total = 0
        for n in self.submissions:
            rows, shared = self.sharing(n)
            total += -(-n // rows) * shared + n * (self.plan.context_len - shared) * self.shape.head_chunks
        return total

    @property
    def alone(self) -> Cascade:
        """The same batch without sharing."""
        return replace(self, cascade=False)


def rows_together(
    rows: int, keys: int, shape: AttnShape, device: LayoutFacts, unit_keys: int = KEYS_PER_NODE, wherever: bool = False
) -> tuple[int, bool]:
    """(rows that a workgroup serves at a time on ``keys`` keys that ``rows`` rows share, whether sharing them pays).

    unit_keys: keys of a partial state, which are a workgroup's; wherever: also where a CPU gains nothing.
    """
    each = min(shared_rows(device.kind, shape, wherever), 1 << (rows - 1).bit_length())
    groups = -(-rows // each)
    saved, items = (rows - groups) * keys // KEYS_PER_LEAF, groups * keys // unit_keys
    return each, each > 1 and sharing_pays(saved, items, shape, device.compute_units, device.kind)


def submission_rows(plan: SplitPlan, *, walks: bool = False) -> int:
    """Rows laid out by ``plan``, or that walk, that a submission can have: its states and the grid hold them."""
    states = SCRATCH_BYTES // (4 * plan.shape.q_heads * (plan.shape.v_dim + 2))
    fitting = states // (row_cost(plan, states) if walks else max(plan.states, 1))
    return max(min(fitting, GRID if walks else GRID // plan.num_splits), 1)


@dataclass(frozen=True)
class CascadePrediction(Modeled):
    """A modeled decode call of requests that share a prefix, with sharing (total_us) and without (alone_us)."""

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
    shape: AttnShape, card: Card, requests: int, prefix: int, suffix: int, dtype: str = "f16"
) -> CascadePrediction:
    """The time of ``requests`` rows on ``card``: pass 1 of the shared keys, then of each request's own, then pass 2."""
    batch = Cascade(shape, requests, prefix, suffix, card.compute_units, dtype)
    return CascadePrediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        requests=requests,
        prefix=prefix,
        suffix=suffix,
        rows_each=batch.sharing(batch.submissions[0])[0],
        keys_read=batch.keys_read,
        keys_alone=batch.alone.keys_read,
        total_us=cascade_us(batch, card),
        alone_us=cascade_us(batch.alone, card),
    )


def cascade_us(batch: Cascade, card: Card) -> float:
    """The time of a batch's submissions on a GPU, one after another."""
    return sum(_submission_us(batch, n, card) for n in batch.submissions)


def _submission_us(batch: Cascade, n: int, card: Card) -> float:
    """``n`` requests: pass 1 of the shared keys, a gap, pass 1 of the others, pass 2.

    K and V that are read again come CACHED_RATE times faster where the caches hold the prefix and the states.
    Workgroups for the same shared keys lie side by side in the grid and always find them there.
    """
    plan, shape, prefix = replace(batch.plan, q_len=n), batch.shape, batch.prefix
    key_bytes, (rows, shared_keys) = shape.kv_bytes_per_token(batch.dtype), batch.sharing(n)
    shared, groups, leaves = shared_keys // KEYS_PER_LEAF, -(-n // rows), -(-plan.context_len // KEYS_PER_LEAF)
    own_keys = n * (plan.context_len - prefix)
    distinct = key_bytes * (prefix + own_keys)
    again = 1 / CACHED_RATE if key_bytes * prefix + plan.scratch_bytes <= card.cache_bytes else 1.0
    state_bytes = int(written_bytes(plan, distinct, card)) / max(n * leaves, 1)  # per leaf of a request
    work = []
    if shared:
        group = Workgroup(card, shape, shape.group * rows, "loop", batch.dtype)
        sizes = [LEAVES_PER_NODE] * (shared // LEAVES_PER_NODE * groups * shape.kv_heads)
        nbytes = key_bytes * shared_keys * (1 + (groups - 1) / CACHED_RATE) + state_bytes * shared * n
        work.append(group.spread(sizes, nbytes))
    ranges = [(max(a, shared), b) for a, b in plan.leaf_ranges()]
    if sizes := [b - a for a, b in ranges if b > a] * (n * shape.kv_heads * shape.head_chunks):
        nbytes = key_bytes * (own_keys + (prefix - shared_keys) * (1 + (n - 1) * again))
        own = Workgroup.of(batch.plan, card, batch.dtype)
        work.append(own.spread(sizes, nbytes + state_bytes * n * (leaves - shared)))
    time = START_US
    for i, one in enumerate(work):  # both write into one buffer of states, so a barrier lies between them
        time += GAP_US * (i > 0)
        time += one.us
    in_turn = max((one.leaves for one in work), default=0.0)
    return time + (merge_us(plan, card, distinct, in_turn) if plan.passes == 2 else 0.0)
