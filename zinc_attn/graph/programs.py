"""The programs of the graph's kernels for the compiler gate: specialization constants, a line a kernel or more."""

from typing import Final

from ..kernels.matrix import MatrixFragment
from . import declarations as graph
from .pieces import TYPES
from .units import tile_of_units

_F32, _F16, _BF16 = range(3)  # of FLOAT_TYPES and MOVE_TYPES
_WEIGHTS: Final = tuple(enumerate(graph.WEIGHT_TYPES))
# Products of few rows of x, by columns, add and experts, and of many.
_FEW: Final = ((1, 0, 0), (8, 1, 0), (1, 0, 1))
_MANY: Final = ((64, 64, 4, 4, 256, 1, 0), (64, 32, 4, 4, 128, 1, 1))
_BLOCKS: Final = range(graph.MOVE_TYPES.index("q8_0"), len(graph.MOVE_TYPES))  # of MOVE_TYPES


def _unary(op: str, x: int = _F32, y: int = _F32) -> tuple[graph.GraphKernel, tuple[int, ...]]:
    return graph.UNARY, (graph.UNARY_OPS.index(op), x, y, x == y == _F32)


def _units(kind: str) -> tuple[graph.GraphKernel, tuple[int, ...]]:
    tile = tile_of_units(kind, MatrixFragment(16, 16, 16))
    assert tile is not None
    return graph.MUL_MAT_UNITS, (graph.WEIGHT_TYPES.index(kind), *tile, 1, 0)


PROGRAMS: Final[tuple[tuple[graph.GraphKernel, tuple[int, ...]], ...]] = (
    *(_unary(op) for op in ("tanh", "silu", "softplus", "gelu_erf", "sqrt", "sin")),
    *(_unary("gelu", x, x) for x in (_F16, _BF16)),
    *((graph.BINARY, (op, _F32, _F32, _F32)) for op in range(len(graph.BINARY_OPS))),
    (graph.BINARY, (graph.BINARY_OPS.index("div"), _F16, _F32, _F16)),
    *((graph.GLU, (op, _F32)) for op in range(len(graph.GLU_OPS))),
    (graph.GLU_QUANTIZED, (graph.GLU_OPS.index("swiglu"), _F32)),
    (graph.ADD_ID, ()),
    *((graph.NORM, (op, 1, 2, 0)) for op in range(len(graph.NORM_OPS))),
    (graph.NORM, (graph.NORM_OPS.index("rms"), 1, 0, 1)),
    (graph.NORM_QUANTIZED, (graph.NORM_OPS.index("rms"), 1, 1)),
    *((graph.SOFT_MAX, (mask, 1)) for mask in range(len(graph.MASK_TYPES))),
    (graph.SUM_ROWS, ()),
    *((graph.ROPE, (kind,)) for kind in (_F32, _F16)),
    *((graph.MOVE, (op, _F32, kind)) for op in range(len(graph.MOVE_OPS)) for kind in (_F32, _F16)),
    *((graph.MOVE, (0, kind, _F32)) for kind in _BLOCKS),
    *((graph.TO_BLOCKS, (0, _F32, kind)) for kind in _BLOCKS),
    *((graph.SORT, (op, 1, graph.SORT_PIECE)) for op in range(len(graph.SORT_OPS))),
    *((graph.GET_WEIGHTS, (kind,)) for kind in range(len(graph.WEIGHT_TYPES))),
    *((graph.SSM_CONV, (1, 1, normed, 0)) for normed in (0, 1)),
    *((graph.DELTA_NET, (128, rows_each, by_channel, 1)) for rows_each in (1, 4) for by_channel in (0, 1)),
    *(
        (graph.SSM_SCAN, (*sizes, by_element))
        for sizes in ((16, 4), (128, 1), (128, 4), (256, 2))
        for by_element in (0, 1)
    ),
    (graph.FIT, ()),
    *((graph.ROUTE, spec) for spec in ((0, 0, 2, 0), (1, 0, 1, 0), (2, 1, 1, 1))),
    (graph.SUM_EXPERTS, (2,)),
    (graph.NORM_SUMMED, (0, 1, 0, 2)),
    (graph.QUANTIZE, ()),
    *((graph.MUL_MAT_VEC, (i, n, 256, 1, 16, TYPES[kind].ahead, *m, 0)) for i, kind in _WEIGHTS for n, *m in _FEW),
    *((graph.MUL_MAT_VEC, (i, 1, 256, 1, 16, TYPES[kind].ahead, 0, 0, 3)) for i, kind in _WEIGHTS),
    *((graph.MUL_MAT, (i, *many)) for i, _ in _WEIGHTS for many in _MANY),
    *(_units(kind) for kind in graph.WEIGHT_TYPES),
    *((graph.MUL_MAT_FLOAT_VEC, (i, _F32, n, 256, 1, 16, 1, *m, 0)) for i in (_F32, _F16, _BF16) for n, *m in _FEW),
    (graph.MUL_MAT_FLOAT_VEC, (_F32, _F32, 1, 256, 1, 8, 1, 0, 0, 0x358637BD)),
    *((graph.MUL_MAT_FLOAT, (i, _F32, *many)) for i in (_F32, _F16, _BF16) for many in _MANY),
    (graph.BY_EXPERT, ()),
)
