"""Names, limits and the canonical reduction's constants, declared once for the whole package.

The shaders get these numbers through the generated ``shaders/contract.glsl`` (see ``kernels``), the oracle
imports them. A change of any constant in the section 'canonical reduction' changes output bits everywhere.
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError, DTypeError, ShapeError, ValueRangeError

# --- canonical reduction ----------------------------------------------------------------------------------
LEAF: Final = 64  # keys per leaf; leaves lie at absolute multiples of 64
NODE: Final = 8  # leaves per node; nodes lie at absolute multiples of 512 keys
CHUNK: Final = 8  # head dimensions summed on their own before they join the dot product
KEYS_PER_NODE: Final = NODE * LEAF
LANES: Final = 4  # weight sums c0..c3 of a leaf, keys congruent modulo 4
CUTOFF: Final = -48.0  # powers of two below 2**CUTOFF count as zero
FLUSH: Final = 2.0**-100  # smaller magnitudes of l and o become +0 after each merge
EMPTY_M: Final = -1e30  # m of the empty state; its l and o are 0
# 2**x on [-1/2, 1/2], c0..c6
EXP2_POLY: Final = (
    1.0,
    0.6931471825,
    0.2402264774,
    5.550359935e-2,
    9.618505836e-3,
    1.339080627e-3,
    1.532646274e-4,
)
RCP_SEED: Final = 0x7EF311C3  # 1/x starts from RCP_SEED - bits(x), then three Newton steps
# ln(1+x) = x - x**2/2 + x**3 * (d0 + d1 x + ... + d7 x**7) on [sqrt(1/2) - 1, sqrt(2) - 1]
LN_POLY: Final = (
    0.33333316,
    -0.2500081,
    0.20002286,
    -0.16624554,
    0.14181192,
    -0.13128754,
    0.12881649,
    -0.07859615,
)
LN2_HI: Final = 0.693359375  # nine significant bits, so that exponent * LN2_HI is exact
LN2_LO: Final = -2.12194440e-4
SQRT2: Final = 1.41421354
LOG2E: Final = 1.4426950408889634
# softcap: tanh x = x + x**3 * (e0 + e1 x**2 + ... + e4 x**8) below TANH_SMALL (relative error 3.1e-9), else
# (1 - t) / (1 + t) with t = 2**(-2 |x| log2 e); from TANH_MAX on t counts as zero
TANH_POLY: Final = (-0.333332952, 0.133318363, -0.0537755232, 0.0207654489, -0.00585694142)
TANH_SMALL: Final = 0.6
TANH_MAX: Final = 32.0
MIN_INPUT: Final = 2.0**-40  # smaller float32 inputs are flushed to +0 on entry
MAX_INPUT: Final = 2.0**60  # larger inputs are refused
MAX_SCORE: Final = 2.0**96  # bound on head_dim max|q| max|k| max(1, scale log2 e): scores stay finite and above EMPTY_M

# --- limits -----------------------------------------------------------------------------------------------
HEAD_DIMS: Final = (64, 80, 96, 112, 128, 192, 256, 512)
MAX_GROUP: Final = 16  # query heads per KV head
WAVE: Final = 32  # invocations of every workgroup
MAX_HEADS_PER_WORKGROUP: Final = 8
MAX_ACCUMULATORS: Final = 2048  # head_dim x heads of one workgroup: what the registers of a wave hold
MAX_CONTEXT: Final = 1 << 24  # keys; beyond it, float32 no longer counts weights exactly

DTYPE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}  # per stored K or V value, without q8_0's scales
Q8_BLOCK: Final = 32  # consecutive head dimensions that share a scale in q8_0


@dataclass(frozen=True)
class AttnShape:
    """Heads and head dimension of one attention layer.

    q_heads: query heads; kv_heads: key/value heads, a divisor of q_heads; head_dim: one of HEAD_DIMS.
    Query head ``h`` reads KV head ``h // group``.
    """

    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim"):
            object.__setattr__(self, name, check_int(f"AttnShape.{name}", getattr(self, name), 1))
        if self.head_dim not in HEAD_DIMS:
            there = ", ".join(map(str, HEAD_DIMS))
            raise ArgumentError(f"head_dim: got {shown(self.head_dim)}, expected one of {there}")
        if self.q_heads % self.kv_heads:
            raise ArgumentError(
                f"q_heads: got {shown(self.q_heads)}, expected a multiple of kv_heads = {shown(self.kv_heads)}"
            )
        if self.group > MAX_GROUP:
            raise ArgumentError(
                f"q_heads / kv_heads: got {shown(self.q_heads)}/{self.kv_heads} = {shown(self.group)}, expected at "
                f"most {MAX_GROUP}"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def head_chunks(self) -> int:
        """Workgroups (grid z) that share one KV head, so that the accumulators fit the registers."""
        most = min(MAX_HEADS_PER_WORKGROUP, MAX_ACCUMULATORS // self.head_dim)
        return -(-self.group // most)

    @property
    def heads_per_workgroup(self) -> int:
        """Query heads that one workgroup serves; the last chunk of a group may have fewer."""
        return -(-self.group // self.head_chunks)

    def kv_bytes_per_token(self, dtype: str = "f16") -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.kv_heads * 4 * (value_words(self.head_dim, dtype) + scale_words(self.head_dim, dtype))

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> AttnShape:
        """``"16/2/256"`` to AttnShape(q_heads=16, kv_heads=2, head_dim=256)."""
        numbers = [parse_digits(part) for part in text.split("/")] if isinstance(text, str) else []
        found = [number for number in numbers if number is not None]
        if len(numbers) != 3 or len(found) != 3:
            raise ArgumentError(f"shape: got {shown(text)}, expected q_heads/kv_heads/head_dim, for example 16/2/256")
        return cls(*found)


def dtype_bytes(dtype: str) -> int:
    """Bytes per stored K or V element of a dtype name."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ArgumentError(f"dtype: got {shown(dtype)}, expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def value_words(head_dim: int, dtype: str) -> int:
    """uint32 words of one token's K (or V) values of one KV head."""
    size = dtype_bytes(dtype)
    if dtype == "q8_0" and head_dim % Q8_BLOCK:
        raise ArgumentError(f"dtype: got q8_0 at head_dim {head_dim}, expected a head_dim that is a multiple of 32")
    return head_dim * size // 4


