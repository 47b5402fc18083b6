"""Recurrent layers: a convolution over tokens, and states that tokens change one after another."""

from typing import Final

from ..constants import STATE_LANES
from .declare import Field, kernel, tensors

# y[c, t, s] = the sum of x[t + i, c, s] * w[i, c], then [+ bias], then [silu], each as an operation of its own; y is
# contiguous. ``late`` continues x, as CONCAT along dimension 0 does. Unused bindings: any buffer.
# normed: first and second are RMS_NORM or L2_NORM (op) and SCALE of y's rows of ``size`` channels from begins to ends,
# contiguous; there is one token, and channels are a multiple of 256. An invocation has a channel's run of tokens.
SSM_CONV: Final = kernel(
    "ssm_conv",
    {"x": "read", "late": "read", "w": "read", "bias": "read", "y": "write", "first": "write", "second": "write"},
    ("biased", "silu", "normed", "op"),
    (
        *tensors("x", "late", "w", "bias", "y"),
        Field("run", "uint", "neighboring tokens of an invocation"),
        Field("size", "uint", "a power of two up to 256"),
        Field("begins", "uint", "channels, multiples of size", 2),
        Field("ends", "uint", "", 2),
        Field("offsets", "uint", "elements where first and second begin", 2),
        Field("scales", "float", "of SCALE", 2),
        Field("eps", "float"),
        Field("factor", "float", "1 / size"),
    ),
    "ceil_div(p.y.n[0] * ceil_div(p.y.n[1], p.run) * p.y.n[2], 256)",
)
# A kernel writes, apart from each other, the outputs of all tokens, contiguous, and the states after the last tokens:
# slot 0 after the last token, slot 1 after the token before, ..., as many as there are tokens, and at most ``slots``.
_WRITTEN: Final = (
    Field("outputs", "uint", "element of the first output"),
    Field("kept", "uint", "element of the first state of slot 0"),
    Field("steps", "uint", "steps from a kept state to the next sequence's, and to the next slot's", 2),
    Field("slots", "uint"),
)
# A gated delta net: rows of a state are its columns S[:, j]; q, k of head h are those of head h mod theirs. named: ids
# name the sequences' states, else state has one for each, and ids may be any buffer.
_OF_STATES: Final = ("size", "own")  # elements of a row; rows of a lane
# Lanes that share a row of ``size`` elements; a lane has four neighbors at least.
LANES_OF_STATE: Final = f"({STATE_LANES} if size > 16 else 4 if size > 8 else 2 if size > 4 else 1)"
_PIECES: Final = f"ceil_div({{}}, own * 32 // {LANES_OF_STATE})"  # workgroups for so many rows
DELTA_NET: Final = kernel(
    "delta_net",
    {
        "q": "read", "k": "read", "v": "read", "gate": "read", "beta": "read", "state": "read", "ids": "read",
        "outputs": "write", "kept": "write",
    },
    (*_OF_STATES, "by_channel", "named"),  # by_channel: whether each element of a row has a gate of its own
    (
        *tensors("q", "k", "v", "gate", "beta", "state"),
        Field("ids", "uint"),
        *_WRITTEN,
        Field("scale", "float", "of the outputs"),
    ),
    (_PIECES.format("size"), "p.v.n[1]", "p.v.n[3]"),
)  # fmt: skip
# A selective scan; a head has x.n[0] rows, neighbors in x; ids name the sequences' states; a is contiguous, and groups
# of b and c are neighbors. Without by_element own divides x.n[0].
SSM_SCAN: Final = kernel(
    "ssm_scan",
    {
        "state": "read", "x": "read", "dt": "read", "a": "read", "b": "read", "c": "read", "ids": "read",
        "outputs": "write", "kept": "write",
    },
    (*_OF_STATES, "by_element"),  # whether each element of a row has a decay of its own
    (*tensors("state", "x", "dt", "b", "c"), Field("a", "uint"), Field("ids", "uint"), *_WRITTEN),
    (_PIECES.format("p.x.n[0] * p.x.n[1] // p.b.n[1]"), "p.b.n[1]", "p.x.n[3]"),
)  # fmt: skip
