"""Torch tensors as the arrays that the package takes."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError
from ...shapes import check_int, shown
from .upstream import torch

F32 = NDArray[np.float32]
NAME: Final = "zinc"


_DTYPES: Final = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _tensor(name: str, x: Any) -> Any:
    """``x`` if it is a dense torch tensor of numbers, or ArgumentError naming ``name``."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype.is_complex or x.is_quantized:
        given = f"a tensor of {x.dtype} and {x.layout}" if isinstance(x, torch.Tensor) else shown(x)
        raise ArgumentError(f"{name}: got {given}, expected a dense torch tensor of real numbers")
    return x


def _rows(x: Any, dtype: str) -> NDArray[Any]:
    """(batch, heads, n, head_dim) as an array (batch, n, heads, head_dim) that a cache of ``dtype`` takes.

    bf16: float32 values that bfloat16 holds. A tensor of a wider type is rounded to nearest even.
    """
    x = x.detach().to("cpu")
    if dtype == "f16" or (dtype == "q8_0" and x.dtype == torch.float16):
        x = x.to(torch.float16)
    else:
        x = (x.to(torch.bfloat16) if dtype == "bf16" else x).to(torch.float32)
    array: NDArray[Any] = x.transpose(1, 2).contiguous().numpy()
    return array


def _query(x: Any) -> NDArray[Any]:
    return _rows(x, "f16" if x.dtype == torch.float16 else "f32")


def _row_numbers(name: str, numbers: Any) -> list[int]:
    """Numbers of batch rows, from a list, an array or a tensor of one axis."""
    if not isinstance(numbers, (list, tuple, range, np.ndarray, torch.Tensor)) or getattr(numbers, "ndim", 1) != 1:
        raise ArgumentError(f"{name}: got {shown(numbers)}, expected a list or a tensor of batch row numbers")
    return [check_int(name, i, 0) for i in numbers]
