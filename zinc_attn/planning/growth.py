"""What sequences that grow by a step at a time will need: the recordings of every length up to a last one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..canonical.constants import KEYS_PER_LEAF
from .call import CallOptions, DeviceFacts, RecordingKey, Request, plan_call


def growth_keys(tokens: int, batch: int, q_len: int, options: CallOptions, facts: DeviceFacts) -> set[RecordingKey]:
    """The key of every submission of calls on ``batch`` sequences that share nothing and grow together to ``tokens``
    keys, ``q_len`` new rows a call. q_len: at most ``tokens``.

    Between two ends of leaves sizes only grow or only shrink, so where both ends need the same, all between them do.
    """
    found: set[RecordingKey] = set()

    def keys_at(length: int) -> list[RecordingKey]:
        pages = -(-length // facts.page_size)
        tables = np.arange(batch * pages, dtype=np.uint32).reshape(batch, pages)
        requests = [Request(q_len, length, q_len, table) for table in tables]
        keys = [submission.key for submission in plan_call(requests, options, facts).submissions]
        found.update(keys)
        return keys

    def search(begin: int, begin_keys: list[RecordingKey], end: int, end_keys: list[RecordingKey]) -> None:
        if begin_keys != end_keys and end - begin > 1:
            middle = (begin + end) // 2
            keys = keys_at(middle)
            search(begin, begin_keys, middle, keys)
            search(middle, keys, end, end_keys)

    edges = [q_len, *range(-(-q_len // KEYS_PER_LEAF) * KEYS_PER_LEAF, tokens, KEYS_PER_LEAF), tokens]
    keys_at(q_len)
    for begin, end in pairwise(edges):
        if begin < end:
            search(begin + 1, keys_at(begin + 1), end, keys_at(end))
    return found
