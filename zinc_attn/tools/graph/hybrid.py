"""Two layers of a hybrid model with experts, Qwen3.5's and 3.6's: a gated delta net, and full attention.

Operations, shapes and types of weights are those of llama.cpp's graph of qwen35moe and of layers 0 and 3 of its Q4_K_M
file; random numbers stand for the weights and for what comes into the first layer.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...canonical.state import F32
from ...graph.rope import Rope
from . import recurrent
from .model import EPS, TOKENS, Matrix, Weights, attention, hidden, random_matrix, rows_normed
from .recurrent import TAPS

ROUTE_LEAST: Final = 6.103515625e-5  # the least number by which a router divides


@dataclass(frozen=True)
class Sizes:
    hidden: int
    key_heads: int  # of the delta net, of ``state`` channels, as the values' heads
    value_heads: int
    state: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    experts: int
    chosen: int
    width: int  # of an expert, and of the shared expert


HYBRIDS: Final = {
    "qwen35moe": Sizes(256, 2, 4, 64, 4, 2, 64, Rope(16, "imrope", 1e7, sections=(3, 3, 2, 0)), 6, 2, 256),
    "qwen3.6-35b-a3b": Sizes(
        *(2048, 16, 32, 128, 16, 2, 256, Rope(64, "imrope", 1e7, sections=(11, 11, 10, 0)), 256, 8, 512)
    ),
}


class Operations(recurrent.Operations, Protocol):
    def route(self, scores: F32, k: int) -> F32:
        """(tokens, 2 k): the bits of the int32 ids of the k experts, and their weights, of softmax, whose sum is 1."""

    def sum_experts(self, x: F32, weights: F32) -> F32:
        """x (tokens, slots, n) times weights (tokens, slots, 1), summed over the slots."""


def make_layers(name: str) -> tuple[Weights, Weights]:
    """Weights of a delta net and of full attention, each with experts."""
    n, rng = HYBRIDS[name], np.random.default_rng([48, [*HYBRIDS].index(name)])
    values, channels = n.value_heads * n.state, (2 * n.key_heads + n.value_heads) * n.state
    q, kv = n.q_heads * n.head_dim, n.kv_heads * n.head_dim

    def numbers(*shape: int) -> F32:
        return rng.standard_normal(shape, np.float32)

    def norm(size: int = n.hidden) -> F32:
        return np.asarray(1 + numbers(size) / 8, np.float32)

    def weights(rows: int, columns: int = n.hidden, kind: str = "q4_K") -> Matrix:
        matrix = random_matrix(kind, rows, columns, rng)
        if kind == "q4_K":  # values of 0 to 15 are positive, so minima make the mean 0
            scales = matrix.rows.reshape(rows, -1, 144)[..., :4].view(np.float16)
            scales[..., 1] = np.float16(7.5) * scales[..., 0]
        return matrix

    def expert() -> Weights:
        return {"gate": weights(n.width), "up": weights(n.width), "down": weights(n.hidden, n.width, "q6_K")}

    def experts() -> Weights:
        each = [expert() for _ in range(n.experts)]
        whole = {name: np.concatenate([part[name].rows for part in each]) for name in each[0]}
        merged = {name: replace(each[0][name], rows=rows, experts=n.experts) for name, rows in whole.items()}
        merged |= {"router": weights(n.experts, kind="f32"), "share": weights(1, kind="f32"), "shared": expert()}
        return merged | {"before": norm(), "after": norm()}

    net = {"qkv": weights(channels, kind="q6_K"), "z": weights(values), "out": weights(n.hidden, values)}
    net |= {"beta": weights(n.value_heads), "alpha": weights(n.value_heads)}
    floats = {"taps": numbers(channels, TAPS), "norm": norm(n.state), "dt": numbers(1, n.value_heads)}
    floats["a"] = -np.exp(numbers(1, n.value_heads))
    full = {"q": weights(2 * q), "k": weights(kv), "v": weights(kv, kind="q6_K"), "out": weights(n.hidden, q)}
    norms = {"q_norm": norm(n.head_dim), "k_norm": norm(n.head_dim)}
    return net | floats | experts(), full | norms | experts()


def hybrid(name: str, layers: tuple[Weights, Weights], ops: Operations, pieces: tuple[int, ...]) -> F32:
    """(tokens, hidden) after both layers, of random tokens, which come in pieces of these numbers."""
    n, (net, full), first, outputs = HYBRIDS[name], layers, 0, []
    tokens = np.random.default_rng(49).standard_normal((len(TOKENS), n.hidden), np.float32)
    inputs, state = (len(net["taps"]), TAPS - 1), (n.value_heads, n.state, n.state)
    states = [np.zeros(shape, np.float32) for shape in (inputs, state)]
    kv: list[NDArray[Any]] = [np.zeros((0, n.kv_heads, n.head_dim), np.float16)] * 2
    for count in pieces:
        x = _experts(n, net, ops, _delta_net(n, net, ops, tokens[first : first + count], states))
        outputs.append(_experts(n, full, ops, attention(full, ops, x, kv, n.rope)))
        first += count
    return np.concatenate(outputs)


def _delta_net(n: Sizes, w: Weights, ops: Operations, x: F32, states: list[F32]) -> F32:
    """states: the channels' last inputs, and the heads' states."""
    normed = ops.norm(x, w["before"], EPS)
    mixed, z, beta, alpha = (ops.product(w[name], normed) for name in ("qkv", "z", "beta", "alpha"))
    both, keys = np.concatenate([states[0], mixed.T], 1), n.key_heads * n.state
    parts = np.split(ops.convolve(both, w["taps"], np.zeros(len(both), np.float32)), (keys, 2 * keys), 1)
    q, k, v = (np.ascontiguousarray(part).reshape(len(x), -1, n.state) for part in parts)
    q, k = (rows_normed(ops, vectors, None, "l2") for vectors in (q, k))
    gate = ops.binary("mul", ops.unary("softplus", ops.binary("add", alpha, w["dt"])), w["a"])
    result = ops.delta_net(q, k, v, gate[..., None], ops.unary("sigmoid", beta)[..., None], states[1])
    states[:] = both[:, len(x) :], result[v.size :].reshape(states[1].shape)
    y = rows_normed(ops, result[: v.size].reshape(v.shape), w["norm"])
    return ops.product(w["out"], ops.swiglu(z, y.reshape(z.shape)), x)


def _experts(n: Sizes, w: Weights, ops: Operations, x: F32) -> F32:
    normed, shared = ops.norm(x, w["after"], EPS), w["shared"]
    routed = np.split(ops.route(ops.product(w["router"], normed), n.chosen), 2, 1)
    ids, weights = np.ascontiguousarray(routed[0]).view(np.int32), np.ascontiguousarray(routed[1])
    y = ops.sum_experts(ops.product(w["down"], hidden(w, ops, normed, ids), None, ids), weights[..., None])
    share = ops.unary("sigmoid", ops.product(w["share"], normed))
    y = ops.binary("add", y, ops.binary("mul", ops.product(shared["down"], hidden(shared, ops, normed)), share))
    return ops.binary("add", x, y)
