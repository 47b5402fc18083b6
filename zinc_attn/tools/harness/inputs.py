"""The values that the tools attend, which are seeded and normal; and lists of context lengths."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from ...canonical.state import F32
from ...checks import check_int, parse_digits, shown
from ...errors import ArgumentError
from ...limits import MAX_CONTEXT
from ...shapes import AttnShape
from ...storage import storage_types

NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
_SUFFIXES: Final = {"k": 1 << 10, "m": 1 << 20}
_BLOCK: Final = 1 << 22  # values drawn at once, so that long arrays need little more memory than their own


def parse_contexts(text: str, name: str = "contexts") -> list[int]:
    """Parse ``1k,32k,5000`` to numbers, of keys say (k = 1024, m = 1024 k); a repeated one counts once."""
    numbers = []
    for word in text.split(","):
        digits = word.strip().lower()
        factor = _SUFFIXES.get(digits[-1:], 1)
        digits = digits[:-1] if factor > 1 else digits
        number = parse_digits(digits)
        if number is None:
            raise ArgumentError(f"{name}: got {shown(word)}, expected numbers such as 1k,32k,5000 (k = 1024)")
        numbers.append(check_int(name, number * factor, 1, MAX_CONTEXT))
    return list(dict.fromkeys(numbers))


def check_stored_v(shape: AttnShape) -> AttnShape:
    """``shape`` if its V is stored. ArgumentError: it is latent, and the tool attends K and V that are given apart."""
    if shape.latent:
        apart = AttnShape(shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
        raise ArgumentError(
            f"shape: got {shape}, expected one whose V is stored; use {apart}, or plan, check, compilers and export, "
            "which take it"
        )
    return shape


class Inputs(NamedTuple):
    """Query rows of one sequence and its keys and values.

    q: (q_heads, head_dim), or (q_len, q_heads, head_dim) for the last q_len positions, float32; k: (tokens, kv_heads,
    head_dim), v: (tokens, kv_heads, v_head_dim).
    """

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]

    @classmethod
    def normal(
        cls, shape: AttnShape, tokens: int, dtype: str, seed: int = 0, *, q_len: int | None = None, sequence: int = 0
    ) -> Inputs:
        """Standard normal values that a cache of ``dtype`` takes, so that scores have a standard deviation of 1.

        Fewer tokens are a prefix of more, and each ``sequence`` of a batch has values of its own.
        """
        lead = () if q_len is None else (q_len,)
        check_stored_v(shape)
        rng = np.random.default_rng([seed, 0, sequence])
        q = rng.standard_normal((*lead, shape.q_heads, shape.head_dim), dtype=np.float32)
        kinds = storage_types(dtype)
        k = _normal((tokens, shape.kv_heads, shape.head_dim), kinds[0].name, [seed, 1, sequence])
        v = _normal((tokens, shape.kv_heads, shape.v_head_dim), kinds[1].name, [seed, 2, sequence])
        return cls(q, k, v)


def _normal(shape: tuple[int, int, int], dtype: str, seed: list[int]) -> NDArray[Any]:
    """float32 values for f32 and bf16, which it holds exactly; float16 for f16 and for types that quantize it."""
    rng = np.random.default_rng(seed)
    array: NDArray[Any] = np.empty(shape, np.float32 if dtype in ("f32", "bf16") else np.float16)
    rows = max(1, _BLOCK // (shape[1] * shape[2]))
    for first in range(0, shape[0], rows):
        block = array[first : first + rows]
        values = rng.standard_normal(block.shape, dtype=np.float32)
        block[:] = values.astype(bfloat16) if dtype == "bf16" else values
    return array
