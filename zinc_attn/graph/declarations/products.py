"""Products of matrices: y = w x, or y = w x + added."""

from typing import Final

from ...kernels.declarations import MATRIX, Access
from ...kernels.formulas import Formulas
from .. import pieces
from .declare import OF_BLOCKS, Field, kernel, tensors

WEIGHT_TYPES: Final = tuple(pieces.TYPES)  # specialization constant type

# Rows of float32 values (n[0] a multiple of 32) to q, 8 words of 4 int8 for a block of 32, and scales, 2 words for a
# block: float32 d; the sums of q's first and last 16 as int16. Block 0 of all rows comes first, rows in the order of
# dimensions 1, 2, 3, then block 1, ...; blocks of zeros fill it to a multiple of 8.
QUANTIZE: Final = kernel(
    "quantize", {"x": "read", "q": "write", "scales": "write"}, (), tensors("x"), OF_BLOCKS.format("p.x")
)

_PRODUCT_BINDINGS: Final[dict[str, Access]] = {
    "w": "read",  # quantized weights in layout R32
    "q": "read",  # of quantize, for y.n[1] * y.n[2] * y.n[3] rows
    "scales": "read",
    "added": "read",  # float32; any buffer where the constant add is 0
    "ids": "read",  # of experts; any buffer where the constant experts is 0
    "y": "write",
}
# The fields of experts. y is (rows of w, slots, tokens): ids (slots, tokens) names a matrix of weights a column.
_OF_EXPERTS: Final = (
    Field("x_slots", "uint", "rows of x of a token; slot s has row s mod x_slots"),
    Field("experts", "uint", "number of the first bound expert, bound experts, and all experts", 3),
    *tensors("ids"),
)
_PRODUCT_PARAMS: Final = (
    Field("w_begin", "uint", "where the weights begin in their binding, in units of 16 bytes"),
    Field("w_steps", "uint", "from a matrix of weights to the next in dimensions 2 and 3, in units of 16 bytes", 2),
    Field("repeats", "uint", "planes of y that share a matrix of weights, in dimensions 2 and 3", 2),
    Field("blocks", "uint", "blocks of 32 values of a row of weights"),
    *_OF_EXPERTS,
    *tensors("y", "added"),  # y.n: rows of w, rows of x, planes; added.n is not read, a step is 0 where it repeats
)
# A column of experts is a slot of a token.
_PLANES: Final = "1 if experts else p.y.n[2] * p.y.n[3]"
# Few rows of x.
_VEC_GRID: Final = "ceil_div(p.y.n[0], 32)", "rows(p.y) if experts else ceil_div(p.y.n[1], columns)", _PLANES
_VEC: Final = (
    "type",
    "columns",  # rows of x that a workgroup multiplies, 1 to 8; it divides y.n[1]
    "workgroup_size",  # invocations, 32 for each wave; waves share the superblocks
    "subgroups",  # 1: the driver was asked for subgroups of 32, or has no others
    "superblocks",  # of a round: 128 * columns * superblocks bytes of shared memory; a lone wave uses it for glu alone
    "ahead",  # superblocks that a wave loads before it uses their first pieces, for GPUs; 0: pieces as it uses them
    "add",  # 1: y = w x + added
    "experts",  # 1: y's columns have a matrix each; columns is 1
)
# Any number of rows of x; of experts the tiles of the list that BY_EXPERT makes, which is bound as ids.
_TILE_GRID: Final = (
    "ceil_div(p.y.n[0], tile_rows)",
    "min(elements(p.ids), elements(p.ids) // tile_columns + p.experts[2] + 1) if experts "
    "else ceil_div(p.y.n[1], tile_columns)",
    _PLANES,
)
_TILE: Final = (
    "type",
    "tile_rows",  # of w that a workgroup multiplies
    "tile_columns",  # and rows of x
    "own_rows",  # of tile_rows those of an invocation; for quantized weights a multiple of 4
    "own_columns",
    "workgroup_size",  # tile_rows / own_rows * tile_columns / own_columns
    "add",
    "experts",
)
# All need the device's shaderIntegerDotProduct.
MUL_MAT: Final = kernel("mul_mat", _PRODUCT_BINDINGS, _TILE, _PRODUCT_PARAMS, _TILE_GRID)
# glu: 1 + the GLU_OP swiglu or geglu. w is the gate's matrix, ``added`` the up matrix, which lies in its binding as w
# does. Rows of w are a multiple of 256. y: the GLU's results as QUANTIZE makes int8 of them, q and then the scales. The
# processor, whose code is native, has no such kernel.
MUL_MAT_VEC: Final = kernel("mul_mat_vec", _PRODUCT_BINDINGS, (*_VEC, "glu"), _PRODUCT_PARAMS, _VEC_GRID)
# By int8 matrix units, where the device has them. own_rows and own_columns count matrices of mat_m by mat_n, which a
# subgroup has; workgroup_size is of so many subgroups as the tile needs.
_UNITS: Final = (*_TILE[:-2], "mat_m", "mat_n", "mat_k", *_TILE[-2:])
MUL_MAT_UNITS: Final = kernel("mul_mat_units", _PRODUCT_BINDINGS, _UNITS, _PRODUCT_PARAMS, _TILE_GRID, MATRIX.extension)
# w: (k, rows) and x: (k, columns) of FLOAT_TYPES; a matrix of w serves x.n[2] / w.n[2] planes of x.
# mul_mat_float takes any steps. mul_mat_float_vec wants s[0] = 1, rows that begin on words, and k as FLOAT_VEC says.
_FLOAT_BINDINGS: Final[dict[str, Access]] = {**dict.fromkeys(("w", "x", "added", "ids"), "read"), "y": "write"}
_FLOATS: Final = (*_OF_EXPERTS, *tensors("w", "x", "added", "y"))
_TYPES: Final = "w_type", "x_type"
MUL_MAT_FLOAT: Final = kernel("mul_mat_float", _FLOAT_BINDINGS, (*_TYPES, *_TILE[1:]), _FLOATS, _TILE_GRID)
# rms: the bits of eps; then RMS_NORM of x, a row of float32, times ``added`` stands for x, and of ``added`` offset and
# step in dimension 0 count. 0: x as it is. The processor has no such kernel.
_FLOAT_VEC: Final = (*_TYPES, *_VEC[1:], "rms")
MUL_MAT_FLOAT_VEC: Final = kernel("mul_mat_float_vec", _FLOAT_BINDINGS, _FLOAT_VEC, _FLOATS, _VEC_GRID)
FLOAT_VEC: Final = Formulas({"SERVED": ("K % 8 == 0", ""), "AHEAD": ("K % 64 == 0", "with ahead 1")}, ("K",), {})

# Pairs of a slot and a token, slot + slots * token, by the expert that ids names. list: the expert of each tile, then
# `columns` pairs for each; -1 where there is none. Pairs whose id names no expert get the number after the last's.
EXPERTS_MOST: Final = 1024
BY_EXPERT: Final = kernel(
    "by_expert",
    {"ids": "read", "list": "write"},
    (),
    (
        *tensors("ids"),
        Field("experts", "uint"),
        Field("columns", "uint", "columns of a tile"),
        Field("tiles", "uint", "tiles of the list: pairs / columns + experts + 1 are enough, and so is a tile a pair"),
    ),
    "1",
)
