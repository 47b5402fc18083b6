"""The cases of a check: shapes, dtypes, contexts, data kinds and masking options, and which of them a run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from configparser import ConfigParser
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...canonical.state import F32
from ...checks import check_int, shown
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...planning.arithmetic import EXACT, Arithmetic
from ...shapes import AttnShape
from ..harness.inputs import parse_contexts
from .data import KINDS, MASKS, Data, mask_of, values

_SETS: Final = ConfigParser(allow_no_value=True, delimiters=("|",))  # no line of the file has a value
_SETS.read(Path(__file__).with_name("cases.ini"), encoding="utf-8")


def _cases_of(name: str) -> tuple[str, ...]:
    """The cases of a set in ``cases.ini``."""
    lines = (product(*(word.split(",") for word in line.split())) for line in _SETS[name])
    return tuple(" ".join(words) for line in lines for words in line)


QUICK: Final = _cases_of("quick")
DEFAULT: Final = _cases_of("default")
_OWN: Final = ("integer", "matrix")  # arithmetics that have cases of their own
_APART: Final = ("fused", *_OWN)

_NUMBERS: Final[Mapping[str, Callable[[str], Any]]] = {"rows": int, "window": int, "softcap": float, "scale": float}
_FLAGS: Final[Mapping[str, tuple[str, Any]]] = {  # word to field and value
    **{name: ("arithmetic", name) for name in _APART},
    **{kind: ("kind", kind) for kind in KINDS if kind != "normal"},
    **{"sinks": ("sinks", True), "alibi": ("alibi", True)},
    **{f"mask={kind}": ("mask", kind) for kind in MASKS},
    "noncausal": ("causal", False),
}


class Case(NamedTuple):
    """One set of values: the last ``rows`` rows over ``context`` keys, with masking options.

    kind: of the data, a name of ``data.KINDS``; sinks: whether it has sinks, which are seeded; alibi: slopes of
    2**-(1 + head % 8); mask: a name of ``data.mask_of``; causal: False where rows see the keys after them, too.
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
        apart = [word for word in said if word.startswith("rows=") or word in (*_APART, *KINDS)]
        masking = "+".join(word for word in said if word not in apart)
        return " ".join([str(self.shape), self.dtype, str(self.context), *apart, *filter(None, [masking])])

    @classmethod
    def parse(cls, text: str, arithmetic: Arithmetic = "canonical") -> Case:
        """The inverse of ``str``, in any order of the words after the context. arithmetic: where no word says it."""
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
        texts = _cases_of(f"{arithmetic} quick") if arithmetic in _OWN else QUICK
        return [cls.parse(text, arithmetic) for text in texts]

    @classmethod
    def default(cls, arithmetic: Arithmetic = "canonical") -> list[Case]:
        if arithmetic not in _OWN:
            return [cls.parse(text, arithmetic) for text in DEFAULT]
        return cls.quick(arithmetic) + [cls.parse(text, arithmetic) for text in _cases_of(f"{arithmetic} default")]

    def data(self) -> Data:
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

        f32 holds the numbers that exact arithmetics read from any type; "integer" reads blocks of a single type. Matrix
        units read float16: a case counts if float16 holds all its numbers, since a device may round others either way.
        """
        if self.arithmetic == "integer":
            return
        held = data.stored_as(self.dtype)
        if self.arithmetic in EXACT:
            if self.dtype != "f32":
                yield self._replace(dtype="f32"), held
            return
        half = held._replace(k=held.k.astype(np.float16), v=held.v.astype(np.float16))
        for dtype in ("f16", "bf16", "q8_0") if half.equals(held) else ():
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
        return data.stored_as(dtype).equals(data)
    except ArgumentError:  # a value that bf16 does not hold
        return False
