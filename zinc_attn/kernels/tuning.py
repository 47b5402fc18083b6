"""The variant of a kernel for a call and a kind of device. No choice changes a bit of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import limits
from .families import RDNA, Layout
from .sizes import shared_bytes

if TYPE_CHECKING:
    from ..shapes import AttnShape

SHARED_VECTORS: Final = 16  # query vectors, heads over all rows, that a workgroup of a GPU serves where rows share keys
SHARED_ADDRESSES: Final = 20  # rows and query heads of such a workgroup, in its scalar registers
CPU_WAVE: Final = 8  # invocations of a wave of pass 1 on a CPU device: a subgroup of 256 bits
CPU_SUMS: Final = 128  # of weighted values, in a lane of such a wave: the code of more is beyond an instruction cache
SCRATCH_BYTES: Final = 128 << 20  # partial states of one submission; longer calls go in blocks of rows


def wave_size(least: int, shape: AttnShape, vectors: int, passes: int) -> int:
    """Invocations of a wave of pass 1: ``least`` (of ``DeviceInfo.layout``), twice as many where a lane would have
    more than CPU_SUMS, or 32 where fewer do not suit the shape.

    vectors: query vectors of a workgroup; passes: over V. A CPU's driver loads the query and the weights, which lanes
    have in common, with checks and branches for every subgroup: a smaller wave needs fewer of these loads.
    """
    size = least if vectors * shape.v_dim <= least * CPU_SUMS else 2 * least
    even = shape.v_dim // shape.value_slice % size == 0  # every lane has as many slices of V
    return size if size < limits.WAVE and passes == 1 and even else limits.WAVE


def heads_together(shape: AttnShape, most: int = limits.MAX_HEADS_PER_WORKGROUP, layout: Layout = RDNA) -> int:
    """Query heads of a row that one workgroup of pass 1 serves. most: ``most_heads``.

    A wave without room for all their sums makes several passes over V, so that fewer workgroups convert the same K.
    """
    return -(-shape.group // -(-shape.group // min(most, layout.vectors(shape))))


def most_heads(shape: AttnShape, nodes: int, compute_units: int, shared: int, layout: Layout = RDNA) -> int:
    """Query heads of a row that a workgroup serves at most, in a call of so many nodes of a KV head.

    Twice as many heads convert K half as often. They need shared memory, of which the device has ``shared`` bytes, and
    leave half as many waves on a SIMD, so every compute unit must have a workgroup.
    """
    least, most = limits.MAX_HEADS_PER_WORKGROUP, min(SHARED_VECTORS, layout.vectors(shape))
    pays = shape.group > least and nodes * shape.kv_heads * -(-shape.group // most) >= compute_units
    return most if pays and shared_bytes(shape, most, layout) <= shared else least


def merge_workgroup_size(kind: str) -> int:
    """Invocations of a workgroup of pass 2, by device kind: 8 waves of a GPU have 256 states in flight."""
    return limits.WAVE if kind == "cpu" else 8 * limits.WAVE


def shared_rows(shape: AttnShape, shared: int, most: int = SHARED_VECTORS, layout: Layout = RDNA) -> int:
    """Query rows that one workgroup serves where rows share keys, with ``shared`` bytes of shared memory; 1: none do.

    With more rows, K and V are loaded and converted less often. RDNA's vector registers hold SHARED_VECTORS at half
    the waves per SIMD (sums beyond those of a pass take several passes, each for a part of the head dimensions); its
    scalar registers hold an address for each row and each head. most: query vectors.
    """
    for wanted in (most, limits.MAX_HEADS_PER_WORKGROUP):
        vectors = min(wanted, layout.vectors(shape))
        rows = min(vectors // shape.group, SHARED_ADDRESSES // (shape.group + 1))
        if rows > 1 and shared_bytes(shape, rows * shape.group, layout) <= shared:
            return rows
    return 1
