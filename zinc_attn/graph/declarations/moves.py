"""Moves of elements and rows, and their order."""

from typing import Final

from .declare import OF_ELEMENTS, Field, kernel, tensors

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
_IDS = Field("id_words", "uint", "words of an index, 1 (i32) or 2 (i64); ids' numbers count indices")
# source and target are one type, whose bits move (i64: as twice as many i32), or two of f32, f16, bf16, i32. Or source
# is a type of blocks: then x's offset and steps count half words, n[0] values, and s[0] is a block's.
# An invocation has an element of a row of y (of set_rows: of x), or, where y.s[0] is 1, a word, of which it writes y's.
_ROWS: Final = f"rows(p.x if op == {MOVE_OPS.index('set_rows')} else p.y)"
_F32, _I32, _I8 = map(MOVE_TYPES.index, ("f32", "i32", "i8"))
_OF_WORD: Final = f"(4 if target == {_I8} else 1 if target == {_F32} or target == {_I32} else 2)"
MOVE: Final = kernel(
    "move",
    {"x": "read", "ids": "read", "y": "write"},
    ("op", "source", "target"),
    (*tensors("x", "ids", "y"), _IDS, Field("shift", "uint", count=4)),
    f"ceil_div({_ROWS} * ((p.y.n[0] + {_OF_WORD} - 2) // {_OF_WORD} + 1 if p.y.s[0] == 1 else p.y.n[0]), 256)",
)
# op linear or set_rows, source f32, f16 or bf16, target of blocks: offset and steps of y count half words, n[0] blocks.
TO_BLOCKS: Final = kernel(
    "to_blocks",
    {"x": "read", "ids": "read", "y": "write"},
    ("op", "source", "target"),
    (*tensors("x", "ids", "y"), _IDS),
    f"ceil_div({_ROWS} * p.y.n[0], 32)",
)
# Indices of x's elements in order along dimension 0, int32: by value, equal ones by index; NaN are last.
# sort      each piece of ``columns`` candidates of a row by itself; the first ``keep`` of each go to y, piece after
#           piece. Candidates of a row are its columns, or, of sort_ids, ``count`` indices in ids.
#           Columns are a power of two, 2 to SORT_PIECE.
# exchange  compare and exchange in y indices that lie ``distance`` apart, or, with mirror, as far before as after the
#           middle of each ``2 * distance``.
# merge     the same for distances SORT_PIECE / 2 ... 1 in each SORT_PIECE of y; columns are SORT_PIECE.
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
        Field("count", "uint", "candidates of a row; for exchange and merge indices of a row of y"),
        Field("keep", "uint", "indices that a piece keeps"),
        Field("distance", "uint"),
        Field("mirror", "uint"),
    ),
    f"ceil_div(rows(p.x) * ceil_div(p.count, 2 * p.distance) * p.distance, 256) if op == {SORT_OPS.index('exchange')} "
    f"else ceil_div(rows(p.x) * ceil_div(p.count, columns) * columns, {SORT_PIECE})",
)
# y = rows ids of w, weights in layout R32, as float32; y[i, j, k, l] = w[i, ids[j, k, l], k, l].
GET_WEIGHTS: Final = kernel(
    "get_weights",
    {"w": "read", "ids": "read", "y": "write"},
    ("type",),
    (
        *tensors("ids", "y"),
        Field("offset", "uint", "byte of the first matrix"),
        Field("steps", "uint", "bytes from a matrix to the next of dimensions 2 and 3", 2),
        Field("rows", "uint", "rows of a matrix"),
        Field("first", "uint", "row that ids call 0"),
    ),
    OF_ELEMENTS,
)
