"""The scales of a cache's heads, the factors of fp8_e4m3's values."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import check_array
from ..errors import ArgumentError, ShapeError, ValueRangeError
from ..shapes import AttnShape
from ..storage import FP8_UNIT, LEAST_SCALE, MOST_SCALE, storage_types


def check_head_scales(
    dtype: str, shape: AttnShape, num_layers: int, k_scale: Any, v_scale: Any
) -> NDArray[np.float32] | None:
    """(num_layers, 2, kv_heads) float32 scales of K's and V's heads, 1 where none are given.

    None for types without them, which take none: ArgumentError. A latent V has K's. k_scale, v_scale: see ``KVCache``.
    """
    kinds, kv_heads = storage_types(dtype), shape.kv_heads
    if shape.latent and v_scale is not None:
        raise ArgumentError("v_scale: got one for a latent shape, expected None: its V is part of its K")
    scales = np.ones((num_layers, 2, kv_heads), np.float32)
    for index, (name, scale) in enumerate((("k_scale", k_scale), ("v_scale", v_scale))):
        if scale is None:
            continue
        if not kinds[index].head_scale:
            raise ArgumentError(f"{name}: got one for {kinds[index].name}, expected None: only fp8_e4m3 has them")
        array = check_array(name, scale)
        if array.dtype.kind not in "iuf":
            raise ArgumentError(f"{name}: got dtype {array.dtype}, expected numbers")
        if array.shape not in ((), (kv_heads,), (num_layers, 1), (num_layers, kv_heads)):
            raise ShapeError(
                f"{name}: got shape {array.shape}, expected a number, ({kv_heads},), ({num_layers}, 1) or "
                f"({num_layers}, {kv_heads})"
            )
        exact = np.asarray(array, np.float64)
        fits = (exact >= LEAST_SCALE) & (exact <= MOST_SCALE)
        if not np.all(fits):
            where = f"[{', '.join(map(str, np.argwhere(~fits)[0]))}]" if exact.ndim else ""
            raise ValueRangeError(f"{name}{where}: got {exact[~fits][0]:g}, expected a scale from 2**-31 to 2**51")
        scales[:, index] = exact
    if shape.latent:
        scales[:, 1] = scales[:, 0]
    scales.setflags(write=False)
    return scales if any(kind.head_scale for kind in kinds) else None


def kernel_scales(scales: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """The scales (2, kv_heads) of a layer as kernels take them, (2 * kv_heads,), exactly times FP8_UNIT, or None."""
    return None if scales is None else scales.reshape(-1) * np.float32(FP8_UNIT)
