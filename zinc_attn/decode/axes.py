"""The shapes of q, k and v of a call without a cache, and refusals that say which axes or arrays look swapped."""

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

from ..errors import ArgumentError, ShapeError
from ..limits import MAX_CONTEXT
from ..shapes import AttnShape

Axes = tuple[int, ...]
_ROWS: Final = ("q_len", "q_heads", "head_dim")
_NAMES: Final = {"k": ("tokens", "kv_heads", "head_dim"), "v": ("tokens", "kv_heads", "v_head_dim")}
_SWAPS: Final = ((0, 1), (0, 2), (1, 2))


class _View(NamedTuple):
    """An array as it is, or with two axes swapped. text: the expression that swaps them; names: of the array's axes, if
    it was meant swapped; both are empty for the array as it is."""

    shape: Axes
    text: str = ""
    names: tuple[str, ...] = ()


def attention_shape(q: Axes, k: Axes, v: Axes) -> AttnShape:
    """The shape of a call on arrays of these shapes.

    ShapeError: they do not fit each other; the text names two axes of an array, or q and k, whose swap would make them
    fit. ArgumentError: a size that no attention has.
    """
    try:
        return _shape_of(q, k, v)
    except ShapeError as error:
        raise ShapeError(f"{error}{_advice(q, k, v)}") from None


def _shape_of(q: Axes, k: Axes, v: Axes) -> AttnShape:
    if len(q) not in (2, 3):
        raise ShapeError(f"q: got shape {q}, expected (q_heads, head_dim) or (q_len, q_heads, head_dim)")
    if len(k) != 3:
        raise ShapeError(f"k: got shape {k}, expected (tokens, kv_heads, head_dim)")
    for name, shape in (("q", q), ("k", k)):
        if shape[0] > MAX_CONTEXT:
            raise ShapeError(f"{name}: got {shape[0]:,} rows, expected at most {MAX_CONTEXT:,}")
    if len(q) == 3 and q[0] < 1:
        raise ShapeError(f"q: got shape {q}, expected at least one row")
    axes = (
        f", where q is ({', '.join(_ROWS[3 - len(q) :])}) = {q}, k is ({', '.join(_NAMES['k'])}) = {k} and "
        f"v is ({', '.join(_NAMES['v'])}) = {v}"
    )
    if v[:2] != k[:2] or len(v) != 3:
        shown = axes if len(v) == 3 else ""
        raise ShapeError(f"v: got shape {v}, expected k's tokens and heads: ({k[0]}, {k[1]}, v_head_dim){shown}")
    if q[-1] != k[2]:
        raise ShapeError(f"q: got head_dim {q[-1]}, expected k's {k[2]}{axes}")
    if k[1] and q[-2] % k[1]:
        raise ShapeError(f"q_heads: got {q[-2]}, expected a multiple of kv_heads = {k[1]}{axes}")
    return AttnShape(q[-2], k[1], k[2], v[2])


def _advice(q: Axes, k: Axes, v: Axes) -> str:
    """The end of a refusal: the fewest arrays (k and v are one) whose swapped axes make the call valid; or empty."""
    if _fits(k, q, v):
        return "; q and k look swapped: the order is attention(q, k, v)"
    for views in _candidates(q, k, v):
        if _fits(*(view.shape for view in views)):
            changed = [view for view in views if view.text]
            like = [f"{view.text[0]} like ({', '.join(view.names)})" for view in changed]
            like[0] = like[0].replace("like", "looks like", 1)
            return f"; {_listed(like)}: pass {_listed([view.text for view in changed])}"
    return ""


def _candidates(q: Axes, k: Axes, v: Axes) -> Iterator[tuple[_View, _View, _View]]:
    """q, k and v with swapped axes, those with the fewest changes first."""
    q_is, k_is, v_is = _View(q), _View(k), _View(v)
    q_views = list(_views("q", q, _ROWS[1:] if len(q) == 2 else _ROWS))
    k_views, v_views = (list(_views(name, x, _NAMES[name])) for name, x in (("k", k), ("v", v)))
    both = [(k_view, v_view) for k_view, v_view in product(k_views, v_views) if k_view.text[1:] == v_view.text[1:]]
    yield from ((q_is, k_view, v_view) for k_view, v_view in both)
    yield from ((view, k_is, v_is) for view in q_views)
    yield from ((q_is, view, v_is) for view in k_views)
    yield from ((q_is, k_is, view) for view in v_views)
    yield from ((view, k_view, v_view) for view, (k_view, v_view) in product(q_views, both))


def _views(name: str, shape: Axes, names: tuple[str, ...]) -> Iterator[_View]:
    """An array with two axes swapped; for a batch of one also the array without its first axis."""
    text, batch = name, tuple[str, ...]()
    if len(shape) == len(names) + 1 == 4 and shape[0] == 1:
        text, shape, batch = f"{name}[0]", shape[1:], ("1",)
        yield _View(shape, text, (*batch, *names))
    if len(shape) != len(names):
        return
    for i, j in _SWAPS if len(shape) == 3 else ((0, 1),):
        order = list(range(len(shape)))
        order[i], order[j] = j, i
        swapped = tuple(shape[axis] for axis in order)
        yield _View(swapped, f"{text}.swapaxes({i}, {j})", (*batch, *(names[axis] for axis in order)))


def _listed(texts: list[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def _fits(q: Axes, k: Axes, v: Axes) -> bool:
    try:
        _shape_of(q, k, v)
    except ArgumentError:
        return False
    return True
