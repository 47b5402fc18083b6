"""The time of a call with many query rows of one sequence: a prompt, or rows to verify, by either arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...kernels.tuning import LayoutFacts
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic, on_matrices
from ...planning.items import Indices
from ...planning.sharing import rows_pay
from ...planning.splits import SplitPlan, plan_splits
from ...planning.walks import walk_pays, walking_rows
from ...shapes import AttnShape
from .assumptions import L2_RATE
from .cards import Card
from .cascade import rows_together, submission_rows
from .matrix import RDNA4_UNITS, MatrixGroup
from .pass1 import Workgroup, dispatches_us
from .predict import Modeled, Prediction, merge_us, predict, written_bytes

SAMPLES: Final = 17  # submissions of a long call that are modeled; those between them lie on the line through two


@dataclass(frozen=True)
class RowsPrediction(Modeled):
    """A modeled call of the last ``rows`` rows of a sequence of ``context`` keys; each row sees the keys up to its own.

    arithmetic: "canonical" or "matrix", which "matrix-prefill" is one of. submissions: one after another, ``rows_each``
    rows in all but the last. pairs: of a query vector and a key that it sees.

    The fields before card are of all submissions together. computed: pairs that the kernel computes, with those of
    tiles and leaves that are not whole. matrix_us: the products at the full rate of the matrix units. memory_us: K and
    V at the read rate, once a submission. states_us: writing the partial states. again_us: keys that other workgroups
    have read before, from the L2. issue_us: of the busiest SIMD. waves_us: pass 1 if memory and L2 were infinitely
    wide. merge_us: pass 2 with the gap before it.
    """

    workgroups: int
    computed: float
    matrix_us: float
    memory_us: float
    states_us: float
    again_us: float
    issue_us: float
    waves_us: float
    pass1_us: float
    merge_us: float
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
    found = [call.terms(limits[begins[i] : begins[i] + each]) for i in picked]
    every = np.arange(whole)
    terms: dict[str, Any] = {
        name: float(np.interp(every, picked, [one[name] for one in found]).sum()) for name in found[0]
    }
    if whole < len(begins):
        terms = {name: terms[name] + last for name, last in call.terms(limits[begins[-1] :]).items()}
    terms["workgroups"] = round(terms["workgroups"])
    pairs = int(limits.sum()) * shape.q_heads
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
        total_us=terms["pass1_us"] + terms["merge_us"],
        flops=pairs * 2 * (shape.k_dim + shape.v_dim),
        **terms,
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


Dispatch = tuple[Workgroup | MatrixGroup, list[int]]  # the leaves of each of its workgroups


@dataclass(frozen=True)
class _Call:
    """All rows of a call. plan: of the whole call. by_matrix: whether matrix units attend them; walks: whether a
    workgroup attends all keys of its rows."""

    plan: SplitPlan
    card: Card
    dtype: str
    by_matrix: bool
    walks: bool = False

    def terms(self, limits: Indices) -> dict[str, Any]:
        """RowsPrediction's sums, of a submission of rows that see ``limits`` keys.

        Its dispatches move K, V and states from and to memory in proportion to their leaves.
        """
        shape, card = self.plan.shape, self.card
        token_bytes = shape.kv_bytes_per_token(self.dtype)
        kv_bytes = int(limits[-1]) * token_bytes
        written = self._of_states(limits, lambda plan: written_bytes(plan, kv_bytes, card))
        dispatches = [one for one in (self._on_matrices if self.by_matrix else self._canonical)(limits) if one[1]]
        total = sum(sum(sizes) for _, sizes in dispatches)
        spreads = [group.spread(sizes, (kv_bytes + written) * sum(sizes) / total) for group, sizes in dispatches]
        nbytes = total * KEYS_PER_LEAF * (token_bytes / shape.kv_heads)
        if self.walks:  # a node's state is merged into a total that the L2 holds
            nodes = sum(-(-size // LEAVES_PER_NODE) * group.vectors for group, sizes in dispatches for size in sizes)
            nbytes += 2 * 4 * nodes * shape.v_dim
        again_us = max(0.0, nbytes - kv_bytes) / L2_RATE / card.read_rate
        in_turn = max(one.leaves for one in spreads)
        products = sum(
            sum(sizes) * group.matrix * group.waves for group, sizes in dispatches if isinstance(group, MatrixGroup)
        )
        return {
            "workgroups": sum(len(sizes) for _, sizes in dispatches),
            "computed": sum(sum(sizes) * KEYS_PER_LEAF * group.vectors for group, sizes in dispatches),
            "matrix_us": products / card.all_simds / card.clock_ghz / 1e3,
            "memory_us": kv_bytes / card.read_rate,
            "states_us": written / card.read_rate,
            "again_us": again_us,
            "issue_us": sum(one.issue_us for one in spreads),
            "waves_us": sum(one.alone_us for one in spreads),
            "pass1_us": dispatches_us(spreads, again_us),
            "merge_us": self._of_states(limits, lambda plan: merge_us(plan, card, kv_bytes, in_turn)),
        }

    def _of_states(self, limits: Indices, of: Callable[[SplitPlan], float]) -> float:
        """``of`` a plan whose rows have as many states as those of ``limits`` have on average."""
        if self.plan.passes == 1 or self.walks:
            return 0.0
        mean = max(2.0, float(np.mean(-(-limits // KEYS_PER_NODE))))
        low, shape, rows = int(mean), self.plan.shape, len(limits)
        sizes = [n * KEYS_PER_NODE for n in (low, low + 1)]
        a, b = (of(SplitPlan.fixed(n, shape, split_size=KEYS_PER_NODE, q_len=rows)) for n in sizes)
        return a + (mean - low) * (b - a)

    def _on_matrices(self, limits: Indices) -> list[Dispatch]:
        """Workgroups of neighboring rows on one node, or on all; their leaves are those that the last row sees."""
        shape = self.plan.shape
        group = MatrixGroup.of(self.card, shape, len(limits))
        each = group.workgroup.rows(shape.group)
        leaves = -(-np.append(limits[each - 1 : -1 : each], limits[-1]) // KEYS_PER_LEAF)
        sizes = sorted(leaves.tolist(), reverse=True) if self.walks else _items(leaves)
        return [(group, sizes * (shape.kv_heads * group.workgroup.blocks(shape.group)))]

    def _canonical(self, limits: Indices) -> list[Dispatch]:
        """Rows side by side, or, where it pays, several rows to a workgroup on the nodes that all of them see whole."""
        shape, card, rows = self.plan.shape, self.card, len(limits)
        chunks = shape.kv_heads * shape.head_chunks
        alone, leaves = Workgroup.of(self.plan, card, self.dtype), -(-limits // KEYS_PER_LEAF)
        whole = limits // KEYS_PER_NODE
        device = LayoutFacts(card.compute_units, "discrete")
        each, pays = rows_together(rows, int(whole[0]) * KEYS_PER_NODE, shape, device)
        if not (pays and rows_pay(rows, shape.group * each, shape)):
            return [(alone, _items(leaves) * chunks)]
        groups = np.array([int((whole > node).sum()) for node in range(int(whole[-1]))])  # rows that see each node
        shared = [LEAVES_PER_NODE] * int((-(-groups // each)).sum()) * chunks
        rest = [int(n) for n in leaves - whole * LEAVES_PER_NODE if n] * chunks
        together = Workgroup(card, shape, shape.group * min(each, rows), "loop", self.dtype)
        return [(together, shared), (alone, rest)]


def _items(leaves: Indices) -> list[int]:
    """Leaves of the workgroups of rows, or blocks of rows, that see so many leaves: whole nodes, and what is left."""
    rest = leaves % LEAVES_PER_NODE
    return [LEAVES_PER_NODE] * int((leaves // LEAVES_PER_NODE).sum()) + [int(n) for n in rest if n]
