"""The cases of a check: shapes, dtypes, contexts, data kinds and masking options, and which of them a run takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Final, NamedTuple

from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...planning.arithmetic import Arithmetic
from ...shapes import AttnShape, row_format
from ..harness.bits import F32
from ..harness.inputs import parse_contexts
from .data import KINDS, Data
from .masking import Masking

CONTEXTS: Final = "1000,8191,8k,32k,128k"
SHAPES: Final = "16/2/256,32/4/128,9/3/64"
DTYPES: Final = "f32,f16,bf16,q8_0"
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
MASKED: Final = (  # beside the matrix
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
MATRIX_SHAPES: Final = "16/2/256,32/8/128,9/3/64"
MATRIX_CONTEXTS: Final = "1000"
MATRIX_ROWS: Final = (16, 70)
MATRIX_QUICK: Final = (
    *("16/2/256 f16 577 rows=16", "32/8/128 f16 300 rows=17 window=100+sinks"),
    *("9/3/64 f16 1100 rows=70 softcap=20+scale=0.25+sinks", "9/3/64 bf16 700 rows=23 rising window=600"),
    # values that f16, bf16 and q8_0 hold alike
    *("9/3/64 f16 1290 rows=40 coarse", "9/3/64 q8_0 577 rows=16 cancelling"),
    *("9/3/64 f16 600 rows=33 jumping alibi+mask=f16", "2/1/72/40/latent f16 577 rows=16 rising"),
    "6/2/67/133 f16 300 rows=21 rising",  # more subgroups share a strip's V than its K
)
MATRIX_MORE: Final = (
    *("32/8/128 f16 1000 rows=33 rising window=700+sinks", "16/2/256 f16 1000 rows=18 jumping softcap=50"),
    *("16/2/256 q8_0 700 rows=16 coarse", "32/8/128 bf16 600 rows=16 coarse sinks"),
    *("9/3/64 f16 2200 rows=20 falling sinks", "9/3/64 f16 700 rows=50 cancelling mask=f32+noncausal"),
    *("9/3/64 f16 300 rows=70 mask=blind", "9/3/64 f16 902 rows=16 fading", "9/3/64 q5_1/q4_0 577 rows=19"),
    *("128/1/64 f16 200 rows=9 jumping", "20/1/576/512/latent f16 600 rows=16", "32/8/64/192 f16 200 rows=16 sinks"),
)


class Case(NamedTuple):
    """One set of values: the last ``rows`` rows over ``context`` keys. kind: of the data, a name of ``data.KINDS``."""

    shape: AttnShape
    dtype: str
    context: int
    masking: Masking = Masking()
    kind: str = "normal"
    rows: int = 1
    arithmetic: Arithmetic = "canonical"

    def __str__(self) -> str:
        words = [str(self.shape), self.dtype, str(self.context)]
        words += [f"rows={self.rows}"] if self.rows != 1 else []
        words += [self.arithmetic] if self.arithmetic != "canonical" else []
        words += [self.kind] if self.kind != "normal" else []
        words += [str(self.masking)] if self.masking != Masking() else []
        return " ".join(words)

    def data(self) -> Data:
        """The case's values."""
        return Data.make(self.shape, self.dtype, self.context, self.kind, self.rows)

    def query(self, data: Data) -> F32:
        """The case's rows of q: (q_heads, head_dim) of one row, (rows, q_heads, head_dim) of more."""
        return data.q[-1] if self.rows == 1 else data.q[-self.rows :]

    def options(self) -> dict[str, Any]:
        """The masking options as ``Attention`` and the oracle take them."""
        return self.masking.options(self.shape)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of ``str``."""
        shape, dtype, context, *words = text.split()
        rows = int(words.pop(0).removeprefix("rows=")) if words and words[0].startswith("rows=") else 1
        arithmetic: Arithmetic = "canonical"
        if words[:1] == ["matrix"]:
            arithmetic, words = "matrix", words[1:]
        kind = words.pop(0) if words and words[0] in KINDS else "normal"
        masking = Masking.parse(*words or ["none"])
        return cls(AttnShape.parse(shape), dtype, int(context), masking, kind, rows, arithmetic)

    @classmethod
    def matrix(
        cls,
        shapes: str,
        dtypes: str,
        contexts: str,
        masking: str = "none",
        data: str = "normal",
        rows: Sequence[int] = (1,),
        arithmetic: Arithmetic = "canonical",
    ) -> list[Case]:
        """Every combination. ArgumentError for what no kernel serves, and for more rows than keys."""
        parsed = [AttnShape.parse(text.strip()) for text in shapes.split(",")]
        names = [storage_dtype(text.strip()) for text in dtypes.split(",")]
        for shape, dtype in product(parsed, names):
            row_format(shape, dtype)  # refuses a dtype that the shape does not take
        masks = [Masking.parse(text) for text in masking.split(",")]
        kinds = [text.strip() for text in data.split(",")]
        for kind in kinds:
            if kind not in KINDS:
                raise ArgumentError(f"data: got {kind!r}, expected some of {', '.join(KINDS)}")
        keys = parse_contexts(contexts)
        if max(rows) > min(keys):
            raise ArgumentError(f"rows: got {max(rows)} with {min(keys)} keys, expected at most as many rows as keys")
        found = product(parsed, names, keys, masks, kinds, rows, (arithmetic,))
        return list(dict.fromkeys(cls(*one) for one in found))

    @classmethod
    def default(cls, arithmetic: Arithmetic = "canonical") -> list[Case]:
        """The default matrix, and the fixed cases with masking options."""
        if arithmetic == "matrix":
            grid = cls.matrix(MATRIX_SHAPES, "f16", MATRIX_CONTEXTS, rows=MATRIX_ROWS, arithmetic=arithmetic)
            return list(dict.fromkeys((*grid, *cls.quick(arithmetic), *_by_matrix_units(MATRIX_MORE))))
        return list(dict.fromkeys((*cls.matrix(SHAPES, DTYPES, CONTEXTS), *map(cls.parse, MASKED))))

    @classmethod
    def quick(cls, arithmetic: Arithmetic = "canonical") -> list[Case]:
        """The small fixed set."""
        return _by_matrix_units(MATRIX_QUICK) if arithmetic == "matrix" else list(map(cls.parse, QUICK))


def _by_matrix_units(texts: Sequence[str]) -> list[Case]:
    return [Case.parse(text)._replace(arithmetic="matrix") for text in texts]
