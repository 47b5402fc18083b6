"""The cost model's time of a measured call, as a row after it."""

from collections.abc import Iterable, Iterator

from ..cost import Card, predict_call
from ..harness.split_spec import SplitSpec
from .rows import MODELED, Row


def with_card(rows: Iterable[Row], card: Card) -> Iterator[Row]:
    """``rows``, and after each the same call of one sequence on ``card``, by its layout there."""
    for row in rows:
        yield row
        spec, info = row.spec, card.info
        layout = SplitSpec.parse(row.layout)
        plan = layout.plan(row.context, spec.shape, card.compute_units, spec.q_len)
        seconds = (predict_call(plan, card, spec.dtype, spec.arithmetic).total_us / 1e6,)
        yield Row(spec, info, MODELED, row.context, row.layout, plan, measure=MODELED, seconds=seconds)
