"""Page tables: what they refuse, in whole sentences, and that a refusal loses no page."""

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from page_tables import Append, append, check_counts, state

from zinc_attn.cache.pages import CapacityError, PagePool, StepError
from zinc_attn.cache.sequence import check_kept
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction
from zinc_attn.errors import ArgumentError, ClosedError, LimitError, ZincAttnError

AHEAD = (
    "layer 0: got 1 tokens at length 9, expected none yet, layer 1 has length 7; append 2 to every layer that is "
    "behind first, or truncate(7)"
)
BEHIND = (
    "layer {}: got {} tokens at length 7, expected 2, layer 0 has length 9; append as many as it did, or truncate(7)"
)
OUT_OF_STEP = (
    "{}: layer 0 has length 9, layer 2 has length 7, expected equal lengths; append to every layer first, or "
    "truncate(7)"
)
ALSO = (
    "also: got layer {} at length {}, expected layers other than 1 of its length 7, each once; append to every layer "
    "first, or truncate(7)"
)
FULL = (
    "k: got 30 tokens at length 7, expected at most 25: 1 of 3 pages of 16 tokens are free (capacity = 48, in whole "
    "pages); truncate() or free() a sequence, or make the cache with a larger capacity"
)
BEYOND = "k: got 16777216 tokens at length 7, expected a length of at most 16777216"
KEPT = (  # rows, of which last ones, and what is said
    ([0], 8, "last: got 8, expected an int from 0 to 7"),
    ([3], 3, "rows: got 3, expected numbers of the last 3 rows, from 0 on"),
    ([-1], 3, "rows: got -1, expected numbers of the last 3 rows, from 0 on"),
    ([0, 2, 2], 3, "rows: got 2 after 2, expected ascending numbers, each once"),
    (np.array(1), 3, "rows: got int64 of shape (), expected a list of row numbers"),
    ([True, False, True], 3, "rows: got bool of shape (3,), expected a list of row numbers"),
)
REFUSALS: tuple[tuple[int, type[ZincAttnError], str, Callable[[SequencePages], object]], ...] = (
    # layers (of 3) that hold 2 tokens beyond 7
    (1, StepError, AHEAD, lambda seq: Append(seq, 0, 1)),
    (2, StepError, BEHIND.format(2, 3), lambda seq: Append(seq, 2, 3)),
    (1, StepError, BEHIND.format(1, 1), lambda seq: Append(seq, 1, 1)),
    (2, StepError, OUT_OF_STEP.format("fork"), lambda seq: seq.fork()),
    (2, StepError, OUT_OF_STEP.format("keep"), lambda seq: check_kept(seq, [1], 2)),
    *((0, ArgumentError, text, partial(check_kept, rows=rows, last=last)) for rows, last, text in KEPT),
    (0, CapacityError, FULL, lambda seq: Append(seq, 1, 30)),
    (0, LimitError, BEYOND, lambda seq: Append(seq, 1, 1 << 24)),
    (0, ArgumentError, "layer: got 3, expected an int from 0 to 2", lambda seq: Append(seq, 3, 1)),
    (0, ArgumentError, "count: got 0, expected an int of at least 1", lambda seq: Append(seq, 0, 0)),
    (1, StepError, ALSO.format(0, 9), lambda seq: Append(seq, 1, 2, (0,))),
    (0, StepError, ALSO.format(1, 7), lambda seq: Append(seq, 1, 2, (1,))),
    (0, ArgumentError, "also: got 3, expected an int from 0 to 2", lambda seq: Append(seq, 1, 1, (3,))),
    (1, ArgumentError, "n: got 8, expected an int from 0 to 7", lambda seq: seq.truncate(8)),
    (0, ArgumentError, "n: got -1, expected an int from 0 to 7", lambda seq: seq.truncate(-1)),
)


@pytest.mark.parametrize(("ahead", "error", "text", "call"), REFUSALS)
def test_a_refusal_says_what_to_do_and_changes_nothing(
    ahead: int, error: type[ZincAttnError], text: str, call: Callable[[SequencePages], object]
) -> None:
    pool = PagePool(3, 16)
    other, seq = SequencePages(pool, 1), SequencePages(pool, 3)
    append(other, 1)
    append(seq, 7)
    append(seq, 2, layers=ahead) if ahead else None
    before = state(pool, seq, other)
    with pytest.raises(error) as info:
        call(seq)
    assert (type(info.value), str(info.value)) == (error, text)
    assert state(pool, seq, other) == before
    check_counts(pool, [seq, other])


def test_an_append_whose_page_is_shared_is_not_undone() -> None:
    seq = SequencePages(PagePool(8, 16), 1)
    append(seq, 20)
    fork = seq.fork()
    append(seq, 20)  # on a copy of the page that was not full
    with pytest.raises(
        StepError, match=r"^retract: layer 0 has length 40 and shares pages with another sequence from token 15 on, "
    ):
        seq.retract(0, 15)  # its next row would go to the fork's first page
    seq.retract(0, 16)
    fork.free()
    seq.retract(0, 15)
    assert (seq.lengths, len(seq.table)) == ([15], 1)
    check_counts(seq.pool, [seq])


def test_what_was_collected_unnoticed_gives_its_pages_to_what_is_made_next() -> None:
    pool = PagePool(4, 16)
    seq = SequencePages(pool, 1)
    append(seq, 64)
    del seq
    gc.collect()
    another = SequencePages(pool, 1)  # nobody has asked the pool between the death and the birth
    append(another, 64)
    assert (another.table, pool.free_pages) == ((0, 1, 2, 3), 0)
    del another
    gc.collect()
    assert pool.free_pages == 4
    check_counts(pool, [])


def test_a_sequence_with_an_open_reservation_and_a_freed_one_refuse() -> None:
    """And the transaction ends with the first of its sequences that is freed."""
    pool, held = PagePool(5, 16), Transaction()
    seq, other, third = (SequencePages(pool, 2) for _ in range(3))
    held.reserve(seq, 1, 3)
    held.reserve(other, 0, 5)
    calls = (lambda: Append(seq, 0, 3), seq.fork, lambda: seq.truncate(0), lambda: check_kept(seq, [], 0))
    for call in calls:
        text = r"^sequence: a reservation of it is open; commit\(\) or rollback\(\) its transaction first$"
        with pytest.raises(StepError, match=text):
            call()
    check_counts(pool, [seq, other, third])
    seq.free()
    assert (held.state, pool.free_pages, other.lengths) == ("rolled back", 5, [0, 0])
    for call in (*calls, seq.check_open):
        with pytest.raises(ClosedError, match=r"^sequence: used after free\(\)$"):
            call()
    for call in (held.commit, lambda: held.reserve(third, 0, 1)):
        with pytest.raises(ClosedError, match=r"^transaction: "):
            call()
    check_counts(pool, [seq, other, third])


def test_a_pool_names_the_argument_that_is_wrong() -> None:
    with pytest.raises(ArgumentError, match=r"^page_size: got 131072, expected an int from 1 to 65536$"):
        PagePool(4, 1 << 17)
    for ids in ([0, 2, 2], [0, 1]):
        with pytest.raises(ArgumentError, match=rf"^order: got {len(ids)} ids, expected each of 0 to 2 exactly once$"):
            PagePool(3, 16, ids)
