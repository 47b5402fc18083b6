"""The names of storage types, as callers give them."""

from typing import Final

import numpy as np

from .checks import shown
from .errors import ArgumentError
from .storage import STORAGE

_ALIASES: Final = {  # the names of NumPy, ml_dtypes and torch
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3",
}
EXPECTED: Final = f"one of {', '.join(STORAGE)}, or two of them for K and V, for example q8_0/q4_0"


def storage_dtype(dtype: object) -> str:
    """The name of the storage types of K and V: ``"f16"``, or ``"q8_0/q4_0"`` where V's type is not K's.

    dtype: such a name, or a pair of types for K and V. A type is a name of ``STORAGE``, or the name or dtype of NumPy,
    ml_dtypes or torch ("float16", np.float16, torch.bfloat16). ArgumentError: anything else.
    """
    if isinstance(dtype, str) and dtype in STORAGE:
        return dtype  # nearly always
    pair = tuple(dtype.split("/")) if isinstance(dtype, str) and "/" in dtype else dtype
    names = [_name(part) for part in pair] if isinstance(pair, (tuple, list)) else [_name(pair)]
    if len(names) != 1 + isinstance(pair, (tuple, list)) or None in names:
        raise ArgumentError(f"dtype: got {shown(dtype)}, expected {EXPECTED}")
    return "/".join(str(name) for name in dict.fromkeys(names))


def _name(dtype: object) -> str | None:
    name = dtype
    if isinstance(dtype, np.dtype):
        name = dtype.name
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = np.dtype(dtype).name
    elif type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        name = str(dtype).removeprefix("torch.")
    if not isinstance(name, str):
        return None
    name = _ALIASES.get(name, name)
    return name if name in STORAGE else None
