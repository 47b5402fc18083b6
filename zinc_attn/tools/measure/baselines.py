"""Attention without Vulkan: NumPy, and PyTorch where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...cache.rows import stored
from ...decode.scoring import check_scale
from ..harness.bits import F32
from ..harness.inputs import Inputs
from .calls import Subject
from .rows import Row

MAX_ERROR: Final = {"float32": 1e-4, "float16": 3e-3}  # relative L2 error of a baseline, by what it computes in


def numpy_attention(q: F32, k: F32, v: F32, scale: float) -> F32:
    """(q_heads, v_head_dim) from q (q_heads, head_dim), k (kv_heads, tokens, head_dim) and v (kv_heads, tokens,
    v_head_dim): two matmuls and a softmax."""
    scores = q.reshape(len(k), -1, q.shape[1]) @ k.swapaxes(1, 2) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: F32 = (weights @ v / weights.sum(axis=-1, keepdims=True)).reshape(len(q), -1)
    return out


def _torch_attention(q: F32, k: F32, v: F32, scale: float, dtype: str) -> tuple[str, str, Callable[[], F32]]:
    """(device, version and dtype, call) of scaled_dot_product_attention, on the GPU where torch sees one."""
    torch: Any = importlib.import_module("torch")
    gpu = torch.cuda.is_available()
    kind = torch.float16 if gpu and dtype == "f16" else torch.float32
    arrays = [torch.from_numpy(x)[None].to("cuda" if gpu else "cpu", kind) for x in (q[:, None], k, v)]

    def call() -> F32:
        out = torch.nn.functional.scaled_dot_product_attention(*arrays, scale=scale, enable_gqa=True)
        return np.asarray(out[0, :, 0].float().cpu().numpy(), np.float32)  # waits for the GPU

    where = torch.cuda.get_device_name() if gpu else "CPU"
    return where, f"torch {torch.__version__}, {str(kind).removeprefix('torch.')}", call


def baselines(data: Inputs, dtype: str, want: NDArray[Any]) -> list[Subject]:
    """The baselines on K and V as ``dtype`` stores them, as float32 and contiguous per head.

    want: out of the oracle, or of float64, of the last query heads at least.
    """
    shape, q = data.shape, data.rows[-1]
    scale = check_scale(None, shape.head_dim)
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in stored(data.k, data.v, dtype))
    sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    version = f"NumPy {np.__version__}, float32"
    row = Row("bench", "CPU", version, "numpy", *sizes, dtype, len(data.k), "baseline", device_kind="cpu")
    found: list[tuple[Row, Callable[[], F32]]] = [(row, lambda: numpy_attention(q, k, v, scale))]
    row, refused = replace(row, runtime="torch", driver="torch"), []
    try:
        where, version, torch_call = _torch_attention(q, k, v, scale, dtype)
        found.append((replace(row, device=where, driver=version), torch_call))
    except ModuleNotFoundError:
        refused.append(Subject(row.refused("torch not installed")))
    return [_checked(row, call, want) for row, call in found] + refused


def _checked(row: Row, call: Callable[[], F32], want: NDArray[Any]) -> Subject:
    apart = float(np.linalg.norm(call()[-len(want) :].astype(np.float64) - want) / np.linalg.norm(want))
    if apart <= MAX_ERROR[row.driver.rsplit(" ", 1)[-1]]:
        return Subject(replace(row, verified=f"error {apart:.1e}"), {"call": call})
    return Subject(row.failed(f"relative error {apart:.1e}"))
