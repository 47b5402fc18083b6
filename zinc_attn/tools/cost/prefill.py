"""The time of a call with many query rows of one sequence: a prompt, or rows to verify, by either arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from typing import ClassVar, Final, NamedTuple

import numpy as np

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...kernels.tuning import LayoutFacts, shared_rows
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic, on_matrices
from ...planning.items import Indices
from ...planning.sharing import rows_pay
from ...planning.splits import SplitPlan, plan_splits, sharing_pays
from ...planning.walks import walk_pays, walking_rows
from ...shapes import AttnShape
from .cards import Card
from .cascade import submission_rows
from .matrix import RDNA4_UNITS, MatrixGroup
from .pass1 import KNEE, L2_RATE, START_US, Spread, Workgroup
from .predict import GAP_US, Modeled, Prediction, merge_us, predict, written_bytes

SAMPLES: Final = 17  # submissions of a long call that are modeled; those between them lie on the line through two


@dataclass(frozen=True)
class Terms:
    """Work and times of a submission, or of all of a call's.

    computed: pairs of a query vector and a key that the kernel computes, with those of tiles and leaves that are not
    whole. matrix_us: the products at the full rate of the matrix units. memory_us: K and V at the read rate, once a
    submission. states_us: writing the partial states. again_us: keys that other workgroups have read before, from the
    L2. issue_us: of the busiest SIMD. waves_us: pass 1 if memory and L2 were infinitely wide. merge_us: pass 2 with the
    gap before it.
    """

    workgroups: float
    computed: float
    matrix_us: float
    memory_us: float
    states_us: float
    again_us: float
    issue_us: float
    waves_us: float
    pass1_us: float
    merge_us: float


@dataclass(frozen=True)
class RowsPrediction(Terms, Modeled):
    """A modeled call of the last ``rows`` rows of a sequence of ``context`` keys; each row sees the keys up to its own.

    arithmetic: "canonical" or "matrix", which "matrix-prefill" is one of. submissions: one after another, ``rows_each``
    rows in all but the last. pairs: of a query vector and a key that it sees.
    """

    derived: ClassVar[tuple[str, ...]] = ("row_us", "tflops", "waste")

    card: str
    shape: str
    dtype: str
    arithmetic: str
    rows: int
    context: int
    submissions: int
    rows_each: int
    pairs: int
    total_us: float
    flops: int

    @property
    def row_us(self) -> float:
        """Time of a row."""
        return self.total_us / self.rows

    @property
    def tflops(self) -> float:
        """Products and sums that the result needs, over the whole time."""
        return self.flops / self.total_us / 1e6

    @property
    def waste(self) -> float:
        """Share of the computed pairs that no row sees."""
        return 1 - self.pairs / self.computed


def predict_rows(
    shape: AttnShape, card: Card, rows: int, context: int, dtype: str = "f16", arithmetic: Arithmetic = "canonical"
) -> RowsPrediction:
    """The time of ``rows`` rows at ``context`` keys on ``card``, cut into submissions as ``planning.call`` does.

    arithmetic: see ``Attention``.
    """
    check_int("context", context, 1, MAX_CONTEXT)
    check_int("rows", rows, 1, context)
    by_matrix = on_matrices(arithmetic_name(arithmetic), rows, shape)
    dtype = storage_dtype(dtype)
    if by_matrix and dtype != "f16":
        raise ArgumentError(
            f"dtype: got {dtype!r} with arithmetic 'matrix', expected 'f16': of others nothing is counted"
        )
    plan = plan_splits(context, shape, card.compute_units, dtype, rows)
    walks = by_matrix and walk_pays(plan, rows, RDNA4_UNITS, card.compute_units, "discrete")
    each = min(rows, submission_rows(plan, walks=walks))
    each = walking_rows(each, rows) if walks else each
    call = _Call(plan, card, dtype, by_matrix, walks)
    begins, limits = np.arange(0, rows, each), np.arange(context - rows + 1, context + 1)
    whole = rows // each
    picked = np.unique(np.linspace(0, whole - 1, min(whole, SAMPLES)).round().astype(int))
    found = np.array([astuple(call.terms(limits[begins[i] : begins[i] + each])) for i in picked])
    total = np.array([np.interp(np.arange(whole), picked, column).sum() for column in found.T])
    if whole < len(begins):
        total += np.array(astuple(call.terms(limits[begins[-1] :])))
    terms, pairs = Terms(*total.tolist()), int(limits.sum()) * shape.q_heads
    return RowsPrediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        arithmetic="matrix" if by_matrix else "canonical",
        rows=rows,
        context=context,
        submissions=len(begins),
        rows_each=each,
        pairs=pairs,
        total_us=terms.pass1_us + terms.merge_us,
        flops=pairs * 2 * (shape.k_dim + shape.v_dim),
        **asdict(terms) | {"workgroups": round(terms.workgroups)},
    )


def predict_call(plan: SplitPlan, card: Card, dtype: str = "f16") -> Prediction:
    """``predict``, but several rows in the split rule's layout, which may share keys, as ``predict_rows`` has them."""
    found = predict(plan, card, dtype)
    rule = plan_splits(plan.context_len, plan.shape, card.compute_units, dtype, plan.q_len)
    if plan.q_len == 1 or plan.q_len > plan.context_len or plan != rule:
        return found
    rows = predict_rows(plan.shape, card, plan.q_len, plan.context_len, dtype)
    names = "workgroups", "memory_us", "issue_us", "waves_us", "pass1_us", "merge_us", "total_us"
    return replace(found, partial_us=rows.states_us, **{name: getattr(rows, name) for name in names})


