"""What rolls a failed forward back: the state of a ZincCache before a step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from .batch import BatchRows
from .layer import ZincLayer


@dataclass(frozen=True)
class StepStart:
    """A ZincCache as it was when a step began.

    columns: that every attention layer had; rows: of the batch, -1 for none; states: copies of the attributes of
    transformers' own layers, whose recurrent states cannot be computed back.
    """

    columns: int
    rows: int
    states: list[dict[str, Any]]

    @classmethod
    def of(cls, layers: list[ZincLayer], others: list[Any], batch: BatchRows) -> StepStart:
        """Take note of attention layers, of transformers' own layers, and of the batch."""
        columns = min(layer.columns for layer in layers)
        return cls(columns, batch.size, [copy.deepcopy(vars(layer)) for layer in others])

    def lost(self, layers: list[ZincLayer], batch: BatchRows) -> bool:
        """Whether tokens from before the step are gone or in other rows, so that it cannot be rolled back."""
        moved = batch.size != self.rows or batch.moved()
        return (self.columns > 0 and moved) or min(layer.columns for layer in layers) < self.columns

    def restore(self, others: list[Any]) -> None:
        """Give transformers' own layers the attributes that they had. This can be done more than once."""
        for layer, state in zip(others, self.states, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
