"""The time of calls that the planner cuts: several query rows of a sequence, or requests that share a prefix."""

from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...checks import check_int
from ...dtypes import storage_dtype
from ...kernels.records import Records
from ...kernels.tuning import heads_together
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic
from ...planning.call import cut_call
from ...planning.inputs import CallFacts, CallOptions, Request
from ...planning.layouts import split_rule_layouts
from ...planning.splits import SplitPlan, plan_splits
from ...planning.submission import Submission
from ...shapes import AttnShape
from .assumptions import CACHED_RATE
from .cards import RDNA4, Card
from .pass1 import UnitsWorkgroup, Workgroup, dispatches_us
from .predict import Prediction, States, Terms, Work, merge_us, predict, submission_terms, written_bytes

PAGE: Final = 256  # keys
SAMPLES: Final = 17  # modeled submissions of a long call, before the last; the others are interpolated


class PlannedCall:
    """The submissions of a call by the split rule on a GPU of a card's compute units; ``cut``: the rows of each."""

    def __init__(
        self,
        shape: AttnShape,
        card: Card,
        dtype: str,
        requests: Sequence[Request],
        cascade: bool | None = None,
        arithmetic: Arithmetic = "canonical",
    ) -> None:
        self.shape, self.card, self.dtype, self.arithmetic = shape, card, dtype, arithmetic
        facts = CallFacts(card.info, shape, PAGE, units=card.family is RDNA4)
        layouts = split_rule_layouts(shape, card.compute_units)
        self._planner, self.cut = cut_call(requests, CallOptions(layouts, None, cascade, arithmetic=arithmetic), facts)

    def submission(self, index: int) -> Submission:
        return self._planner.plan(self.cut[index], ())

    def dispatches(self, submission: Submission) -> Work:
        """The dispatches of pass 1: first the keys that rows share, if there are any, then the others."""
        shape, key, work = self.shape, submission.key, list[tuple[Workgroup, list[int]]]()
        if len(submission.shared_items):
            together = Workgroup(self.card, shape, shape.group * key.shared_rows, self.dtype, self.arithmetic)
            work.append((together, _leaves(submission.shared_items) * shape.kv_heads))
        if key.matrix is not None:
            vectors, size, blocks = key.matrix.vectors, key.matrix.size, key.matrix.blocks(shape.group)
            units = UnitsWorkgroup(self.card, shape, vectors, self.dtype, self.arithmetic, size)
            work.append((units, _leaves(submission.items) * (shape.kv_heads * blocks)))
        elif len(submission.items):
            heads = heads_together(shape, key.most_heads)
            alone = Workgroup(self.card, shape, heads, self.dtype, self.arithmetic)
            work.append((alone, _leaves(submission.items) * (shape.kv_heads * alone.chunks)))
        return work

    def states(self, submission: Submission) -> States:
        """The states of plans whose numbers of states lie on either side of the mean over the rows."""
        if submission.key.single_pass:
            return []
        mean = max(2.0, float(submission.rows["count"].mean()))
        fixed = partial(SplitPlan.fixed, shape=self.shape, split_size=KEYS_PER_NODE, q_len=len(submission.rows))
        low, above = int(mean) * KEYS_PER_NODE, mean % 1
        return [(1 - above, fixed(low)), *([(above, fixed(low + KEYS_PER_NODE))] if above else ())]


