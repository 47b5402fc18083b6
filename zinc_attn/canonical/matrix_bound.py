"""How far attention with matrix units (arithmetic "matrix") may be from the float64 truth: a bound of its roundings.

A rounding to float16, in either direction, is off by h = 2**-10 of a number, or by t = 2**-24 below 2**-14. A float32
sum of a matrix unit, whose order and guard bits are its own, is off by w = 2**-22 per term, and the canonical steps
together by r = 2**-20. Over d dimensions and n keys:

    score     |s' - s| <= e = |bias| r + scale * log2(e)
                              * ((sum |q| |k|) (2 h + h**2 + d w + r) + t (sum |q| + sum |k| + d t))
    weight    p' = p * 2**(s' - s) * (1 + h), or off by 2**-39 below 2**-29: weights are rounded as p * 2**15
    lse       |lse' - lse| <= ln(2) * e + r (1 + |lse|) + (n / 512 + 16) t
    out       |out' - out| <= (2**(2 e) (1 + 2 h + 64 w + r) - 1) * sum softmax |v| + t + n t * max |v|

with the largest e of a row's keys. The last term of out covers the fold of n / 512 nodes and the least weights.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .arguments import with_rows
from .constants import BIASES, KEYS_PER_NODE
from .reference import attention
from .score_bound import largest
from .state import F64

_HALF: Final = 2.0**-10
_SUM: Final = 2.0**-22
_REST: Final = 2.0**-20
_TINY: Final = 2.0**-24


def matrix_bound(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], **options: Any) -> tuple[F64, F64]:
    """The bound of each element of out ([q_len,] q_heads, v_head_dim) and of lse ([q_len,] q_heads).

    Arguments as in ``reference.attention``.
    """
    rows, heads = with_rows(np.asarray(q, np.float64)), k.shape[1]
    size, dims = np.abs(np.asarray(k, np.float64)), rows.shape[2]
    scale = options.get("scale")
    factor = (1.0 / math.sqrt(dims) if scale is None else abs(scale)) * math.log2(math.e)
    grouped = np.abs(rows).reshape(len(rows), heads, -1, dims)
    sums = np.einsum("rhgd,nhd->rhgn", grouped, size, optimize=True).max(axis=-1, initial=0.0).reshape(len(rows), -1)
    mask = np.abs(np.asarray(0.0 if options.get("mask") is None else options["mask"], np.float64))
    most = float(mask.max(where=np.isfinite(mask), initial=0.0))
    most += sum(largest(options.get(name)) for name in BIASES) * len(k)
    all_k = size.sum(axis=2).max(axis=0, initial=0.0).repeat(grouped.shape[2])
    tiny = _TINY * (grouped.sum(axis=3).reshape(len(rows), -1) + all_k + dims * _TINY)
    error = factor * (sums * (2 * _HALF + _HALF**2 + dims * _SUM + _REST) + tiny) + most * math.log2(math.e) * _REST
    spread, lse = attention(q, k, np.abs(v.astype(np.float64)), **options)
    relative = np.exp2(2 * error) * (1 + 2 * _HALF + 64 * _SUM + _REST) - 1
    most_v = float(np.max(np.abs(v.astype(np.float64)), initial=0.0))
    bound: F64 = relative[..., None] * with_rows(spread) + _TINY + len(k) * _TINY * most_v
    size = np.where(np.isinf(lse), 0.0, np.abs(lse))
    folds = (len(k) / KEYS_PER_NODE + 16) * _TINY
    return bound.reshape(spread.shape), math.log(2) * error.reshape(lse.shape) + _REST * (1 + size) + folds
