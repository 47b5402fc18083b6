"""A kernel's parameters as a NumPy record."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .declarations import PARAMS_WORDS, Field, GraphKernel
from .params import TENSOR

_TYPES = {"uint": np.uint32, "int": np.int32, "float": np.float32}


def _dtype(fields: tuple[Field, ...]) -> np.dtype[Any]:
    columns: list[Any] = []
    for field in fields:
        kind: Any = _dtype(TENSOR) if field.kind == "tensor" else _TYPES[field.kind]
        columns.append((field.name, kind, (field.count,)) if field.count else (field.name, kind))
    return np.dtype(columns)


def params(kernel: GraphKernel, **values: Any) -> NDArray[np.uint32]:
    """The words of a kernel's parameters, all of them given. A tensor: (offset, n[4], s[4]) in elements of its type."""
    dtype = _dtype(kernel.params)
    if set(values) != set(dtype.names or ()):
        raise ValueError(f"{kernel.name}: got parameters {sorted(values)}, expected {sorted(dtype.names or ())}")
    record = np.zeros(1, dtype)
    for name, value in values.items():
        record[name] = value
    words = record.view(np.uint32)
    return np.concatenate([words, np.zeros(PARAMS_WORDS - words.size, np.uint32)])


def tensor(x: NDArray[Any], offset: int = 0) -> tuple[Any, ...]:
    """The parameter of an array, whose last axis is dimension 0; a strided view's strides are those of its base."""
    n = (*x.shape[::-1], 1, 1, 1)[:4]
    steps = [step // x.itemsize for step in x.strides[::-1]]
    return offset, n, (*steps, *[n[-1]] * 4)[:4]
