"""The cases of a check: shapes, dtypes, contexts and masking options, over values that every machine makes alike.

Word i of an array is splitmix64 (Steele, Lea, Flood 2014), whose seed is the first 8 bytes of SHA-256 of the array's
name. Three 21-bit fields of the word are added and scaled to standard deviation 1 in [-3, 3], and every step is exact.
Query head h is multiplied by 2**(h % 4), so that flat and sharp softmaxes occur, and sinks are multiplied by 4.
"""

from __future__ import annotations

import hashlib
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from ...canonical.arguments import check_window
from ...decode.scoring import check_scale, check_softcap
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...shapes import AttnShape, row_format
from ..harness.bits import F32
from ..harness.inputs import check_stored_v, parse_contexts

CONTEXTS: Final = "1000,8191,8k,32k,128k"
SHAPES: Final = "16/2/256,32/4/128,9/3/64"
DTYPES: Final = "f32,f16,bf16,q8_0"
QUICK: Final = (
    *("16/2/256 f16 1000", "16/2/256 q8_0 577", "32/8/128 f16 129"),
    *("9/3/64 bf16 300", "9/3/64 f32 65", "9/3/64 f16 2048"),
    *("9/3/64 f16 1700 window=1200+sinks", "9/3/64 f16 1100 softcap=20+scale=0.25+sinks"),
)
MASKED: Final = (  # beside the matrix
    *("64/8/64 f16 1000 window=128+sinks", "64/8/64 f16 8191 sinks"),
    *("32/16/128 bf16 8191 window=4096+softcap=50", "32/16/128 f16 1000 softcap=50+scale=0.0625"),
    *("16/2/256 q8_0 1000 window=600+scale=0.125", "9/3/64 f32 2048 window=1100+softcap=20+scale=0.25+sinks"),
)
ROWS: Final = 3  # query rows made per shape; the last one is the case's


def words(name: str, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Words first ... first + count - 1 of the array called ``name``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def values(name: str, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
    """An array of ``shape``: float16 for f16, otherwise float32, of values that bfloat16 holds for bf16."""
    out = np.empty(shape, np.float16 if dtype == "f16" else np.float32)
    flat, mask, block = out.reshape(-1), np.uint64((1 << 21) - 1), 1 << 18
    for at in range(0, flat.size, block):
        w = words(name, min(block, flat.size - at), at)
        total = ((w & mask) + ((w >> np.uint64(21)) & mask) + ((w >> np.uint64(42)) & mask)).astype(np.int64)
        x = (2 * total - 3 * ((1 << 21) - 1)).astype(np.float32) * np.float32(2.0**-21)
        flat[at : at + block] = x.astype(bfloat16) if dtype == "bf16" else x
    return out


class Data(NamedTuple):
    """q (ROWS, q_heads, head_dim) float32; k, v (tokens, kv_heads, head_dim) as a cache of the dtype takes them."""

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]

    @classmethod
    def make(cls, shape: AttnShape, dtype: str, tokens: int) -> Data:
        """The values of a shape; fewer tokens are a prefix of more, and a dtype rounds the same values."""
        q = values(f"{shape} q", (ROWS, shape.q_heads, shape.head_dim))
        q *= np.exp2(np.arange(shape.q_heads) % 4).astype(np.float32)[:, None]
        k = values(f"{shape} k", (tokens, shape.kv_heads, shape.head_dim), dtype)
        return cls(q, k, values(f"{shape} v", (tokens, shape.kv_heads, shape.v_head_dim), dtype))


class Masking(NamedTuple):
    """The masking options of a case; ``sinks`` says whether it has them, their values are seeded."""

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        numbers = {name: value for name, value in self._asdict().items() if name != "sinks" and value is not None}
        said = [f"{name}={str(value).removesuffix('.0')}" for name, value in numbers.items()] + ["sinks"] * self.sinks
        return "+".join(said) or "none"

    @classmethod
    def parse(cls, text: str) -> Masking:
        """``none``, or words joined by +, each once: ``window=128``, ``softcap=50``, ``scale=0.125``, ``sinks``."""
        found: dict[str, Any] = {}
        words = [] if text.strip() == "none" else [word.strip() for word in text.split("+")]
        try:
            for word in words:
                name, _, number = word.partition("=")
                if name in found or (word != "sinks" and name not in ("window", "softcap", "scale")):
                    raise ValueError(word)
                found[name] = True if word == "sinks" else int(number) if name == "window" else float(number)
        except ValueError:
            raise ArgumentError(
                f"masking: got {text!r}, expected none, or words joined by + of window=KEYS, softcap=X, scale=X and "
                "sinks, each once (window=128+sinks)"
            ) from None
        check_window(found.get("window"))
        check_softcap(found.get("softcap"))
        check_scale(found.get("scale"), 64)
        return cls(**found)


class Case(NamedTuple):
    """One set of values: decode of one row over ``context`` keys."""

    shape: AttnShape
    dtype: str
    context: int
    masking: Masking = Masking()

    def __str__(self) -> str:
        masked = f" {self.masking}" if self.masking != Masking() else ""
        return f"{self.shape} {self.dtype} {self.context}{masked}"

    def data(self) -> Data:
        """The case's values."""
        return Data.make(self.shape, self.dtype, self.context)

    def options(self) -> dict[str, Any]:
        """The masking options as ``Attention`` and the oracle take them."""
        sinks = values(f"{self.shape} sinks", (self.shape.q_heads,)) * np.float32(4) if self.masking.sinks else None
        return {**self.masking._asdict(), "sinks": sinks}

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of ``str``."""
        shape, dtype, context, *masked = text.split()
        return cls(AttnShape.parse(shape), dtype, int(context), *map(Masking.parse, masked))

    @classmethod
    def matrix(cls, shapes: str, dtypes: str, contexts: str, masking: str = "none") -> list[Case]:
        """Every combination. ArgumentError for what no kernel serves."""
        parsed = [check_stored_v(AttnShape.parse(text.strip())) for text in shapes.split(",")]
        names = [storage_dtype(text.strip()) for text in dtypes.split(",")]
        for shape, dtype in product(parsed, names):
            row_format(shape, dtype)  # refuses a dtype that the shape does not take
        masks = [Masking.parse(text) for text in masking.split(",")]
        return list(dict.fromkeys(cls(*one) for one in product(parsed, names, parse_contexts(contexts), masks)))

    @classmethod
    def default(cls) -> list[Case]:
        """The default matrix, and the fixed cases with masking options."""
        return list(dict.fromkeys((*cls.matrix(SHAPES, DTYPES, CONTEXTS), *map(cls.parse, MASKED))))

    @classmethod
    def quick(cls) -> list[Case]:
        """The small fixed set."""
        return list(map(cls.parse, QUICK))
