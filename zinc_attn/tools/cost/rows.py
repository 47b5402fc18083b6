"""The time of a call with many query rows of one sequence: a prompt, or rows to verify, by either arithmetic."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import numpy as np

from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic, on_matrices
from ...planning.inputs import Request
from ...planning.splits import SplitPlan, plan_splits
from ...shapes import AttnShape
from .cards import Card
from .planned import PAGE, PlannedCall
from .predict import Prediction, Terms, predict, submission_terms

SAMPLES: Final = 17  # submissions of a long call that are modeled beside the last; between them lies a line


def predict_rows(
    shape: AttnShape, card: Card, rows: int, context: int, dtype: str = "f16", arithmetic: Arithmetic = "canonical"
) -> Prediction:
    """The time of the last ``rows`` rows of ``context`` keys on ``card``; each row sees the keys up to its own.

    arithmetic: as ``Attention`` takes it. ArgumentError for what the model has no counts of.
    """
    check_int("context", context, 1, MAX_CONTEXT)
    check_int("rows", rows, 1, context)
    by_matrix = on_matrices(arithmetic_name(arithmetic), rows, shape)
    dtype = storage_dtype(dtype)
    if by_matrix and dtype != "f16":
        raise ArgumentError(
            f"dtype: got {dtype!r} with arithmetic 'matrix', expected 'f16': of others nothing is counted"
        )
    request = Request(rows, context, 0, np.arange(-(-context // PAGE), dtype=np.uint32))
    call = PlannedCall.of(shape, card, dtype, [request], None, arithmetic)
    last = len(call.cut) - 1
    picked = np.unique([*np.linspace(0, max(last - 1, 0), min(max(last, 1), SAMPLES)).round(), last]).astype(int)
    found = []
    for at in picked:
        one, keys = call.submission(at), context - rows + call.cut[at][-1].end
        kv_bytes = keys * shape.kv_bytes_per_token(dtype)
        found.append(asdict(submission_terms(one.dispatches, card, dtype, kv_bytes, one.of_states, one.made.key.walks)))
    every = range(last + 1)
    terms = {name: float(np.interp(every, picked, [one[name] for one in found]).sum()) for name in found[0]}
    plan = plan_splits(context, shape, card.compute_units, dtype, rows)
    return Prediction.of(plan, card, dtype, Terms(**terms), last + 1, "matrix" if by_matrix else "canonical")


def predict_call(plan: SplitPlan, card: Card, dtype: str = "f16") -> Prediction:
    """``predict``, but several rows in the split rule's layout, which may share keys, as ``predict_rows`` has them."""
    rule = plan_splits(plan.context_len, plan.shape, card.compute_units, dtype, plan.q_len)
    if plan.q_len == 1 or plan.q_len > plan.context_len or plan != rule:
        return predict(plan, card, dtype)
    return predict_rows(plan.shape, card, plan.q_len, plan.context_len, dtype)
