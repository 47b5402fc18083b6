"""Masks with the keys that each row sees, and the addends of their scores: prefixes, trees, biases.

A dense mask stands in place of the causal rule, as in transformers' own attention. The device does not get the parts
that the causal rule or a layer's window implies, so that a plain causal mask costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...canonical.constants import MAX_INPUT
from ...errors import DTypeError, ShapeError, UnsupportedError, ValueRangeError
from .tensors import DTYPES
from .upstream import torch

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class RowMasks:
    """Arguments of ``zinc_attn.Attention``'s call. masks: of each batch row (rows, n) of its last n keys, or None."""

    causal: bool
    masks: list[NDArray[Any] | None]


@dataclass(frozen=True, eq=False)
class DenseMask:
    """values: (batch, rows, n) of the last n keys, whose first two axes may be 1 for any number.

    bool, True where the row sees the key; or float32, added to the scores, -inf: not seen. Keys before these are seen.
    """

    values: NDArray[Any]

    @classmethod
    def of(cls, mask: Any) -> DenseMask:
        """Read a tensor (batch, heads, rows, n), bool or of a float dtype.

        A number up to the lowest finite number of the mask's dtype or of bfloat16 hides a key, as -inf does:
        transformers fills its masks with such numbers.
        DTypeError: another dtype; UnsupportedError: heads differ; ValueRangeError: NaN, +inf or beyond 2**60.
        """
        if mask.dtype != torch.bool and mask.dtype not in DTYPES:
            raise DTypeError(
                f"attention_mask: got a 4-D mask of {mask.dtype}, expected bool, float32, float16 or bfloat16"
            )
        mask = mask.detach()
        if mask.shape[1] != 1 and mask.stride(1) != 0 and not torch.equal(mask, mask[:, :1].expand_as(mask)):
            raise UnsupportedError(
                f"attention_mask: got shape {tuple(mask.shape)}, in which heads differ, expected the same mask for all "
                'heads of a batch row; use attn_implementation="sdpa" with it'
            )
        first_head = mask[:, 0].to("cpu")
        if mask.dtype == torch.bool:
            return cls(np.ascontiguousarray(first_head.numpy()))
        lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
        values: NDArray[np.float32] = first_head.float().numpy().copy()
        values[values <= lowest] = -np.inf
        if not np.all((np.abs(values) <= MAX_INPUT) | np.isneginf(values)):
            raise ValueRangeError(
                "attention_mask: got a NaN, +inf or a magnitude beyond 2**60 in a 4-D mask, expected numbers to add to "
                f"the scores, and -inf or {lowest:g} for keys that a row does not see"
            )
        return cls(values)

    def expanded(self, batch: int, rows: int, keys: int) -> DenseMask:
        """The mask for ``rows`` rows of ``batch``. ShapeError: it has others, more than ``keys`` keys or too few."""
        shape = self.values.shape
        if shape[0] not in (1, batch) or shape[1] not in (1, rows) or not rows <= shape[2] <= keys:
            raise ShapeError(
                f"attention_mask: got a 4-D mask of {shape[0]} batch rows, {shape[1]} rows and {shape[2]} keys, "
                f"expected {batch}, {rows} and {keys}, or the last of these keys, at least the {rows} new ones"
            )
        return DenseMask(np.broadcast_to(self.values, (batch, rows, shape[2])))

    @property
    def seen(self) -> Bools:
        """The keys that each row sees, whatever is added to their scores."""
        visible: Bools = self.values if self.values.dtype == np.bool_ else ~np.isneginf(self.values)
        return visible

    def padding(self) -> Bools:
        """The padding of an expanded mask, (batch, rows): tokens that see no key and that no row sees.

        The rows are those of the last keys.
        """
        rows, seen = self.values.shape[1], self.seen
        sees, is_seen = seen.any(axis=2), seen[:, :, seen.shape[2] - rows :].any(axis=1)
        unused: Bools = np.logical_not(np.logical_or(sees, is_seen))
        return unused

    def of_rows(self, kept: Bools | None, window: int | None) -> RowMasks:
        """The part of an expanded mask beyond the causal rule and the window, without padding.

        kept: (batch, columns), False at padding, or None where there is none.
        UnsupportedError: a row sees padding, or a key that the window hides.
        """
        parts = [self._without_padding(i, None if kept is None else kept[i]) for i in range(len(self.values))]
        causal = all(not np.any(part.seen[0] & (_distances(part) < 0)) for part in parts)
        return RowMasks(causal, [_rest(i, part, causal, window) for i, part in enumerate(parts)])

    def _without_padding(self, row: int, kept: Bools | None) -> DenseMask:
        """The mask of one batch row (1, rows, n) without its padding."""
        values = self.values[row]
        if kept is None:
            return DenseMask(values[None])
        rows, columns = (kept[len(kept) - size :] for size in values.shape)
        if np.any(DenseMask(values[rows][:, ~columns]).seen):
            raise UnsupportedError(
                f"attention_mask: batch row {row} sees a token that is padding in the 2-D mask, or that no row saw "
                "when the cache was given it, expected such tokens to stay hidden"
            )
        return DenseMask(values[rows][None, :, columns])


def _distances(mask: DenseMask) -> NDArray[np.int64]:
    """(rows, n) of one batch row: how far a key is before the row's own position; negative after it."""
    _, rows, keys = mask.values.shape
    position: NDArray[np.int64] = keys - rows + np.arange(rows)
    return position[:, None] - np.arange(keys)


def _rest(row: int, mask: DenseMask, causal: bool, window: int | None) -> NDArray[Any] | None:
    """The part of one batch row's mask that the causal rule and the window do not imply; None: they imply all."""
    (values,), distance = mask.values, _distances(mask)
    implied = distance < 0 if causal else np.zeros(distance.shape, np.bool_)
    if window is not None:
        outside = distance >= window
        if np.any(mask.seen[0] & outside):
            raise UnsupportedError(
                f"attention_mask: batch row {row} sees a key that a layer's sliding_window of {window} hides, expected "
                "a 4-D mask that hides it, too; give the model a mask for each of its layer types"
            )
        implied |= outside
    neutral = True if values.dtype == np.bool_ else np.float32(0)
    said = np.where(implied, neutral, values)
    columns = np.flatnonzero(np.any(said != neutral, axis=0))
    return np.ascontiguousarray(said[:, columns[0] :]) if columns.size else None
