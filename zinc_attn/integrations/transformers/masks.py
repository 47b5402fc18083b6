"""The mask function: a mask says which columns are padding, and which window a layer's rows see.

A column is a position in the batch's matrix of tokens (batch, columns), padding included. A mask that is neither causal
nor a causal sliding window is dense: see ``dense_masks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...checks import check_bool, check_int, shown
from ...errors import ArgumentError, ShapeError, UnsupportedError, ValueRangeError
from ...limits import MAX_CONTEXT
from .boundary import opaque, untraced
from .dense_masks import DenseMask
from .hard_coded import refuse_hard_coded
from .tensors import NAME, dense_tensor
from .upstream import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
    torch,
)

Columns = NDArray[np.bool_]

_BLOCK_ROWS: Final = 256  # query rows of an unknown pattern that are evaluated together, which bounds the memory


@dataclass(frozen=True)
class MaskPattern:
    """The content of a mask.

    kept: (batch, keys), False at padding, or None where no column is padding; window: how many keys a row sees, its own
    included, or None for all before it; window_known: False for a mask that says nothing about the window. dense: the
    keys that each row sees and what is added to their scores, in place of the causal rule; None for the causal rule.
    """

    kept: Columns | None
    window: int | None
    window_known: bool = True
    dense: DenseMask | None = None


@opaque
class PatternMask(torch.Tensor):
    """A mask of this module, with its ``MaskPattern`` as ``zinc``.

    A model may index a mask (batch, keys) as the 4-D mask of other attention implementations to keep the last rows
    only, as Gemma 4 does before layers that share keys and values: the pattern holds for any number of last rows. Any
    other index of four axes, and ``where`` of the mask, is refused; any other operation gives an ordinary tensor.
    """

    zinc: MaskPattern

    @classmethod
    def of(cls, mask: Any, pattern: MaskPattern) -> PatternMask:
        """``mask`` with its ``pattern``."""
        wrapped: PatternMask = mask.as_subclass(cls)
        wrapped.zinc = pattern
        return wrapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, mask = getattr(func, "__name__", ""), args[0] if args else None
        index = args[1] if name == "__getitem__" and isinstance(args[1], tuple) else ()
        if (name == "where" or len(index) == 4) and isinstance(mask, PatternMask) and mask.ndim == 2:
            if name != "where" and _keeps_last_rows(*index):
                return mask
            raise UnsupportedError(
                f"attention_mask: got a model that computes with its mask of four axes, of which attention {NAME!r} "
                'has none, expected one that hands it to attention; use attn_implementation="eager" for this model'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _keeps_last_rows(batch: Any, heads: Any, rows: Any, keys: Any) -> bool:
    """Whether an index of a mask (batch, heads, rows, keys) drops nothing but first rows."""
    if any(axis != slice(None) for axis in (batch, heads, keys)):
        return False
    return isinstance(rows, slice) and rows.stop is None and rows.step is None and (rows.start or 0) <= 0


@untraced
def attention_mask(  # noqa: PLR0913 - transformers decides on the parameters
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **_: Any,
) -> Any:
    """The mask function of "zinc": a bool tensor (batch, keys), False at padding, that knows the layer's window.

    For a pattern that is neither causal nor a causal sliding window it is (batch, 1, rows, keys), True where the row
    sees the key. The arguments are those that transformers' AttentionMaskInterface passes. UnsupportedError: the keys
    are those of a static cache, or the model computes its attention itself and would add this mask to its scores;
    ShapeError: a 2-D mask does not cover all keys.
    """
    refuse_hard_coded(config)
    batch_size = check_int("batch_size", batch_size, 0, MAX_CONTEXT)
    q_length = check_int("q_length", q_length, 0, MAX_CONTEXT)
    kv_length = check_int("kv_length", kv_length, 0, MAX_CONTEXT)
    q_begin = check_int("q_offset", q_offset, 0, MAX_CONTEXT)
    kv_begin = check_int("kv_offset", kv_offset, 0, MAX_CONTEXT)
    if not isinstance(mask_function, FunctionType):
        raise ArgumentError(f"mask_function: got {shown(mask_function)}, expected a mask function of transformers")
    use_vmap = check_bool("use_vmap", use_vmap)
    if q_begin + q_length != kv_begin + kv_length:
        raise UnsupportedError(
            f"attention_mask: got keys up to position {kv_begin + kv_length} for queries up to {q_begin + q_length}, "
            "expected the last key to be the last query's; use a ZincCache or a DynamicCache, not a static one"
        )
    rows, keys = range(q_begin, q_begin + q_length), range(kv_begin, kv_begin + kv_length)
    window, seen = _window_or_seen(mask_function, batch_size, rows, keys, use_vmap)
    kept = None if attention_mask is None else _kept_keys(attention_mask, batch_size, keys)
    try:
        unit = torch.ones((1, 1), dtype=torch.bool, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # torch raises all of these for a bad device
        raise ArgumentError(f"device: got {shown(device)}, expected a torch device: {error}") from error
    if seen is not None:
        seen = seen if kept is None else seen & kept[:, None]
        pattern = MaskPattern(kept, None, window_known=False, dense=DenseMask(seen))
        return PatternMask.of(torch.from_numpy(seen[:, None]).to(device), pattern)
    mask = unit.expand(batch_size, kv_length) if kept is None else torch.from_numpy(kept).to(device)
    return PatternMask.of(mask, MaskPattern(kept, window))


def adapted_attention_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """``attention_mask`` for a model whose attention modules hand the mask to attention "zinc", whatever its class."""
    return attention_mask(*args, **kwargs)


def mask_pattern(mask: Any) -> MaskPattern:
    """Read the mask that the attention function was given: ours, a 2-D or 4-D tensor, or None."""
    if mask is None:
        return MaskPattern(None, None, window_known=False)
    pattern = getattr(mask, "zinc", None)
    if isinstance(pattern, MaskPattern):
        return pattern
    shape = tuple(dense_tensor("attention_mask", mask).shape)
    if len(shape) == 4:
        return MaskPattern(None, None, window_known=False, dense=DenseMask.of(mask))
    if len(shape) != 2:
        raise ShapeError(
            f"attention_mask: got shape {shape}, expected none, (batch, tokens) or (batch, heads, rows, tokens)"
        )
    return MaskPattern(_kept_columns(mask), None, window_known=False)


def check_window(pattern: MaskPattern, kept: Columns | None, window: int | None, keys: int) -> None:
    """Refuse a window that only the mask has, or only the call of the attention function.

    Refuse padding between the tokens of a row, too: a window counts columns and not tokens. kept: (rows, keys).
    """
    if pattern.window_known and min(pattern.window or keys, keys) != min(window or keys, keys):
        raise UnsupportedError(
            f"sliding_window: got {window} for a layer whose mask has a window of {pattern.window}, expected the same "
            'in both; use attn_implementation="sdpa" for this model'
        )
    if kept is None or window is None:
        return
    for i, row in enumerate(kept):
        tokens = np.flatnonzero(row)
        if tokens.size and tokens[-1] - tokens[0] + 1 != tokens.size:
            raise UnsupportedError(
                f"attention_mask: row {i} has padding between its tokens, and the layer a window of {window}; expected "
                'padding in front of the tokens; use padding_side="left"'
            )


def _kept_keys(mask: Any, batch_size: int, keys: range) -> Columns | None:
    """Return the part of a 2-D mask that covers ``keys``, or None where it has no padding."""
    shape = tuple(dense_tensor("attention_mask", mask).shape)
    if shape != (batch_size, keys.stop):
        raise ShapeError(
            f"attention_mask: got shape {shape}, expected ({batch_size}, {keys.stop}): a column for every token so "
            "far, padding included"
        )
    return _kept_columns(mask[:, keys.start :])


def _kept_columns(mask: Any) -> Columns | None:
    """Return a 2-D mask as an array, or None where it has no padding. ValueRangeError: a value other than 0 and 1."""
    other = torch.nonzero((mask != 0) & (mask != 1))  # this finds NaN, too
    if len(other):
        row, column = other[0].tolist()
        raise ValueRangeError(
            f"attention_mask[{row}, {column}]: got {mask[row, column].item()}, expected 0 for padding or 1 for a token"
        )
    kept: Columns = mask.to("cpu", torch.bool).numpy()
    return None if kept.all() else kept.copy()  # a copy, because the caller may change the mask later


def _window_or_seen(
    pattern: Callable[..., Any], batch: int, rows: range, keys: range, use_vmap: bool
) -> tuple[int | None, Columns | None]:
    """Return the window of a causal pattern, None where a row sees all keys before it, and None.

    For another pattern: None, and the keys that each row sees, (batch, rows, keys). rows, keys: positions. The two
    functions that transformers makes are recognized, all others are evaluated.
    """
    if pattern is causal_mask_function:
        return None, None
    cells = [cell.cell_contents for cell in getattr(pattern, "__closure__", None) or ()]
    if getattr(pattern, "__code__", None) is sliding_window_causal_mask_function(1).__code__ and len(cells) == 1:
        parts = cells[0]  # the tuple that and_masks was given: sliding_window_overlay's function and the causal one
        if len(parts) == 2 and parts[1] is causal_mask_function:
            overlay = parts[0]
            if getattr(overlay, "__code__", None) is sliding_window_overlay(1).__code__:
                return int(overlay.__closure__[0].cell_contents), None

    def seen(begin: int, end: int) -> Columns:
        """The keys that the rows [begin, end) of the call see in each batch row."""
        sizes = max(batch, 1), end - begin, len(keys), rows.start + begin, keys.start
        result = sdpa_mask(*sizes, pattern, allow_is_causal_skip=False, use_vmap=use_vmap)
        array: Columns = result[:, 0].numpy()
        return array

    causal, window = _evaluated_window(seen, rows, keys)
    if causal and (window is None or len(rows) > 1):  # a single row does not tell a window from a chunk
        return window, None
    return None, np.ascontiguousarray(seen(0, len(rows)))


def _evaluated_window(seen: Callable[[int, int], Columns], rows: range, keys: range) -> tuple[bool, int | None]:
    """Whether a pattern is causal, and its window. The last row tells the window, which all other rows must have."""
    window = None
    positions = np.arange(keys.start, keys.stop)
    edges = [*range(0, len(rows), _BLOCK_ROWS), len(rows)]
    for begin, end in reversed(list(pairwise(edges))):
        got = seen(begin, end)
        if end == len(rows):
            first = int(np.argmax(got[0, -1]))
            window = len(keys) - first if first else None
        row = rows.start + np.arange(begin, end)[:, None]
        want = (positions <= row) & (positions > row - (window or keys.stop + 1))
        if not np.all(got == want):  # in every batch row
            return False, None
    return True, window
