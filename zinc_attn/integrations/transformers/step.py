"""A step of a ZincCache: its additions stay, or the cache is rolled back."""

import copy
from typing import Any

from .batch import BatchRows
from .layer import ZincLayer


class Step:
    """The state of a ZincCache when a step began, and the way back to it.

    layers: the attention layers; others: transformers' own, whose attributes are copied, since recurrent states cannot
    be computed back; columns: of every attention layer then.
    """

    def __init__(self, layers: list[ZincLayer], others: list[Any], batch: BatchRows) -> None:
        batch.origin = None
        self._layers, self._others, self._batch = layers, others, batch
        self.columns, self._rows = min(layer.columns for layer in layers), batch.size
        self._states = [copy.deepcopy(vars(layer)) for layer in others]

    def end(self) -> None:
        """End the step, whether its additions stay or not."""
        self._batch.origin = None

    def roll_back(self) -> bool:
        """Roll back; False: tokens from before the step are gone or moved. May be repeated after an interrupt."""
        moved = self._batch.size != self._rows or self._batch.moved()
        if (self.columns > 0 and moved) or min(layer.columns for layer in self._layers) < self.columns:
            return False
        for layer, state in zip(self._others, self._states, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        if self._rows < 0:
            self._batch.free()
        cut(self._layers, self._batch, self.columns)
        return True


def cut(layers: list[ZincLayer], batch: BatchRows, columns: int) -> None:
    """Keep the first ``columns`` columns of the attention layers."""
    batch.truncate(columns)
    for layer in layers:
        layer.cut(columns)
