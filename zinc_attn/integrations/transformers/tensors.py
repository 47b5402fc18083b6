"""Torch tensors as the NumPy arrays that the package takes, and the checks that come before."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...checks import check_array, check_int, shown
from ...errors import ArgumentError
from .upstream import torch

NAME: Final = "zinc"  # the attn_implementation
ADAPTED: Final = "zinc_adapted"  # that of a model whose attention modules adapt() has changed
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)  # of q, k and v


def dense_tensor(name: str, x: Any) -> Any:
    """Return ``x`` if it is a dense torch tensor of real numbers; otherwise an ArgumentError says what ``name`` is."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype.is_complex or x.is_quantized:
        got = f"a tensor of {x.dtype} and {x.layout}" if isinstance(x, torch.Tensor) else shown(x)
        raise ArgumentError(f"{name}: got {got}, expected a dense torch tensor of real numbers")
    return x


def host_array(x: Any) -> NDArray[Any]:
    """Turn a tensor (batch, heads, n, head_dim) into an array (batch, n, heads, head_dim) with the same words.

    bfloat16 becomes ml_dtypes' bfloat16, which the package takes.
    """
    return check_array("tensor", x.detach().to("cpu").transpose(1, 2).contiguous())


def batch_row_numbers(name: str, numbers: Any) -> list[int]:
    """Return the batch row numbers of a list, or of an array or a tensor with one axis."""
    if not isinstance(numbers, (list, tuple, range, np.ndarray, torch.Tensor)) or getattr(numbers, "ndim", 1) != 1:
        raise ArgumentError(f"{name}: got {shown(numbers)}, expected a list or a tensor of batch row numbers")
    return [check_int(name, i, 0) for i in numbers]
