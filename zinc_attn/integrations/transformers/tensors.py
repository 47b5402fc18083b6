"""Torch tensors as the NumPy arrays that the package takes, and the checks that come before."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...checks import check_int, shown
from ...errors import ArgumentError
from .upstream import torch

F32 = NDArray[np.float32]

NAME: Final = "zinc"  # the attn_implementation
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)  # of q, k and v


def dense_tensor(name: str, x: Any) -> Any:
    """Return ``x`` if it is a dense torch tensor of real numbers; otherwise an ArgumentError says what ``name`` is."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype.is_complex or x.is_quantized:
        given = f"a tensor of {x.dtype} and {x.layout}" if isinstance(x, torch.Tensor) else shown(x)
        raise ArgumentError(f"{name}: got {given}, expected a dense torch tensor of real numbers")
    return x


def host_rows(x: Any, dtype: str) -> NDArray[Any]:
    """Turn a tensor (batch, heads, n, head_dim) into an array (batch, n, heads, head_dim) that a ``dtype`` cache takes.

    torch rounds the values of a wider tensor to nearest even. For bf16 the array is float32, of values that bfloat16
    represents exactly; for q8_0 it is float16 or float32, and the cache quantizes it.
    """
    x = x.detach().to("cpu")
    if dtype == "f16" or (dtype == "q8_0" and x.dtype == torch.float16):
        x = x.to(torch.float16)
    else:
        x = (x.to(torch.bfloat16) if dtype == "bf16" else x).to(torch.float32)
    array: NDArray[Any] = x.transpose(1, 2).contiguous().numpy()
    return array


def host_query(x: Any) -> NDArray[Any]:
    """Turn a query (batch, q_heads, n, head_dim) into an array (batch, n, q_heads, head_dim) of float16 or float32."""
    return host_rows(x, "f16" if x.dtype == torch.float16 else "f32")


def batch_row_numbers(name: str, numbers: Any) -> list[int]:
    """Return the batch row numbers of a list, or of an array or a tensor with one axis."""
    if not isinstance(numbers, (list, tuple, range, np.ndarray, torch.Tensor)) or getattr(numbers, "ndim", 1) != 1:
        raise ArgumentError(f"{name}: got {shown(numbers)}, expected a list or a tensor of batch row numbers")
    return [check_int(name, i, 0) for i in numbers]
