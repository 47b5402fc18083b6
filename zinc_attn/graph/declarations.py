"""What the graph's kernels and their callers agree on: bindings, specialization constants and parameters.

Binding 0 of every kernel is its parameters, a record of at most PARAMS_WORDS words. Operands follow, then the result,
which may lie where an operand does unless a kernel says otherwise. GLSL, C and NumPy see the same record:
``params``, ``c`` and ``records`` make theirs of the fields here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..kernels.declarations import Access, Binding, KernelDecl
from . import pieces

Kind = Literal["uint", "int", "float", "tensor"]
PARAMS_WORDS: Final = 64
TENSOR_WORDS: Final = 9  # offset, n[4], s[4]


@dataclass(frozen=True)
class Field:
    """A field of a kernel's parameters; count: of an array, 0 for a single one."""

    name: str
    kind: Kind
    meaning: str = ""
    count: int = 0

    @property
    def words(self) -> int:
        return (TENSOR_WORDS if self.kind == "tensor" else 1) * (self.count or 1)


@dataclass(frozen=True)
class GraphKernel:
    """A kernel of the graph: its declaration, and the fields of its parameters."""

    decl: KernelDecl
    params: tuple[Field, ...]

    @property
    def name(self) -> str:
        return self.decl.name

    @property
    def words(self) -> int:
        return sum(field.words for field in self.params)


def tensors(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "tensor") for name in names)


def kernel(name: str, bindings: dict[str, Access], spec: tuple[str, ...], params: tuple[Field, ...]) -> GraphKernel:
    """A kernel whose source is ``shaders/graph/NAME.comp``."""
    bound = (Binding("params", "read"), *(Binding(one, access) for one, access in bindings.items()))
    made = GraphKernel(KernelDecl(name, f"graph/{name}.comp", bound, spec, module=f"graph_{name}"), params)
    if made.words > PARAMS_WORDS:
        raise ValueError(f"{name}: {made.words} words of parameters, at most {PARAMS_WORDS}")
    return made


# --- element by element -----------------------------------------------------------------------------------------------

FLOAT_TYPES: Final = ("f32", "f16", "bf16")  # what specialization constants type, x_type, ... number
# Grid of these four: x (and y) = elements of y / 256; a 16-bit y has half as many, as an invocation owns a word of it:
# it is contiguous and begins on a word, and where its elements are odd in number, the half behind them stays.
BINARY_OPS: Final = ("add", "sub", "mul", "div")  # specialization constant op
# y = a op b; b's sizes divide a's, and it repeats.
BINARY: Final = kernel(
    "binary",
    {"a": "read", "b": "read", "y": "write"},
    ("op", "a_type", "b_type", "y_type"),
    tensors("a", "b", "y"),
)
UNARY_OPS: Final = (
    *("abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish"),
    *("hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc"),  # ggml's
    *("scale", "clamp", "sqr", "sqrt", "log", "sin", "cos", "leaky_relu", "fill"),
)
# y = op(x). fill reads no x: give y's tensor and buffer.
UNARY: Final = kernel(
    "unary",
    {"x": "read", "y": "write"},
    ("op", "x_type", "y_type"),
    (
        *tensors("x", "y"),
        Field("a", "float", "scale: factor; clamp: minimum; fill: value; leaky_relu: slope below 0; xielu: alpha_n"),
        Field("b", "float", "scale: bias; clamp: maximum; xielu: alpha_p"),
        Field("c", "float", "xielu: beta"),
        Field("d", "float", "xielu: eps"),
    ),
)
GLU_OPS: Final = ("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick", "swiglu_clamp")  # ggml's
# y = act(a) * b; halves of one tensor are two tensors here, and swapped halves are swapped operands.
_GLU_BINDINGS: Final[dict[str, Access]] = {"a": "read", "b": "read", "y": "write"}
_GLU_PARAMS: Final = (
    *tensors("a", "b", "y"),
    Field("alpha", "float", "of swiglu_oai"),
    Field("limit", "float", "of it and _clamp"),
)
GLU: Final = kernel("glu", _GLU_BINDINGS, ("op", "type"), _GLU_PARAMS)
# Results in float32 and, as QUANTIZE makes it of them, as int8.
_AS_INT8: Final[dict[str, Access]] = {"q": "write", "scales": "write"}
# Grid: as QUANTIZE's of y.
GLU_QUANTIZED: Final = kernel("glu_quantized", _GLU_BINDINGS | _AS_INT8, ("op", "type"), _GLU_PARAMS)
# y = a + row ids[i1, i2] of b; float32, ids int32. Grid: x (and y) = elements of y / 256.
ADD_ID: Final = kernel(
    "add_id", {"a": "read", "b": "read", "ids": "read", "y": "write"}, (), tensors("a", "b", "ids", "y")
)

