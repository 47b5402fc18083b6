"""Attention on a device in one call: NumPy in, NumPy out."""

import os
import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import KVCache
from ..checks import check_array
from ..errors import ArgumentError, DTypeError
from ..planning.arithmetic import Arithmetic
from ..runtime.device import Device
from ..shapes import AttnShape
from .attention import Attention
from .axes import attention_shape

DTYPES: Final = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def check_arrays(q: Any, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any], AttnShape]:
    """k, v, and their shape. ShapeError and DTypeError name the argument."""
    dtypes = ("float32", "float16", "bfloat16")
    qa, ka, va = (check_array(name, x, dtypes) for name, x in (("q", q), ("k", k), ("v", v)))
    shape = attention_shape(qa.shape, ka.shape, va.shape)
    if va.dtype != ka.dtype:
        raise DTypeError(f"v: got dtype {va.dtype}, expected k's {ka.dtype}")
    return ka, va, shape


_default: tuple[int, Device] | None = None
_default_lock = threading.Lock()


def default_device() -> Device:
    """The default device of ``attention``, which stays open; after close() or fork() it is opened again."""
    global _default  # noqa: PLW0603
    with _default_lock:
        if _default is None or _default[0] != os.getpid() or _default[1].closed:
            _default = os.getpid(), Device.open()
        return _default[1]


def attention(  # noqa: PLR0913  (public; all but q, k and v have a default)
    q: Any,
    k: Any,
    v: Any,
    device: Device | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi: Any = None,
    mask: Any = None,
    mask_slopes: Any = None,
    out: Any = None,
    lse: Any = None,
    allow_empty: bool = False,
    arithmetic: Arithmetic = "canonical",
) -> Any:
    """Softmax attention of decode rows on a Vulkan device.

    q: ([q_len,] q_heads, head_dim); k: (tokens, kv_heads, head_dim); v: (tokens, kv_heads, v_head_dim); float32,
    float16 or bfloat16. num_splits or split_size fix the layout (the bits do not depend on it); neither: plan_splits.
    scale: not 0; None is 1 / sqrt(head_dim). causal: row i of q_len sees keys up to position tokens - q_len + i.
    window: a row sees no key before its own position - window + 1 (transformers' sliding_window; FlashInfer's
    window_left + 1). softcap: scores become softcap * tanh(score / softcap). sinks: (q_heads,) float32, a logit per
    query head that joins the softmax without a value (GPT-OSS); lse includes it. alibi, mask_slopes: see ``Attention``;
    mask, out, lse, allow_empty: as in a call of it. arithmetic: as in ``Attention``; "matrix" takes k and v in float16.
    Returns out ([q_len,] q_heads, v_head_dim), and with return_lse also lse ([q_len,] q_heads), natural log; float32.
    ArgumentError and its kinds for wrong arguments, LimitError and DeviceMemoryError where the device has no room.
    Source: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), with the canonical reduction of this package.
    """
    keys, values, shape = check_arrays(q, k, v)
    options: dict[str, Any] = {"num_splits": num_splits, "split_size": split_size, "scale": scale, "window": window}
    options |= {"softcap": softcap, "sinks": sinks, "alibi": alibi, "mask_slopes": mask_slopes}
    call: dict[str, Any] = {"return_lse": return_lse, "out": out, "lse": lse, "mask": mask, "causal": causal}
    with KVCache(_opened(device), shape, 1, max(len(keys), 1), DTYPES[keys.dtype]) as cache:
        new = (keys, values) if len(keys) else ()
        attend, sequence = Attention(cache, arithmetic=arithmetic, **options), cache.new_sequence()
        return attend(q, sequence, 0, *new, allow_empty=allow_empty, **call)


def _opened(device: Device | None) -> Device:
    if device is None:
        return default_device()
    if not isinstance(device, Device):
        raise ArgumentError(f"device: got {type(device).__name__}, expected a Device; see Device.open()")
    return device
