"""A random model of two layers, and its forward pass over the operations of an oracle or of a device.

Its layers are Llama's: RMS_NORM, products, ROPE, attention with grouped heads, SWIGLU, residuals. A model with experts
has them in place of the feed-forward part: a token takes the experts of its largest scores, times these scores. Every
number follows from a model's name, so two machines have the same model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...canonical.state import F32
from ...graph import blocks, order
from ...graph.declarations import FLOAT_TYPES, WEIGHT_TYPES
from ...graph.elementwise import encoded
from ...graph.pieces import TYPES
from ...graph.rope import Rope

TYPES_OF_WEIGHTS: Final = (*WEIGHT_TYPES, *FLOAT_TYPES)
WITH_EXPERTS: Final = {f"{kind} experts": kind for kind in ("q4_K", "mxfp4", "f16")}
KINDS: Final = (*TYPES_OF_WEIGHTS, *WITH_EXPERTS)
EXPERTS: Final = 6
CHOSEN: Final = 2
LAYERS: Final = 2
WIDTH: Final = 256  # of a token's activations; Q4_K and its like have blocks of 256
HIDDEN: Final = 512  # of the feed-forward part
Q_HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
VOCABULARY: Final = 70  # no multiple of 32 rows
EPS: Final = 1e-5
ROPE: Final = Rope(HEAD_DIM, "neox")
Weights = dict[str, Any]  # a layer's: Matrix, or float32 numbers
TOKENS: Final = (3, 69, 0, 21, 21, 40)
# The places of a block's float16 numbers.
HALVES: Final = {
    **{kind: (0, 2) for kind in ("q4_1", "q5_1", "q4_K", "q5_K")},
    **{kind: (0,) for kind in ("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs")},
    **{"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,)},
}


@dataclass(frozen=True)
class Matrix:
    """Weights: ggml's bytes of its rows, (rows, bytes of a row); experts' matrices follow each other."""

    kind: str
    rows: NDArray[np.uint8]
    columns: int
    experts: int = 1

    def split(self) -> list[Matrix]:
        """The matrix of each expert."""
        return [Matrix(self.kind, rows, self.columns) for rows in np.split(self.rows, self.experts)]

    def floats(self) -> F32:
        """(rows, columns) of a float type."""
        if self.kind == "bf16":
            return (self.rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.rows.view(np.float16 if self.kind == "f16" else np.float32).astype(np.float32)


class Operations(Protocol):
    """The operations of a forward pass. x: (tokens, n) float32; added: joins a product as its last sum.

    ids (tokens, slots): experts whose products with x, (tokens, n) or (tokens, slots, n), are (tokens, slots, rows).
    """

    def embed(self, weights: Matrix, tokens: NDArray[np.int32]) -> F32: ...

    def norm(self, x: F32, weight: F32 | None, eps: float, op: str = "rms") -> F32: ...

    def product(
        self, weights: Matrix, x: F32, added: F32 | None = None, ids: NDArray[np.int32] | None = None
    ) -> F32: ...

    def rope(self, x: F32, positions: NDArray[np.int32], way: Rope) -> F32:
        """x: (tokens, heads, head_dim)."""

    def attend(self, q: F32, k: NDArray[np.float16], v: NDArray[np.float16]) -> F32:
        """q: (tokens, heads, head_dim), the last tokens of k and v (all tokens, KV heads, head_dim)."""

    def swiglu(self, gate: F32, up: F32) -> F32: ...

    def unary(self, op: str, x: F32) -> F32: ...

    def binary(self, op: str, a: F32, b: F32) -> F32:
        """b's sizes divide a's, and it repeats."""


def random_matrix(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    """Random weights of a standard deviation of about 1 / sqrt(columns)."""
    wanted = columns**-0.5
    if kind in FLOAT_TYPES:
        numbers = encoded(rng.standard_normal((rows, columns), np.float32) * np.float32(wanted), kind)
        return Matrix(kind, numbers.view(np.uint8), columns)
    whole = rng.integers(0, 256, (rows, columns // TYPES[kind].values, TYPES[kind].size), np.uint8)
    if kind == "mxfp4":  # its table's standard deviation is about 5, and 2**-7 times it 1 / sqrt(512)
        whole[..., 0] = rng.integers(120, 123, whole.shape[:2])
        return Matrix(kind, whole.reshape(rows, -1), columns)
    decoded = blocks.decode(kind, whole.reshape(rows, -1))  # integers do not depend on the float16 numbers
    scale = wanted / float(np.std(decoded.q * (1 if decoded.scales is None else np.repeat(decoded.scales, 16, -1))))
    for offset in HALVES[kind]:
        drawn = (scale * rng.uniform(0.5, 1.5, whole.shape[:2])).astype(np.float16)
        whole[..., offset : offset + 2] = drawn[..., None].view(np.uint8)
    return Matrix(kind, whole.reshape(rows, -1), columns)


def make_model(name: str) -> Weights:
    """The model ``name``, one of KINDS: the type of its weights, with or without experts."""
    rng, kind = np.random.default_rng([46, KINDS.index(name)]), WITH_EXPERTS.get(name, name)

    def weights(rows: int, columns: int = WIDTH) -> Matrix:
        return random_matrix(kind, rows, columns, rng)

    def norms() -> F32:
        return np.asarray(1 + rng.standard_normal(WIDTH, np.float32) / 8, np.float32)

    def layer() -> Weights:
        q, kv = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        w: Weights = {"before": norms(), "q": weights(q), "k": weights(kv), "v": weights(kv), "out": weights(WIDTH, q)}
        if name not in WITH_EXPERTS:
            w |= {"after": norms(), "gate": weights(HIDDEN), "up": weights(HIDDEN)}
            return w | {"down": weights(WIDTH, HIDDEN)}
        w |= {part: replace(weights(EXPERTS * WIDTH), experts=EXPERTS) for part in ("gate", "up", "down")}
        return w | {"after": norms(), "router": random_matrix("f32", EXPERTS, WIDTH, rng)}

    layers = [layer() for _ in range(LAYERS)]
    return {"layers": layers, "embedding": weights(VOCABULARY), "norm": norms(), "output": weights(VOCABULARY)}


def logits(model: Weights, ops: Operations, pieces: tuple[int, ...]) -> F32:
    """(tokens, vocabulary) of TOKENS, which come in pieces of these numbers of tokens."""
    cache: list[list[NDArray[Any]]] = [[np.zeros((0, KV_HEADS, HEAD_DIM), np.float16)] * 2 for _ in model["layers"]]
    outputs, first = [], 0
    for count in pieces:
        x = ops.embed(model["embedding"], np.array(TOKENS[first : first + count], np.int32))
        for layer, kv in zip(model["layers"], cache, strict=True):
            x = _feed_forward(layer, ops, attention(layer, ops, x, kv, ROPE))
        outputs.append(ops.product(model["output"], ops.norm(x, model["norm"], EPS)))
        first += count
    return np.concatenate(outputs)


def attention(w: Weights, ops: Operations, x: F32, kv: list[NDArray[Any]], way: Rope) -> F32:
    """x plus its attention. kv: K and V of the tokens so far, to which this adds those of x.

    With norms of q and k, each head of q is followed by its gate.
    """
    normed, (before, _, size) = ops.norm(x, w["before"], EPS), kv[0].shape
    q, k, v = (ops.product(w[name], normed).reshape(len(x), -1, size) for name in ("q", "k", "v"))
    gate, positions = None, np.arange(before, before + len(x), dtype=np.int32)
    if "q_norm" in w:
        q, gate = (np.ascontiguousarray(q[:, first::2]) for first in (0, 1))
        q, k = rows_normed(ops, q, w["q_norm"]), rows_normed(ops, k, w["k_norm"])
    q, k = ops.rope(q, positions, way), ops.rope(k, positions, way)
    kv[:] = [np.concatenate([old, encoded(new, "f16")]) for old, new in zip(kv, (k, v), strict=True)]
    y = ops.attend(q, kv[0], kv[1])
    y = y if gate is None else ops.binary("mul", y, ops.unary("sigmoid", gate))
    return ops.product(w["out"], y.reshape(len(x), -1), x)


def rows_normed(ops: Operations, x: F32, weight: F32 | None, op: str = "rms") -> F32:
    return ops.norm(x.reshape(-1, x.shape[-1]), weight, EPS, op).reshape(x.shape)


def hidden(w: Weights, ops: Operations, x: F32, ids: NDArray[np.int32] | None = None) -> F32:
    """The hidden numbers of a feed-forward part; ids: of experts."""
    return ops.swiglu(ops.product(w["gate"], x, None, ids), ops.product(w["up"], x, None, ids))


def _feed_forward(w: Weights, ops: Operations, x: F32) -> F32:
    normed = ops.norm(x, w["after"], EPS)
    if "router" not in w:
        return ops.product(w["down"], hidden(w, ops, normed), x)
    scores = ops.product(w["router"], normed)
    ids = np.ascontiguousarray(order.top_k(scores, CHOSEN))
    products = ops.product(w["down"], hidden(w, ops, normed, ids), None, ids)
    weights = np.take_along_axis(scores, ids, 1)
    for slot in range(CHOSEN):
        weighed = ops.binary("mul", np.ascontiguousarray(products[:, slot]), weights[:, slot : slot + 1].copy())
        x = ops.binary("add", x, weighed)
    return x