def scale_words(head_dim: int, dtype: str) -> int:
    """uint32 words of one token's q8_0 scales of one KV head: float16, two a word, the last word filled up."""
    return -(-head_dim // (2 * Q8_BLOCK)) if dtype == "q8_0" else 0


# --- arguments ----------------------------------------------------------------------------------------------


def shown(value: object, most: int = 100) -> str:
    """The value's repr for an error's text, cut to ``most`` characters; the type alone where it has none."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print very large ones
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a caller's own class; the refusal must be raised, and not this error in its place
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"
    return text if len(text) <= most else f"{text[:most]}..."


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int within [least, most], or ArgumentError naming ``name``. A bool is no int."""
    try:
        number = operator.index(value)
    except Exception:  # whatever an object that is no integer raises when it is asked to be one
        raise ArgumentError(f"{name}: got {shown(value)}, expected an int") from None
    if isinstance(value, (bool, np.ma.MaskedArray)) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise ArgumentError(f"{name}: got {shown(value)}, expected an int")
    if number < least or (most is not None and number > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{name}: got {shown(number)}, expected an int {bound}")
    return number


def check_float(name: str, value: Any, expected: str = "a finite number") -> float:
    """``value``, a real number, as a float. ArgumentError for anything else, ValueRangeError for NaN and infinities.

    An int, a float, a NumPy number and an array of no axes with a real dtype are numbers; a bool and a text are not.
    """
    is_array = isinstance(value, (np.ndarray, np.generic))
    real = value.ndim == 0 and value.dtype.kind in "iuf" if is_array else isinstance(value, Real)
    if not real or isinstance(value, (bool, np.ma.MaskedArray)):
        raise ArgumentError(f"{name}: got {shown(value)}, expected {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        given = f"{number:g}" if not isinstance(value, int) else shown(value)
        raise ValueRangeError(f"{name}: got {given}, expected {expected}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is True or False, or ArgumentError naming ``name``."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name}: got {shown(value)}, expected True or False")
    return bool(value)


def check_text(name: str, value: Any, expected: str) -> str:
    """``value`` if it is a str, or ArgumentError naming ``name``."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name}: got {shown(value)}, expected {expected}")
    return value


def check_path(name: str, value: Any) -> Path:
    """``value`` as a path that an operating system can take, or ArgumentError naming ``name``."""
    try:
        text = os.fspath(value)
    except Exception:  # whatever an object that is no path raises
        raise ArgumentError(f"{name}: got {shown(value)}, expected a path") from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{name}: got {shown(value)}, expected a path, a str or a pathlib.Path without NUL bytes")
    return Path(text)


def check_array(name: str, value: Any, dtypes: tuple[str, ...] = ()) -> NDArray[Any]:
    """``value`` as an array in this machine's byte order, of one of ``dtypes`` (their names) where some are given.

    Lists, and whatever NumPy reads, become arrays; byte order, strides and the writeable flag do not matter.
    ArgumentError: None, and arrays with a mask, which would be lost; ShapeError: ragged lists; DTypeError.
    """
    if value is None:
        raise ArgumentError(f"{name}: got None, expected an array")
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{name}: got a masked array, expected a plain one; use filled(), or leave the rows out")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{name}: {error}") from error
    except Exception as error:  # whatever the conversion of another library's or of the caller's own class raises
        raise ArgumentError(f"{name}: got a {type(value).__name__}, expected an array: {error}") from error
    if dtypes and array.dtype.name not in dtypes:
        expected = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}" if len(dtypes) > 1 else dtypes[0]
        raise DTypeError(f"{name}: got dtype {array.dtype}, expected {expected}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def parse_digits(text: str) -> int | None:
    """The number that a text of at most 18 ASCII digits says, else None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
