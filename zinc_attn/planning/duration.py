"""How long a submission may take: a second, at a rate that every compute unit of a GPU reaches.

A driver resets the device where a submission does not end within seconds (AMD's and Windows' after two to ten). No
clock is asked: the work of a submission is counted, in products of q and K and of weights and V. ``zinc-attn plan``
prints the work and the bound. A CPU device has no such driver, and no bound.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from ..kernels.matrix import MATRIX_GAIN
from .inputs import CallFacts, SplitLayout
from .items import item_keys
from .padding import padded
from .submission import Submission

UNIT_WORK: Final = 1 << 35  # products of a compute unit in a second; the model says 2.5 to 6 times as many of an R9700
ROOM: Final = 4  # the total of a row without splits counts as at least so many states, so that q and out stay small


def key_work(facts: CallFacts) -> int:
    """Products of a query row, over all heads, with a key and its value."""
    return facts.shape.q_heads * (facts.shape.k_dim + facts.shape.v_dim)


def work_bound(facts: CallFacts, by_matrix: bool = False) -> int | None:
    """Products of a submission at most, None for any number."""
    if facts.device.kind == "cpu":
        return None
    return UNIT_WORK * facts.device.compute_units * (MATRIX_GAIN if by_matrix else 1)


def row_cost(layout: SplitLayout, facts: CallFacts, by_matrix: bool) -> int:
    """The part of a submission's ``max_states`` that a query row takes: its states, or more where its part of the work
    is larger. A row without splits takes room for its total and for q."""
    plan, shape, bound = layout.plan, facts.shape, work_bound(facts, by_matrix)
    states = ROOM * -(-shape.k_dim // (shape.v_dim + 2)) if layout.whole_context else max(plan.states, 1)
    work = (plan.context_len - plan.begin) * key_work(facts)
    return states if bound is None else max(states, -(-facts.max_states * work // bound))


def in_parts(submission: Submission, facts: CallFacts) -> list[Submission]:
    """The submission; or several, each with some of the nodes, if its single row has too much work for one.

    The first appends; the last merges the states of all.
    """
    bound, keys = work_bound(facts, submission.key.matrix is not None), item_keys(submission.items)
    if bound is None or len(submission.rows) > 1 or keys * key_work(facts) <= bound:
        return [submission]
    counts = submission.items["node_end"] - submission.items["node_begin"]
    nodes = np.repeat(submission.items, counts)
    nodes["node_begin"] += np.concatenate([np.arange(count, dtype=np.uint32) for count in counts])
    nodes["node_end"] = nodes["node_begin"] + 1
    parts = np.array_split(nodes, min(-(-keys * key_work(facts) // bound), len(nodes)))
    key = submission.key._replace(items=padded(len(parts[0]), facts.device.max_items), walks=False)
    submissions = [replace(submission, key=key, items=part, spans=(slice(0, len(part)),)) for part in parts]
    later = key._replace(appends=0)
    submissions[1:] = [replace(part, key=later, uploads=(), appends=submission.appends[:0]) for part in submissions[1:]]
    submissions[:-1] = [replace(part, key=part.key._replace(unmerged=True)) for part in submissions[:-1]]
    return submissions
