"""The cases of a check: shapes, dtypes, contexts, data kinds and masking options, and which of them a run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from ...checks import check_int, shown
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...planning.arithmetic import Arithmetic
from ...shapes import AttnShape
from ..harness.bits import F32
from ..harness.inputs import parse_contexts
from .data import KINDS, MASKS, Data, mask_of, values

QUICK: Final = (
    *("16/2/256 f16 1000", "16/2/256 q8_0 577", "32/8/128 f16 129"),
    *("9/3/64 bf16 300", "9/3/64 f32 65", "9/3/64 f16 2048"),
    *("9/3/64 f16 1700 window=1200+sinks", "9/3/64 f16 1100 softcap=20+scale=0.25+sinks"),
    # leaf maxima that differ, over more leaves than a merge holds at a time on a CPU device
    *("9/3/64 f16 2200 rising window=1900", "9/3/64 f16 2200 falling sinks"),
    *("9/3/64 f16 1300 cancelling", "9/3/64 f16 902 fading", "9/3/64 f32 1152 fading"),
    # biases, masks, sizes and ratios
    *("9/3/64 f16 700 jumping alibi+mask=f16", "9/3/64 f16 700 window=300+sinks+mask=tree"),
    *("9/3/64 f16 600 cancelling mask=f32+noncausal", "9/3/64 f16 90 mask=blind"),
    *("6/2/67/133 f16 577 rising", "128/1/64 f16 130 jumping", "2/1/72/40/latent f16 577 rising"),
    # storage types
    *("9/3/64 q5_1/q4_0 300 rising", "9/3/64 q4_1/q5_0 300"),
    *("6/2/72/40 iq4_nl/fp8_e4m3 130", "9/3/64 fp8_e4m3/q5_1 90"),
)
_CONTEXTS: Final = ("1000", "8191", "8192", "32768", "131072")
DEFAULT: Final = (
    *map(" ".join, product(("16/2/256", "32/4/128", "9/3/64"), ("f32", "f16", "bf16", "q8_0"), _CONTEXTS)),
    *("64/8/64 f16 1000 window=128+sinks", "64/8/64 f16 8191 sinks"),
    *("32/16/128 bf16 8191 window=4096+softcap=50", "32/16/128 f16 1000 softcap=50+scale=0.0625"),
    *("16/2/256 q8_0 1000 window=600+scale=0.125", "9/3/64 f32 2048 window=1100+softcap=20+scale=0.25+sinks"),
    # leaf maxima that differ, over more leaves than a merge holds at a time on a GPU
    *("9/3/64 f16 20000 rising", "9/3/64 f16 20000 falling sinks"),
    *("16/2/256 bf16 8191 jumping", "9/3/64 f32 8191 fading"),
    *("9/3/64 q8_0 8191 rising alibi", "32/8/128 f16 1000 jumping window=700+mask=random"),
    "32/8/192/128 f16 8191 falling sinks",
    *("20/1/576/512/latent f16 1000 jumping", "6/2/67/45 f32 1000 cancelling mask=f16+noncausal"),
    *("16/2/256 q4_0 8191 falling", "32/8/128 q5_0/iq4_nl 1000", "9/3/64 q8_0/q4_1 8191 jumping"),
    *("16/2/256 fp8_e4m3 1000 sinks", "20/1/576/512/latent q5_1 1000", "6/2/80 iq4_nl/q5_1 1000"),
)

# Cases of matrix units, of rows that fill tiles and of some that do not, with ragged ends of keys.
MATRIX_QUICK: Final = (
    *("16/2/256 f16 577 rows=16", "32/8/128 f16 300 rows=17 window=100+sinks"),
    *("9/3/64 f16 1100 rows=70 softcap=20+scale=0.25+sinks", "9/3/64 bf16 700 rows=23 rising window=600"),
    # values that f16, bf16 and q8_0 hold alike
    *("9/3/64 f16 1290 rows=40 coarse", "9/3/64 q8_0 577 rows=16 cancelling"),
    *("9/3/64 f16 600 rows=33 jumping alibi+mask=f16", "2/1/72/40/latent f16 577 rows=16 rising"),
    "6/2/67/133 f16 300 rows=21 rising",  # more subgroups share a strip's V than its K
)
MATRIX_DEFAULT: Final = (
    *map(" ".join, product(("16/2/256", "32/8/128", "9/3/64"), ("f16 1000",), ("rows=16", "rows=70"))),
    *MATRIX_QUICK,
    *("32/8/128 f16 1000 rows=33 rising window=700+sinks", "16/2/256 f16 1000 rows=18 jumping softcap=50"),
    *("16/2/256 q8_0 700 rows=16 coarse", "32/8/128 bf16 600 rows=16 coarse sinks"),
    *("9/3/64 f16 2200 rows=20 falling sinks", "9/3/64 f16 700 rows=50 cancelling mask=f32+noncausal"),
    *("9/3/64 f16 300 rows=70 mask=blind", "9/3/64 f16 902 rows=16 fading", "9/3/64 q5_1/q4_0 577 rows=19"),
    *("128/1/64 f16 200 rows=9 jumping", "20/1/576/512/latent f16 600 rows=16", "32/8/64/192 f16 200 rows=16 sinks"),
)

_NUMBERS: Final[Mapping[str, Callable[[str], Any]]] = {"rows": int, "window": int, "softcap": float, "scale": float}
_FLAGS: Final[Mapping[str, tuple[str, Any]]] = {  # word to field and value
    "matrix": ("arithmetic", "matrix"),
    **{kind: ("kind", kind) for kind in KINDS if kind != "normal"},
    **{"sinks": ("sinks", True), "alibi": ("alibi", True)},
    **{f"mask={kind}": ("mask", kind) for kind in MASKS},
    "noncausal": ("causal", False),
}


class Case(NamedTuple):
    """One set of values: the last ``rows`` rows over ``context`` keys, with masking options.

    kind: of the data, a name of ``data.KINDS``; sinks: whether it has them, their values are seeded; alibi: slopes of
    2**-(1 + head % 8); mask: a name of ``data.mask_of``; causal: False where rows see the keys behind them, too.
    """

    shape: AttnShape
    dtype: str
    context: int
    rows: int = 1
    arithmetic: Arithmetic = "canonical"
    kind: str = "normal"
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    alibi: bool = False
    mask: str | None = None
    causal: bool = True

    def __str__(self) -> str:
        numbers = {name: getattr(self, name) for name in _NUMBERS if getattr(self, name) != self._field_defaults[name]}
        said = [f"{name}={str(value).removesuffix('.0')}" for name, value in numbers.items()]
        said += [word for word, (field, value) in _FLAGS.items() if getattr(self, field) == value]
        apart = [word for word in said if word.startswith("rows=") or word in ("matrix", *KINDS)]
        masking = "+".join(word for word in said if word not in apart)
        return " ".join([str(self.shape), self.dtype, str(self.context), *apart, *filter(None, [masking])])

    @classmethod
    def parse(cls, text: str, arithmetic: Arithmetic = "canonical") -> Case:
        """The inverse of ``str``, in any order of the words behind the context. arithmetic: where no word says it."""
        try:
            shape, dtype, context, *words = text.replace("+", " ").split()
            fields = dict(map(_field, words))
            if len(fields) < len(words):
                raise ValueError
        except ValueError:
            raise ArgumentError(
                f"cases: got {shown(text)}, expected SHAPE DTYPE KEYS, then words, each once, of {', '.join(_FLAGS)} "
                "and rows=N, window=KEYS, softcap=X, scale=X (9/3/64 f16 8k rising window=128+sinks)"
            ) from None
        (keys,) = parse_contexts(context)
        check_int("rows", fields.get("rows", 1), 1, keys)
        return cls(AttnShape.parse(shape), storage_dtype(dtype), keys, **{"arithmetic": arithmetic} | fields)

    @classmethod
    def quick(cls, arithmetic: Arithmetic = "canonical") -> list[Case]:
        """The small fixed set."""
        return [cls.parse(text, arithmetic) for text in (MATRIX_QUICK if arithmetic == "matrix" else QUICK)]

    @classmethod
    def default(cls, arithmetic: Arithmetic = "canonical") -> list[Case]:
        """The matrix of shapes, dtypes and contexts, and the fixed cases beside it."""
        return [cls.parse(text, arithmetic) for text in (MATRIX_DEFAULT if arithmetic == "matrix" else DEFAULT)]

    def data(self) -> Data:
        """The case's values."""
        return Data.make(self.shape, self.dtype, self.context, self.kind, self.rows)

    def query(self, data: Data) -> F32:
        """The case's rows of q: (q_heads, head_dim) of one row, (rows, q_heads, head_dim) of more."""
        return data.q[-1] if self.rows == 1 else data.q[-self.rows :]

    def options(self) -> dict[str, Any]:
        """The masking options as ``Attention`` and the oracle take them."""
        sinks = values(f"{self.shape} sinks", (self.shape.q_heads,)) * np.float32(4) if self.sinks else None
        alibi = np.exp2(-(1.0 + np.arange(self.shape.q_heads) % 8)).astype(np.float32) if self.alibi else None
        return {"window": self.window, "softcap": self.softcap, "scale": self.scale, "sinks": sinks, "alibi": alibi}

    def masking(self, rows: int, tokens: int) -> dict[str, Any]:
        """The masking options of a call on the last ``rows`` of ``tokens`` tokens."""
        return {"causal": self.causal, "mask": mask_of(self.mask, rows, tokens) if self.mask else None}

    def same_values(self, data: Data) -> Iterator[tuple[Case, Data]]:
        """The case in each other storage type that must give the same bits, with the values as its cache takes them.

        The canonical arithmetic sees the stored numbers, which f32 holds. Matrix units are fed with float16: types
        count that hold the same numbers, all of which float16 holds, since a device may round others to either side.
        """
        held = data.stored_as(self.dtype)
        if self.arithmetic == "canonical":
            if self.dtype != "f32":
                yield self._replace(dtype="f32"), held
            return
        half = held._replace(k=held.k.astype(np.float16), v=held.v.astype(np.float16))
        for dtype in ("f16", "bf16", "q8_0") if _equal(half, held) else ():
            if dtype != self.dtype and (dtype == "f16" or _holds(dtype, held)):
                yield self._replace(dtype=dtype), half if dtype == "f16" else held


def _field(word: str) -> tuple[str, Any]:
    """A field of ``Case`` and its value. ValueError: no word of a case."""
    if word in _FLAGS:
        return _FLAGS[word]
    name, _, value = word.partition("=")
    if name not in _NUMBERS:
        raise ValueError(word)
    return name, _NUMBERS[name](value)


def _holds(dtype: str, data: Data) -> bool:
    """Whether a cache of ``dtype`` gives back every value."""
    try:
        return _equal(data.stored_as(dtype), data)
    except ArgumentError:  # a value that bf16 does not hold
        return False


def _equal(one: Data, other: Data) -> bool:
    return np.array_equal(one.k, other.k) and np.array_equal(one.v, other.v)