def _leaves(items: Records) -> list[int]:
    """Leaves of each item that a row sees a key of."""
    begin = np.maximum(items["node_begin"] * LEAVES_PER_NODE, items["first"] // KEYS_PER_LEAF)
    end = np.minimum(items["node_end"] * LEAVES_PER_NODE, -(-items["limit"].astype(np.int64) // KEYS_PER_LEAF))
    leaves: list[int] = (end - begin).tolist()
    return leaves


def predict_rows(
    shape: AttnShape, card: Card, rows: int, context: int, dtype: str = "f16", arithmetic: Arithmetic = "canonical"
) -> Prediction:
    """The time of the last ``rows`` rows of ``context`` keys on ``card``; each row sees the keys up to its own."""
    check_int("context", context, 1, MAX_CONTEXT)
    check_int("rows", rows, 1, context)
    dtype = storage_dtype(dtype)
    request = Request(rows, context, 0, np.arange(-(-context // PAGE), dtype=np.uint32))
    call = PlannedCall(shape, card, dtype, [request], arithmetic=arithmetic)
    last = len(call.cut) - 1
    picked = np.unique([*np.linspace(0, max(last - 1, 0), min(max(last, 1), SAMPLES)).round(), last]).astype(int)
    sampled = np.array([astuple(_rows_terms(call, index, context - rows)) for index in picked])
    terms = Terms(*(float(np.interp(range(last + 1), picked, values).sum()) for values in sampled.T))
    plan = plan_splits(context, shape, card.compute_units, rows)
    return Prediction.of(plan, card, dtype, terms, last + 1)


def _rows_terms(call: PlannedCall, index: int, before: int) -> Terms:
    """The terms of one submission. before: keys that the sequence has before the call's first row."""
    submission = call.submission(index)
    kv_bytes = (before + call.cut[index][-1].end) * call.shape.kv_bytes_per_token(call.dtype)
    return submission_terms(call.dispatches(submission), call.states(submission), call.card, call.dtype, kv_bytes)


def predict_call(plan: SplitPlan, card: Card, dtype: str = "f16", arithmetic: Arithmetic = "canonical") -> Prediction:
    """``predict``, but several rows in the split rule's layout, which may share keys, as ``predict_rows`` has them."""
    rule = plan_splits(plan.context_len, plan.shape, card.compute_units, plan.q_len)
    if plan.q_len == 1 or plan.q_len > plan.context_len or plan != rule:
        return predict(plan, card, dtype, arithmetic)
    return predict_rows(plan.shape, card, plan.q_len, plan.context_len, dtype, arithmetic)


def predict_requests(
    shape: AttnShape,
    card: Card,
    requests: int,
    prefix: int,
    suffix: int,
    dtype: str = "f16",
    cascade: bool | None = None,
    arithmetic: Arithmetic = "canonical",
) -> float:
    """µs of a decode call of ``requests`` sequences with one row each, which share the pages of ``prefix`` keys.

    suffix: keys of a sequence's own. cascade: as ``Attention`` takes it.
    """
    check_int("suffix", suffix, 0, MAX_CONTEXT - prefix)
    whole, pages = prefix // PAGE if suffix else -(-prefix // PAGE), -(-(prefix + suffix) // PAGE)
    tables = np.tile(np.arange(pages, dtype=np.uint32), (requests, 1))
    tables[:, whole:] += pages * np.arange(requests, dtype=np.uint32)[:, None]
    call = PlannedCall(
        shape, card, dtype, [Request(1, prefix + suffix, 0, table) for table in tables], cascade, arithmetic
    )
    return sum(_requests_us(call, call.submission(index), prefix, suffix) for index in range(len(call.cut)))


def _requests_us(call: PlannedCall, submission: Submission, prefix: int, suffix: int) -> float:
    """Pass 1 of the shared keys, a gap, pass 1 of the others, pass 2.

    K and V that are read again come CACHED_RATE times faster where the caches hold the prefix and the states.
    Workgroups for the same shared keys lie side by side in the grid and always find them there.
    """
    card, n, key_bytes = call.card, len(submission.rows), call.shape.kv_bytes_per_token(call.dtype)
    begins: NDArray[np.uint32] = submission.shared_items["node_begin"]
    nodes = len(np.unique(begins))
    shared, groups = nodes * KEYS_PER_NODE, len(begins) // max(nodes, 1)
    distinct = key_bytes * (prefix + n * suffix)
    states = call.states(submission)
    state_bytes = written_bytes(states, distinct, card)
    held = key_bytes * prefix + sum(weight * plan.scratch_bytes for weight, plan in states) <= card.cache_bytes
    again = 1 / CACHED_RATE if held else 1.0
    share = nodes * LEAVES_PER_NODE / -(-(prefix + suffix) // KEYS_PER_LEAF)  # of the leaves, and so of the states
    moved = [key_bytes * (n * suffix + (prefix - shared) * (1 + (n - 1) * again)) + state_bytes * (1 - share)]
    if nodes:
        moved.insert(0, key_bytes * shared * (1 + (groups - 1) / CACHED_RATE) + state_bytes * share)
    spreads = [
        group.spread(sizes, nbytes) for (group, sizes), nbytes in zip(call.dispatches(submission), moved, strict=False)
    ]
    return dispatches_us(spreads, 0.0) + merge_us(states, card, distinct, max(spread.leaves for spread in spreads))
