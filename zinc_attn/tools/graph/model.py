"""A random model of two layers, and its forward pass over the operations of an oracle or of a device.

Its layers are Llama's: RMS_NORM, products, ROPE, attention with grouped heads, SWIGLU, residuals. A model with experts
has some of them in place of the feed-forward part, and a token takes those of its largest scores, times these. Every
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
TOKENS: Final = (3, 69, 0, 21, 21, 40)
# Where the float16 numbers of a block lie.
HALVES: Final = {
    **{kind: (0, 2) for kind in ("q4_1", "q5_1", "q4_K", "q5_K")},
    **{kind: (0,) for kind in ("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs")},
    **{"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,)},
}


@dataclass(frozen=True)
class Matrix:
    """Weights: ggml's bytes of its rows, (rows, bytes of a row); those of experts behind each other."""

    kind: str
    rows: NDArray[np.uint8]
    columns: int
    experts: int = 1

    def split(self) -> list[Matrix]:
        """Those of the experts."""
        return [Matrix(self.kind, rows, self.columns) for rows in np.split(self.rows, self.experts)]

    def floats(self) -> F32:
        """(rows, columns) of a float type."""
        if self.kind == "bf16":
            return (self.rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.rows.view(np.float16 if self.kind == "f16" else np.float32).astype(np.float32)


@dataclass(frozen=True)
class Layer:
    attention_norm: F32
    q: Matrix
    k: Matrix
    v: Matrix
    out: Matrix
    norm: F32
    gate: Matrix
    up: Matrix
    down: Matrix
    router: Matrix | None = None


@dataclass(frozen=True)
class Model:
    kind: str
    embedding: Matrix
    layers: tuple[Layer, ...]
    norm: F32
    output: Matrix


class Operations(Protocol):
    """What a forward pass is made of. x: (tokens, n) float32; added: joins a product as its last sum.

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
    one = blocks.decode(kind, whole.reshape(rows, -1))  # integers do not depend on the float16 numbers
    scale = wanted / float(np.std(one.q * (1 if one.scales is None else np.repeat(one.scales, 16, -1))))
    for at in HALVES[kind]:
        drawn = (scale * rng.uniform(0.5, 1.5, whole.shape[:2])).astype(np.float16)
        whole[..., at : at + 2] = drawn[..., None].view(np.uint8)
    return Matrix(kind, whole.reshape(rows, -1), columns)


def make_model(name: str) -> Model:
    """One of KINDS, the type of its weights, or of its weights and experts."""
    rng, kind = np.random.default_rng([46, KINDS.index(name)]), WITH_EXPERTS.get(name, name)

    def weights(rows: int, columns: int = WIDTH) -> Matrix:
        return random_matrix(kind, rows, columns, rng)

    def norms() -> F32:
        return np.asarray(1 + rng.standard_normal(WIDTH, np.float32) / 8, np.float32)

    def layer() -> Layer:
        q, kv = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        attention = norms(), weights(q), weights(kv), weights(kv), weights(WIDTH, q)
        if name not in WITH_EXPERTS:
            return Layer(*attention, norms(), weights(HIDDEN), weights(HIDDEN), weights(WIDTH, HIDDEN))
        gate, up, down = (replace(weights(EXPERTS * WIDTH), experts=EXPERTS) for _ in range(3))
        return Layer(*attention, norms(), gate, up, down, random_matrix("f32", EXPERTS, WIDTH, rng))

    layers = tuple(layer() for _ in range(LAYERS))
    return Model(name, weights(VOCABULARY), layers, norms(), weights(VOCABULARY))


def logits(model: Model, of: Operations, pieces: tuple[int, ...] = (len(TOKENS),)) -> F32:
    """(tokens, vocabulary) of TOKENS, which come in pieces of these numbers of tokens."""
    cache: list[list[NDArray[Any]]] = [[np.zeros((0, KV_HEADS, HEAD_DIM), np.float16)] * 2 for _ in model.layers]
    made, first = [], 0
    for count in pieces:
        positions = np.arange(first, first + count, dtype=np.int32)
        x = of.embed(model.embedding, np.array(TOKENS[first : first + count], np.int32))
        for layer, kv in zip(model.layers, cache, strict=True):
            x = _layer(layer, of, x, positions, kv)
        made.append(of.product(model.output, of.norm(x, model.norm, EPS)))
        first += count
    return np.concatenate(made)


def _layer(layer: Layer, of: Operations, x: F32, positions: NDArray[np.int32], kv: list[NDArray[Any]]) -> F32:
    normed = of.norm(x, layer.attention_norm, EPS)
    q, k, v = (of.product(one, normed).reshape(len(x), -1, HEAD_DIM) for one in (layer.q, layer.k, layer.v))
    q, k = of.rope(q, positions, ROPE), of.rope(k, positions, ROPE)
    kv[:] = [np.concatenate([old, encoded(new, "f16")]) for old, new in zip(kv, (k, v), strict=True)]
    attended = of.attend(q, kv[0], kv[1]).reshape(len(x), -1)
    x = of.product(layer.out, attended, x)
    normed = of.norm(x, layer.norm, EPS)
    if layer.router:
        scores = of.product(layer.router, normed)
        ids = np.ascontiguousarray(order.top_k(scores, CHOSEN))
        hidden = of.swiglu(of.product(layer.gate, normed, None, ids), of.product(layer.up, normed, None, ids))
        made, weights = of.product(layer.down, hidden, None, ids), np.take_along_axis(scores, ids, 1)
        for slot in range(CHOSEN):
            weighed = of.binary("mul", np.ascontiguousarray(made[:, slot]), weights[:, slot : slot + 1].copy())
            x = of.binary("add", x, weighed)
        return x
    hidden = of.swiglu(of.product(layer.gate, normed), of.product(layer.up, normed))
    return of.product(layer.down, hidden, x)
