"""What a mask says: padding columns and a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, ShapeError, UnsupportedError, ValueRangeError
from ...shapes import MAX_CONTEXT, check_bool, check_int, shown
from .tensors import _tensor
from .upstream import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
    torch,
)

Columns = NDArray[np.bool_]

_ROWS_BLOCK: Final = 256  # query rows of an unknown mask pattern that are looked at together


@dataclass(frozen=True)
class _Pattern:
    """What a mask says. kept: (batch, keys), None without padding; window: keys a row sees at most, None for all."""

    kept: Columns | None
    window: int | None
    known: bool = True  # False: ``window`` was not in the mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    """The mask function of "zinc": a bool tensor (batch, keys), False at padding, that knows the layer's window.

    Arguments as transformers' AttentionMaskInterface passes them. UnsupportedError for a pattern other than causal
    or a causal sliding window; ShapeError for a 2-D mask that does not cover all keys.
    """
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
    window = _window(mask_function, q_length, kv_length, q_begin, kv_begin, use_vmap)
    kept = None
    if attention_mask is not None:
        shape = tuple(_tensor("attention_mask", attention_mask).shape)
        if shape != (batch_size, kv_begin + kv_length):
            raise ShapeError(
                f"attention_mask: got shape {shape}, expected ({batch_size}, "
                f"{kv_begin + kv_length}): a column for every token so far, padding included"
            )
        kept = _columns(attention_mask[:, kv_begin:])
    try:
        one = torch.ones((1, 1), dtype=torch.bool, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # torch's, of what is no device here
        raise ArgumentError(f"device: got {shown(device)}, expected a torch device: {error}") from error
    mask = one.expand(batch_size, kv_length) if kept is None else torch.from_numpy(kept).to(device)
    mask.zinc = _Pattern(kept, window)
    return mask


def _columns(mask: Any) -> Columns | None:
    """A 2-D mask as an array, None where nothing is masked. ValueRangeError for anything but 0 and 1."""
    other = torch.nonzero((mask != 0) & (mask != 1))  # NaN is neither
    if len(other):
        row, column = other[0].tolist()
        raise ValueRangeError(
            f"attention_mask[{row}, {column}]: got {mask[row, column].item()}, expected 0 for padding or 1 for a token"
        )
    kept: Columns = mask.to("cpu", torch.bool).numpy()
    return None if kept.all() else kept.copy()  # the caller's mask may change later


def _window(
    pattern: Callable[..., Any], q_length: int, kv_length: int, q_begin: int, kv_begin: int, use_vmap: bool
) -> int | None:
    """The window of a causal pattern, None where rows see all keys before them. UnsupportedError for any other."""
    if pattern is causal_mask_function:
        return None
    cells = [cell.cell_contents for cell in getattr(pattern, "__closure__", None) or ()]
    if getattr(pattern, "__code__", None) is sliding_window_causal_mask_function(1).__code__ and len(cells) == 1:
        parts = cells[0]  # and_masks' tuple: sliding_window_overlay, causal
        if len(parts) == 2 and parts[1] is causal_mask_function:
            overlay = parts[0]
            if getattr(overlay, "__code__", None) is sliding_window_overlay(1).__code__:
                return int(overlay.__closure__[0].cell_contents)
    # a pattern without a name: look at it
    window = None
    keys = kv_begin + np.arange(kv_length)
    edges = [*range(0, q_length, _ROWS_BLOCK), q_length]
    for begin, end in reversed(list(pairwise(edges))):
        got = sdpa_mask(
            1,
            end - begin,
            kv_length,
            q_begin + begin,
            kv_begin,
            pattern,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
        )[0, 0].numpy()
        if end == q_length:
            first = int(np.argmax(got[-1]))
            window = kv_length - first if first else None
        rows = q_begin + np.arange(begin, end)[:, None]
        want = (keys <= rows) & (keys > rows - (window or kv_begin + kv_length + 1))
        if not np.array_equal(got, want):
            raise UnsupportedError(
                "attention_mask: got a pattern that is neither causal nor a causal sliding window (bidirectional, "
                'chunked, packed or blockwise), expected one of the two; use attn_implementation="sdpa" for this model '
                "or input"
            )
    return window


def _pattern(mask: Any) -> _Pattern:
    """What the attention function was given as its mask."""
    if mask is None:
        return _Pattern(None, None, known=False)
    found = getattr(mask, "zinc", None)
    if isinstance(found, _Pattern):
        return found
    shape = tuple(_tensor("attention_mask", mask).shape)
    if len(shape) != 2:
        raise UnsupportedError(
            f"attention_mask: got shape {shape}, expected a 2-D mask (batch, tokens) or none; a 4-D mask's pattern "
            'is not known, use attn_implementation="sdpa" with it'
        )
    return _Pattern(_columns(mask), None, known=False)


def _check_window(pattern: _Pattern, window: int | None, keys: int) -> None:
    """Refuse a window that the mask has and the attention was not told of, or the other way round."""
    if pattern.known and min(pattern.window or keys, keys) != min(window or keys, keys):
        raise UnsupportedError(
            f"sliding_window: got {window} for a layer whose mask has a window of {pattern.window}, expected the same "
            'in both; use attn_implementation="sdpa" for this model'
        )


def _check_gaps(kept: Columns, window: int | None) -> None:
    """Refuse padding between a row's tokens where a window counts columns."""
    if window is None:
        return
    for i, row in enumerate(kept):
        tokens = np.flatnonzero(row)
        if tokens.size and tokens[-1] - tokens[0] + 1 != tokens.size:
            raise UnsupportedError(
                f"attention_mask: row {i} has padding between its tokens, and the layer a window of {window}; expected "
                'padding in front of the tokens; use padding_side="left"'
            )