# --- rows -------------------------------------------------------------------------------------------------------------

# Grid of these: x (and y) = rows; a workgroup of 256 has a row.
NORM_OPS: Final = ("rms", "norm", "l2")
# y = norm(x) [* weight] [+ bias], each rounded as its own operation; weight and bias repeat as in BINARY. GROUP_NORM is
# norm of a contiguous x whose dimension 0 is a whole group. Unused bindings: any buffer.
_NORM_BINDINGS: Final[dict[str, Access]] = {"x": "read", "weight": "read", "bias": "read", "y": "write"}
_NORM_PARAMS: Final = (
    *tensors("x", "weight", "bias", "y"),
    Field("eps", "float"),
    Field("factor", "float", "1 / elements of a row, rounded once; not of l2"),
)
NORM: Final = kernel("norm", _NORM_BINDINGS, ("op", "weighted", "biased"), _NORM_PARAMS)
NORM_QUANTIZED: Final = kernel("norm_quantized", _NORM_BINDINGS | _AS_INT8, ("op", "weighted", "biased"), _NORM_PARAMS)
MASK_TYPES: Final = ("none", "f32", "f16")  # specialization constant mask_type
# y = softmax(x * scale + slope * mask) along dimension 0; the mask repeats in dimensions 2 and 3. sinks: float32, one a
# head (dimension 2). The slope of head h is 1 where step is 0, else 2**(step * (h + 1)) for h < heads, and else
# 2**(half_step * (2 * (h - heads) + 1)).
SOFT_MAX: Final = kernel(
    "soft_max",
    {"x": "read", "mask": "read", "sinks": "read", "y": "write"},
    ("mask_type", "has_sinks"),
    (
        *tensors("x", "mask", "y"),
        Field("sinks", "uint", "element of head 0's"),
        Field("scale", "float"),
        Field("step", "float", "-max_bias / heads"),
        Field("half_step", "float", "-max_bias / 2 / heads"),
        Field("heads", "uint", "the largest power of two up to x's dimension 2"),
    ),
)
# y = factor * the sum of a row: of ``terms`` elements of x, counted through its dimensions 0, 1, ... SUM_ROWS: terms is
# x's dimension 0 and factor 1; MEAN: factor 1 / terms, rounded once; SUM: terms is all of x.
SUM_ROWS: Final = kernel(
    "sum_rows",
    {"x": "read", "y": "write"},
    (),
    (*tensors("x", "y"), Field("terms", "uint", "elements of a row"), Field("factor", "float")),
)

# --- rotary positions -------------------------------------------------------------------------------------------------

# y = x with pairs of its dimension 0 turned, the others copied. Type f32 or f16 of both; y as BINARY's where it is f16,
# or in the place of x with any steps between rows; its pairs then are neighbors or a multiple of 2 in number, and
# ``first`` is even. Grid: x (and y) = elements of y / 2 / 256, of f16 whose pairs are no neighbors / 4 / 256.
# table: ROPE_WORDS words a pair, made by graph.rope and za_rope_table.
ROPE_WORDS: Final = 4  # low and high word of the fraction of a turn; which of 4 positions; the factor, a float32
ROPE: Final = kernel(
    "rope",
    {"x": "read", "positions": "read", "table": "read", "y": "write"},
    ("type",),
    (
        *tensors("x", "y"),
        Field("positions", "uint", "element of the first position, an int32"),
        Field("stride", "uint", "from the positions of a section to the next one's: x's dimension 2"),
        Field("table", "uint", "word of the first pair"),
        Field("pairs", "uint", "that turn"),
        Field("first", "uint", "element of the first pair"),
        Field("step", "uint", "from a pair's first element to its second: 1, or pairs"),
        Field("least", "float", "magnitudes of a float32 y below it become +0, as FIT makes them for attention; or 0"),
    ),
)

# --- moves and order --------------------------------------------------------------------------------------------------

