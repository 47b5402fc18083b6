"""A batch of requests that share a prefix: how ``Attention`` cuts it, and its time with and without sharing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final

from ...canonical.constants import KEYS_PER_LEAF
from ...checks import check_int
from ...kernels import declarations as kernels
from ...kernels.tuning import SCRATCH_BYTES, LayoutFacts, shared_rows
from ...limits import MAX_CONTEXT
from ...planning.splits import SplitPlan, plan_splits, sharing_pays
from ...planning.walks import row_cost
from ...shapes import AttnShape
from .cards import Card
from .pass1 import CACHED_RATE, START_US, Workgroup
from .predict import GAP_US, Modeled, merge_us, written_bytes

GRID: Final = 65535  # workgroups along an axis that every device takes


@dataclass(frozen=True)
class Cascade:
    """A batch of requests with one new row each, as ``Attention`` cuts it.

    plan: of each request. max_rows: requests that a workgroup can serve at a time on the shared keys. shared_keys: of
    each request, in whole pages and whole states. submissions: requests of each; two submissions share nothing. pays:
    see ``sharing_pays``.
    """

    plan: SplitPlan
    max_rows: int
    shared_keys: int
    submissions: tuple[int, ...]
    pays: Callable[[int, int], bool]

    def sharing(self, requests: int) -> tuple[int, int]:
        """(requests that a workgroup serves at a time, shared keys) of a submission; (1, 0) where nothing is shared."""
        rows = min(self.max_rows, 1 << (requests - 1).bit_length())
        groups = -(-requests // rows)
        saved, units = (requests - groups) * self.shared_keys // KEYS_PER_LEAF, self.shared_keys // self.plan.unit_keys
        return (rows, self.shared_keys) if rows > 1 and self.pays(saved, groups * units) else (1, 0)

    @property
    def keys_read(self) -> int:
        """Keys of one KV head that all workgroups read, as ``Attention.keys_read`` counts them."""
        total = 0
        for n in self.submissions:
            rows, shared = self.sharing(n)
            total += -(-n // rows) * shared + n * (self.plan.context_len - shared) * self.plan.shape.head_chunks
        return total

    @property
    def alone(self) -> Cascade:
        """The same batch without sharing."""
        return replace(self, max_rows=1)


def cascade_layout(
    shape: AttnShape,
    requests: int,
    prefix: int,
    suffix: int,
    compute_units: int = 64,
    dtype: str = "f16",
    kind: str = "discrete",
    page_size: int = 256,
) -> Cascade:
    """``requests`` sequences of prefix + suffix keys that share the pages of the prefix."""
    check_int("requests", requests, 1)
    check_int("prefix", prefix, 0, MAX_CONTEXT)
    check_int("suffix", suffix, 0, MAX_CONTEXT - prefix)
    plan = plan_splits(prefix + suffix, shape, compute_units, dtype, 1, kind)
    keys = prefix // page_size * page_size if suffix else prefix
    shared = keys // plan.unit_keys * plan.unit_keys
    max_rows = shared_rows(kind, shape) if plan.states > 1 and shared else 1
    most = submission_rows(plan)
    submissions = tuple(min(most, requests - at) for at in range(0, requests, most))
    pays = partial(sharing_pays, shape=shape, compute_units=compute_units, kind=kind)
    return Cascade(plan, max_rows, shared, submissions, pays)


def submission_rows(plan: SplitPlan, *, walks: bool = False) -> int:
    """Rows laid out by ``plan``, or that walk, that a submission can have: its states and the grid hold them."""
    states = SCRATCH_BYTES // (4 * plan.shape.q_heads * (plan.shape.v_dim + 2))
    fitting = states // (row_cost(plan, states) if walks else max(plan.states, 1))
    return max(min(fitting, GRID if walks else GRID // plan.num_splits), 1)


@dataclass(frozen=True)
class CascadePrediction(Modeled):
    """A modeled decode call of requests that share a prefix, with sharing (total_us) and without (alone_us)."""

    derived: ClassVar[tuple[str, ...]] = ("pays", "speed_up")

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
    found = cascade_layout(shape, requests, prefix, suffix, card.compute_units, dtype)
    return CascadePrediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        requests=requests,
        prefix=prefix,
        suffix=suffix,
        rows_each=found.sharing(found.submissions[0])[0],
        keys_read=found.keys_read,
        keys_alone=found.alone.keys_read,
        total_us=cascade_us(found, prefix, card, dtype),
        alone_us=cascade_us(found.alone, prefix, card, dtype),
    )


def cascade_us(batch: Cascade, prefix: int, card: Card, dtype: str) -> float:
    """The time of a batch's submissions, one after another."""
    return sum(_submission_us(batch, n, prefix, card, dtype) for n in batch.submissions)


def _submission_us(batch: Cascade, n: int, prefix: int, card: Card, dtype: str) -> float:
    """``n`` requests: pass 1 of the shared keys, a gap, pass 1 of the others, pass 2.

    K and V that are read again come CACHED_RATE times faster where the caches hold the prefix and the states.
    Workgroups for the same shared keys lie side by side in the grid and always find them there.
    """
    plan, shape, key_bytes = replace(batch.plan, q_len=n), batch.plan.shape, batch.plan.shape.kv_bytes_per_token(dtype)
    rows, shared_keys = batch.sharing(n)
    shared, groups, leaves = shared_keys // KEYS_PER_LEAF, -(-n // rows), -(-plan.context_len // KEYS_PER_LEAF)
    own_keys = n * (plan.context_len - prefix)
    distinct = key_bytes * (prefix + own_keys)
    again = 1 / CACHED_RATE if key_bytes * prefix + plan.scratch_bytes <= card.cache_bytes else 1.0
    state_bytes = int(written_bytes(plan, distinct, card)) / max(n * leaves, 1)  # per leaf of a request
    work = []
    if shared:
        build: kernels.Build = "single" if plan.leaves_per_state == 1 else "loop"
        group = Workgroup(card, shape, shape.group * rows, build, dtype)
        sizes = [plan.leaves_per_state] * (shared // plan.leaves_per_state * groups * shape.kv_heads)
        nbytes = key_bytes * shared_keys * (1 + (groups - 1) / CACHED_RATE) + state_bytes * shared * n
        work.append(group.spread(sizes, nbytes))
    ranges = [(max(a, shared), b) for a, b in plan.leaf_ranges()]
    if sizes := [b - a for a, b in ranges if b > a] * (n * shape.kv_heads * shape.head_chunks):
        group = Workgroup(
            card, shape, shape.heads_per_workgroup, batch.plan.build_on(LayoutFacts(card.compute_units), dtype), dtype
        )
        nbytes = key_bytes * (own_keys + (prefix - shared_keys) * (1 + (n - 1) * again))
        work.append(group.spread(sizes, nbytes + state_bytes * n * (leaves - shared)))
    time = START_US
    for i, one in enumerate(work):  # both write into one buffer of states, so a barrier lies between them
        time += GAP_US * (i > 0)
        time += one.us
    in_turn = max((one.leaves for one in work), default=0.0)
    return time + (merge_us(plan, card, distinct, in_turn) if plan.passes == 2 else 0.0)