def matrix_from(shape: AttnShape, card: Card, context: int, dtype: str = "f16", most: int = 128) -> int | None:
    """The fewest rows at ``context`` keys that matrix units serve faster; None where more than ``most`` are needed."""
    for rows in range(1, min(most, context) + 1):
        call = shape, card, rows, context, dtype
        if predict_rows(*call, "matrix").total_us < predict_rows(*call).total_us:
            return rows
    return None


class _Work(NamedTuple):
    """Pass 1 of a submission. nbytes: of K and V, that all workgroups read; pairs: that they compute."""

    spreads: list[Spread]
    workgroups: int
    nbytes: float
    pairs: float
    matrix_us: float


@dataclass(frozen=True)
class _Call:
    """All rows of a call. plan: of the whole call. by_matrix: whether matrix units attend them; walks: whether a
    workgroup attends all keys of its rows."""

    plan: SplitPlan
    card: Card
    dtype: str
    by_matrix: bool
    walks: bool = False

    @property
    def _head_bytes(self) -> float:
        """Bytes of K and V of a key and KV head."""
        return self.plan.shape.kv_bytes_per_token(self.dtype) / self.plan.shape.kv_heads

    def terms(self, limits: Indices) -> Terms:
        """A submission of rows that see ``limits`` keys."""
        shape, card = self.plan.shape, self.card
        kv_bytes = int(limits[-1]) * shape.kv_bytes_per_token(self.dtype)
        states = -(-limits // KEYS_PER_NODE)
        written = self._of_states(limits, lambda plan: written_bytes(plan, kv_bytes, card))
        work = (self._on_matrices if self.by_matrix else self._canonical)(limits, kv_bytes + written)
        again_us = max(0.0, work.nbytes - kv_bytes) / L2_RATE / card.read_rate
        busy = sum(one.us for one in work.spreads)
        pass1 = START_US + GAP_US * (len(work.spreads) - 1) + (busy**KNEE + again_us**KNEE) ** (1 / KNEE)
        in_turn = max(one.leaves for one in work.spreads)
        merge = self._of_states(limits, lambda plan: merge_us(plan, card, kv_bytes, in_turn))
        return Terms(
            workgroups=work.workgroups,
            computed=work.pairs,
            matrix_us=work.matrix_us,
            memory_us=kv_bytes / card.read_rate,
            states_us=written / card.read_rate,
            again_us=again_us,
            issue_us=sum(one.issue_us for one in work.spreads),
            waves_us=sum(one.alone_us for one in work.spreads),
            pass1_us=pass1,
            merge_us=merge if not self.walks and (states.max() > 1 or self.plan.passes == 2) else 0.0,
        )

    def _of_states(self, limits: Indices, of: Callable[[SplitPlan], float]) -> float:
        """``of`` a plan whose rows have as many states as those of ``limits`` have on average."""
        if self.plan.passes == 1 or self.walks:
            return 0.0
        mean = max(2.0, float(np.mean(-(-limits // KEYS_PER_NODE))))
        low, shape, rows = int(mean), self.plan.shape, len(limits)
        sizes = [n * KEYS_PER_NODE for n in (low, low + 1)]
        a, b = (of(SplitPlan.fixed(n, shape, split_size=KEYS_PER_NODE, q_len=rows)) for n in sizes)
        return a + (mean - low) * (b - a)

    def _on_matrices(self, limits: Indices, moved: float) -> _Work:
        """Workgroups of neighboring rows on one node, or on all; their leaves are those that the last row sees.

        Where they walk, a node's state is merged into a total that the L2 holds.
        """
        shape, card = self.plan.shape, self.card
        group = MatrixGroup.of(card, shape, len(limits))
        each = group.workgroup.rows(shape.group)
        ends = np.append(limits[each - 1 : -1 : each], limits[-1])
        ends = -(-ends // KEYS_PER_LEAF)
        sizes = sorted(ends.tolist(), reverse=True) if self.walks else _items(ends)
        sizes *= shape.kv_heads * group.workgroup.blocks(shape.group)
        leaves = sum(sizes)
        matrix_us = leaves * group.matrix * group.waves / card.all_simds / card.clock_ghz / 1e3
        pairs = leaves * KEYS_PER_LEAF * group.workgroup.vectors
        nbytes = leaves * KEYS_PER_LEAF * self._head_bytes
        if self.walks:
            nodes = sum(-(-size // LEAVES_PER_NODE) for size in sizes)
            nbytes += 2 * 4 * nodes * group.workgroup.vectors * shape.v_dim
        return _Work([group.spread(sizes, moved)], len(sizes), nbytes, pairs, matrix_us)

    def _canonical(self, limits: Indices, moved: float) -> _Work:
        """Rows side by side, or, where it pays, several rows to a workgroup on the nodes that all of them see whole."""
        shape, card = self.plan.shape, self.card
        chunks, rows = shape.kv_heads * shape.head_chunks, len(limits)
        build = self.plan.build_on(LayoutFacts(card.compute_units), self.dtype)
        alone = Workgroup(card, shape, shape.heads_per_workgroup, build, self.dtype)
        leaves = -(-limits // KEYS_PER_LEAF)
        each = self._rows_each(limits)
        if each == 1:
            sizes = _items(leaves) * chunks
            return self._work([(alone, sizes)], moved)
        whole = limits // KEYS_PER_NODE
        groups = np.array([int((whole > node).sum()) for node in range(int(whole[-1]))])  # rows that see each node
        shared = [LEAVES_PER_NODE] * int((-(-groups // each)).sum()) * chunks
        rest = [int(n) for n in leaves - whole * LEAVES_PER_NODE if n] * chunks
        together = Workgroup(card, shape, shape.group * min(each, rows), "loop", self.dtype)
        return self._work([one for one in ((together, shared), (alone, rest)) if one[1]], moved)

    def _rows_each(self, limits: Indices) -> int:
        """Rows that a workgroup of the canonical kernels serves on whole nodes."""
        shape, rows = self.plan.shape, len(limits)
        each = min(shared_rows("discrete", shape), 1 << (rows - 1).bit_length())
        nodes = int(limits[0]) // KEYS_PER_NODE
        saved, items = (rows - -(-rows // each)) * nodes * LEAVES_PER_NODE, -(-rows // each) * nodes
        pays = sharing_pays(saved, items, shape, self.card.compute_units, "discrete")
        return each if each > 1 and pays and rows_pay(rows, shape.group * each, shape) else 1

    def _work(self, parts: list[tuple[Workgroup, list[int]]], moved: float) -> _Work:
        """Dispatches one after another, which move ``moved`` bytes from and to memory in proportion to their leaves."""
        total = max(sum(sum(sizes) for _, sizes in parts), 1)
        spreads = [group.spread(sizes, moved * sum(sizes) / total) for group, sizes in parts]
        pairs = sum(sum(sizes) * KEYS_PER_LEAF * group.vectors for group, sizes in parts)
        nbytes = total * KEYS_PER_LEAF * self._head_bytes
        return _Work(spreads, sum(len(sizes) for _, sizes in parts), nbytes, pairs, 0.0)


def _items(leaves: Indices) -> list[int]:
    """Leaves of the workgroups of rows, or blocks of rows, that see so many leaves: whole nodes, and what is left."""
    rest = leaves % LEAVES_PER_NODE
    return [LEAVES_PER_NODE] * int((leaves // LEAVES_PER_NODE).sum()) + [int(n) for n in rest if n]