MOVE_TYPES: Final = (  # specialization constants source and target
    *("f32", "f16", "bf16", "i32", "i16", "i8"),
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"),  # in ggml's blocks; targets of TO_BLOCKS alone
)
# linear    y's elements are x's, each counted through dimensions 0, 1, ...: CPY, CONT, DUP; CONCAT, an operand at a
#           time, into its part of y; SET, x into all of y, then into its part
# wrap      y[i] = x[(i + shift) mod n]: REPEAT (shift 0), PAD (circular), ROLL; shift[d] < x.n[d]
# pad       y[i] = x[i + shift], 0 where x has no such element: PAD; shift[d] = 2**32 - (elements before x)
# get_rows  y[i, j, k, l] = x[i, ids[j, k, l], k, l]: GET_ROWS; a row that x does not have has all bits set
# set_rows  y[i, ids[j, k mod .., l mod ..], k, l] = x[i, j, k, l]: SET_ROWS; a row that y does not have is not written
MOVE_OPS: Final = ("linear", "wrap", "pad", "get_rows", "set_rows")
_IDS = Field("id_words", "uint", "of an index, and ids' numbers count indices: 1 (i32), 2 (i64)")
# source and target may be of one type, which moves bits (i64: as twice as many i32), or of f32, f16, bf16, i32; or
# source is of blocks: offset and steps of x count half words then, n[0] values, s[0] is a block's.
# Grid: x (and y) = invocations / 256, where a row of y (of set_rows: of x) has n[0] of them if y.s[0] is not 1 and
# else (n[0] + p - 2) / p + 1, p = elements of a word of y: 1, 2, 4. No half of a word beyond y's elements changes.
MOVE: Final = kernel(
    "move",
    {"x": "read", "ids": "read", "y": "write"},
    ("op", "source", "target"),
    (*tensors("x", "ids", "y"), _IDS, Field("shift", "uint", count=4)),
)
# op linear or set_rows, source f32, f16 or bf16, target of blocks: offset and steps of y count half words, n[0] blocks.
# Grid: x (and y) = blocks / 32.
TO_BLOCKS: Final = kernel(
    "to_blocks",
    {"x": "read", "ids": "read", "y": "write"},
    ("op", "source", "target"),
    (*tensors("x", "ids", "y"), _IDS),
)
# Indices of x's elements in order along dimension 0, int32: by value, equal ones by index; NaN are last.
# sort      each piece of ``columns`` candidates of a row by itself; the first ``keep`` of each go to y, piece behind
#           piece. Candidates of a row are its columns, or, of sort_ids, ``count`` indices in ids.
#           Grid: x (and y) = pieces of all rows * columns / SORT_PIECE; columns is a power of two, 2 to SORT_PIECE.
# exchange  compare and exchange in y what is ``distance`` apart, or, with mirror, what has the same distance from the
#           middle of each ``2 * distance``. Grid: x (and y) = rows * ceil(count / (2 * distance)) * distance / 256.
# merge     the same for distances SORT_PIECE / 2 ... 1 in each SORT_PIECE of y. Grid: as sort, columns = SORT_PIECE.
# A row longer than SORT_PIECE: sort with keep = columns = SORT_PIECE; then for size = 2, 4, ... * SORT_PIECE below
# twice its length: exchange with mirror, distance size / 2; exchange, size / 4 ... SORT_PIECE; merge. TOP_K of at most
# SORT_PIECE / 2: sort with keep = k, then sort_ids of what is left, until that is one piece; else ARGSORT and MOVE.
SORT_PIECE: Final = 2048
SORT_OPS: Final = ("sort", "sort_ids", "exchange", "merge")
SORT: Final = kernel(
    "sort",
    {"x": "read", "ids": "read", "y": "write"},
    ("op", "descending", "columns"),
    (
        *tensors("x", "ids", "y"),  # rows of ids and y as x's; their n[0] is not used
        Field("count", "uint", "candidates of a row; of exchange and merge: indices of a row of y"),
        Field("keep", "uint", "of a piece"),
        Field("distance", "uint"),
        Field("mirror", "uint"),
    ),
)
# y = rows ids of w, weights in layout R32, as float32; y[i, j, k, l] = w[i, ids[j, k, l], k, l].
# Grid: x (and y) = elements of y / 256.
GET_WEIGHTS: Final = kernel(
    "get_weights",
    {"w": "read", "ids": "read", "y": "write"},
    ("type",),
    (
        *tensors("ids", "y"),
        Field("offset", "uint", "byte of the first matrix"),
        Field("steps", "uint", "bytes from a matrix to the next of dimensions 2 and 3", 2),
        Field("rows", "uint", "of a matrix"),
        Field("first", "uint", "row that ids call 0"),
    ),
)

# --- products of matrices: y = w x, or y = w x + add ------------------------------------------------------------------

