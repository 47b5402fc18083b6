"""The arithmetic of a call: the canonical one, or that of the device's matrix units."""

from typing import Any

from ..cache.rows import Largest
from ..checks import shown
from ..errors import ArgumentError, DTypeError, UnsupportedError, ValueRangeError
from ..kernels.declarations import MATRIX
from ..kernels.matrix import HALF_MAX, matrix_workgroup
from ..planning.arithmetic import ARITHMETICS, EXACT, Arithmetic, check_types
from ..runtime.device import Device, load_spirv
from ..shapes import AttnShape
from ..storage import storage_types


def arithmetic_name(arithmetic: Any) -> Arithmetic:
    """One of ARITHMETICS, before any device is asked."""
    if not isinstance(arithmetic, str) or arithmetic not in ARITHMETICS:
        names = ", ".join(map(repr, ARITHMETICS))
        raise ArgumentError(f"arithmetic: got {shown(arithmetic)}, expected one of {names}")
    return next(name for name in ARITHMETICS if name == arithmetic)


def check_arithmetic(arithmetic: Any, device: Device, dtype: str, *shapes: AttnShape) -> Arithmetic:
    """One of ARITHMETICS that the device can do with K and V of a dtype, and of these shapes."""
    checked = arithmetic_name(arithmetic)
    if checked in EXACT:
        if checked == "fused":
            device.fused_way()  # where it has none, say so now
        check_types(checked, dtype)
        return checked
    facts, what = device.info.matrix, f"arithmetic: got {arithmetic!r}"
    if facts.fragment is None:
        raise UnsupportedError(
            f"{what}, but {device.info.name} ({device.info.driver}) does not offer VK_KHR_cooperative_matrix with "
            "fragments of 8 or 16 float16 and float32 sums; use arithmetic 'canonical'"
        )
    if any(kind.name == "f32" for kind in storage_types(dtype)):
        raise DTypeError(
            f"{what} with K or V in f32, expected a type that float16 holds; use dtype 'f16', to which round_rows=True "
            "rounds a cache's rows, or float16 arrays"
        )
    load_spirv(MATRIX)  # where the package was built without the kernel, say so now
    for shape in shapes:
        if matrix_workgroup(shape, facts, device.info.kind, 1) is None:
            raise UnsupportedError(
                f"{what} for {shape}, whose rows do not fit in {facts.shared_bytes:,} bytes of the shared memory of "
                f"{device.info.name}; use arithmetic 'canonical'"
            )
    return checked


def check_half_range(arithmetic: Arithmetic, largest_q: float, largest: Largest) -> None:
    """Refuse values beyond float16 for matrix units. largest: |k| and |v| of the cache and of new rows."""
    for name, size in (("q", largest_q), ("k", largest.k), ("v", largest.v)):
        if size > HALF_MAX:
            where = "a magnitude" if name == "q" else "a cache with a magnitude"
            raise ValueRangeError(
                f"{name}: got {where} of {size:g} with arithmetic={arithmetic!r}, expected at most {HALF_MAX:g}, the "
                "largest float16; use arithmetic='canonical'"
            )
