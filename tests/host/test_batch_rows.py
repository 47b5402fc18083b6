"""The batch rows of a ZincCache: rows that are selected or forked, all of them or none."""

from collections.abc import Callable

import pytest
from page_tables import check_counts

import zinc_attn as za
from zinc_attn.cache.pages import PagePool
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction

pytest.importorskip("transformers", reason="transformers is not installed: pip install zinc-attn[transformers]")
from zinc_attn.integrations.transformers.batch import BatchRows

SHAPES = za.AttnShape(2, 1, 64), za.AttnShape(4, 2, 64)
FORKS = 4  # that each call makes: two for each shape
CALLS: dict[str, Callable[[BatchRows], object]] = {
    "select": lambda batch: batch.select("beam_idx", [1, 1, 1], 3),
    "fork": BatchRows.fork,
}


@pytest.mark.parametrize("error", [za.CapacityError, KeyboardInterrupt])
@pytest.mark.parametrize("name", CALLS)
def test_a_fork_that_fails_leaves_no_earlier_fork(monkeypatch, name, error):
    """The rows are those of a host without a device, which have a Sequence's ``fork`` and ``free``."""
    pool, batch, fork = PagePool(16, 16), BatchRows(), SequencePages.fork
    rows = [[SequencePages(pool, 1), SequencePages(pool, 1)] for _ in SHAPES]
    batch.sequences = dict(zip(SHAPES, rows, strict=True))  # type: ignore[arg-type]
    live = [row for each in rows for row in each]
    for row in live:
        with Transaction() as transaction:
            transaction.reserve(row, 0, 20)
    for succeeding in range(FORKS):
        forks: list[SequencePages] = []

        def failing(pages: SequencePages, prior: list[SequencePages] = forks, most: int = succeeding) -> SequencePages:
            if len(prior) == most:
                raise error("injected")
            prior.append(fork(pages))
            return prior[-1]

        with monkeypatch.context() as patch:
            patch.setattr(SequencePages, "fork", failing)
            with pytest.raises(error, match="injected"):
                CALLS[name](batch)
        assert len(forks) == succeeding and all(left.closed for left in forks)
        assert batch.sequences == dict(zip(SHAPES, rows, strict=True)) and batch.origin is None
        check_counts(pool, live)
    CALLS[name](batch)
    assert pool.num_pages - pool.free_pages == (4 if name == "select" else 8)