WEIGHT_TYPES: Final = tuple(pieces.TYPES)  # specialization constant type

# Rows of float32 values (n[0] a multiple of 32) to q, 8 words of 4 int8 for a block of 32, and scales, 2 words for a
# block: float32 d; the sums of q's first and last 16 as int16. Block 0 of all rows comes first, rows in the order of
# dimensions 1, 2, 3, then block 1, ...; blocks of zeros fill it to a multiple of 8.
# Grid: x (and y) = blocks * rows / 32.
QUANTIZE: Final = kernel("quantize", {"x": "read", "q": "write", "scales": "write"}, (), tensors("x"))

_PRODUCT_BINDINGS: Final[dict[str, Access]] = {
    "w": "read",  # quantized weights in layout R32
    "q": "read",  # of quantize, for y.n[1] * y.n[2] * y.n[3] rows
    "scales": "read",
    "added": "read",  # float32; any buffer where the constant add is 0
    "y": "write",
}
_PRODUCT_PARAMS: Final = (
    Field("w_begin", "uint", "where the weights begin in their binding, in units of 16 bytes"),
    Field("w_steps", "uint", "from a matrix of weights to the next in dimensions 2 and 3, in units of 16 bytes", 2),
    Field("repeats", "uint", "planes of y that have one matrix of weights, in dimensions 2 and 3", 2),
    Field("blocks", "uint", "of 32 values of a row of weights"),
    *tensors("y", "added"),  # y.n: rows of w, rows of x, planes; added.n is not read, a step is 0 where it repeats
)
# Few rows of x. Grid: x = groups of 32 rows of w, y = rows of x / columns, z = planes of y.
_VEC: Final = (
    "type",
    "columns",  # rows of x that a workgroup multiplies, 1 to 8; it divides y.n[1]
    "workgroup_size",  # invocations, 32 for each wave; waves share the superblocks
    "subgroups",  # 1: the driver was asked for subgroups of 32, or has no others
    "superblocks",  # of a round: 128 * columns * superblocks bytes of shared memory, none of a single wave
    "ahead",  # 1: a wave loads all of a superblock before it uses the first piece, for GPUs
    "add",  # 1: y = w x + added
)
# Any number of rows of x. Grid: x = rows of w / tile_rows, y = rows of x / tile_columns, z = planes of y.
_TILE: Final = (
    "type",
    "tile_rows",  # of w that a workgroup multiplies
    "tile_columns",  # and rows of x
    "own_rows",  # of these an invocation; of quantized weights a multiple of 4
    "own_columns",
    "workgroup_size",  # tile_rows / own_rows * tile_columns / own_columns
    "add",
)
# Both need the device's shaderIntegerDotProduct.
MUL_MAT_VEC: Final = kernel("mul_mat_vec", _PRODUCT_BINDINGS, _VEC, _PRODUCT_PARAMS)
MUL_MAT: Final = kernel("mul_mat", _PRODUCT_BINDINGS, _TILE, _PRODUCT_PARAMS)
# w: (k, rows) and x: (k, columns) of FLOAT_TYPES; a matrix of w serves x.n[2] / w.n[2] planes of x. Grids as above.
# mul_mat_float takes any steps. mul_mat_float_vec wants s[0] = 1, rows that begin on words, and k a multiple of 8, with
# ahead of 64.
_FLOAT_BINDINGS: Final[dict[str, Access]] = {"w": "read", "x": "read", "added": "read", "y": "write"}
_FLOATS: Final = tensors("w", "x", "added", "y")
MUL_MAT_FLOAT: Final = kernel("mul_mat_float", _FLOAT_BINDINGS, ("w_type", "x_type", *_TILE[1:]), _FLOATS)
MUL_MAT_FLOAT_VEC: Final = kernel("mul_mat_float_vec", _FLOAT_BINDINGS, ("w_type", "x_type", *_VEC[1:]), _FLOATS)

# --- attention's operands ---------------------------------------------------------------------------------------------

# y = x where x has an element in dimension 0, else 0; magnitudes below ``least`` become +0. float32, apart from each
# other. What attention reads as q: least is 2**-40; and what a tensor takes of its results: 0.
# Grid: x (and y) = elements of y / 256.
FIT: Final = kernel("fit", {"x": "read", "y": "write"}, (), (*tensors("x", "y"), Field("least", "float")))

GRAPH_KERNELS: Final = tuple(one for one in list(globals().values()) if isinstance(one, GraphKernel))
