"""Which arithmetic a call has: the canonical one, or that of the device's matrix units."""

from __future__ import annotations

from typing import Any

from ..cache.rows import Largest
from ..checks import shown
from ..errors import ArgumentError, DTypeError, RuntimeUnavailableError, UnsupportedError, ValueRangeError
from ..kernels.declarations import MATRIX
from ..kernels.matrix import HALF_MAX, matrix_workgroup
from ..planning.call import ARITHMETICS, Arithmetic
from ..runtime.device import Device, load_spirv
from ..shapes import AttnShape
from ..storage import storage_types


def check_arithmetic(arithmetic: Any, device: Device, shape: AttnShape, dtype: str) -> Arithmetic:
    """One of ARITHMETICS that the device can do with K and V of a shape and dtype."""
    if arithmetic not in ARITHMETICS:
        names = ", ".join(map(repr, ARITHMETICS))
        raise ArgumentError(f"arithmetic: got {shown(arithmetic)}, expected one of {names}")
    if arithmetic == "canonical":
        return "canonical"
    facts, what = device.info.matrix, f"arithmetic: got {arithmetic!r}"
    if not device.runtime.has_matrix_units and facts.tile is not None:
        raise RuntimeUnavailableError(f"{what} with runtime {device.runtime.name!r}, expected runtime='vulkan'")
    if facts.tile is None:
        raise UnsupportedError(
            f"{what}, but {device.info.name} ({device.info.driver}) does not offer VK_KHR_cooperative_matrix with "
            "tiles of 8 or 16 float16 and float32 sums; use arithmetic='canonical'"
        )
    if any(kind.name == "f32" for kind in storage_types(dtype)):
        raise DTypeError(
            f"{what} with K or V in f32, expected a type that float16 holds; a cache with dtype='f16', round_rows=True "
            "rounds float32 rows"
        )
    if matrix_workgroup(shape, facts, device.info.kind, 1) is None:
        raise UnsupportedError(
            f"{what} for {shape}, whose rows do not fit in {facts.shared_bytes:,} bytes of the shared memory of "
            f"{device.info.name}; use arithmetic='canonical'"
        )
    load_spirv(MATRIX)  # where the package was built without the kernel, say so now
    return "matrix" if arithmetic == "matrix" else "matrix-prefill"


def check_half_range(arithmetic: Arithmetic, largest_q: float, largest: Largest) -> None:
    """Refuse values beyond those of float16: the largest |q| of a call, and |k| and |v| of the cache with its rows."""
    for name, size in (("q", largest_q), ("k", largest.k), ("v", largest.v)):
        if size > HALF_MAX:
            where = "a magnitude" if name == "q" else "a cache with a magnitude"
            raise ValueRangeError(
                f"{name}: got {where} of {size:g} with arithmetic={arithmetic!r}, expected at most {HALF_MAX:g}, the "
                "largest float16; use arithmetic='canonical'"
            )
