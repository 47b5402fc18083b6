"""Two layers of a hybrid model with experts, Qwen3.5's and 3.6's: a gated delta net, and full attention.

Operations, shapes and types of weights are those of llama.cpp's graph of qwen35moe and of layers 0 and 3 of its Q4_K_M
file; random numbers stand for the weights and for what comes into the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...canonical.state import F32
from ...graph.elementwise import encoded
from ...graph.rope import Rope
from . import model, recurrent
from .model import EPS, TOKENS, Matrix, random_matrix
from .recurrent import TAPS

ROUTE_LEAST: Final = 6.103515625e-5  # by which a router divides, at least
Weights = dict[str, Any]  # Matrix, or float32 numbers


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
    width: int  # of an expert, and of the one that all tokens take


HYBRIDS: Final = {
    "qwen35moe": Sizes(256, 2, 4, 64, 4, 2, 64, Rope(16, "imrope", 1e7, sections=(3, 3, 2, 0)), 6, 2, 256),
    "qwen3.6-35b-a3b": Sizes(
        *(2048, 16, 32, 128, 16, 2, 256, Rope(64, "imrope", 1e7, sections=(11, 11, 10, 0)), 256, 8, 512)
    ),
}


class Operations(model.Operations, recurrent.Operations, Protocol):
    """What the layers are made of."""

    def route(self, scores: F32, k: int) -> F32:
        """(tokens, 2 k): the bits of the int32 ids of the k experts, and their weights, of softmax, whose sum is 1."""

    def sum_experts(self, x: F32, weights: F32) -> F32:
        """x (tokens, slots, n) times weights (tokens, slots, 1), summed over the slots."""


def make_layers(name: str) -> tuple[Weights, Weights]:
    """Weights of a delta net and of full attention, each with experts."""
    n, rng = HYBRIDS[name], np.random.default_rng([48, [*HYBRIDS].index(name)])
    keys, values = n.key_heads * n.state, n.value_heads * n.state

    def numbers(*shape: int) -> F32:
        return rng.standard_normal(shape, np.float32)

    def norm(size: int) -> F32:
        return np.asarray(1 + numbers(size) / 8, np.float32)

    def weights(rows: int, columns: int = n.hidden, kind: str = "q4_K") -> Matrix:
        made = random_matrix(kind, rows, columns, rng)
        if kind == "q4_K":  # values of 0 to 15 are positive, so minima make the mean 0
            scales = made.rows.reshape(rows, -1, 144)[..., :4].view(np.float16)
            scales[..., 1] = np.float16(7.5) * scales[..., 0]
        return made

    def feed_forward(size: int) -> dict[str, Matrix]:
        return {"gate": weights(size), "up": weights(size), "down": weights(n.hidden, size, "q6_K")}

    def layer(**own: Any) -> Weights:
        each = [feed_forward(n.width) for _ in range(n.experts)]
        joined = {one: np.concatenate([of[one].rows for of in each]) for one in each[0]}
        return {
            **{"before": norm(n.hidden), **own, "behind": norm(n.hidden), "router": weights(n.experts, kind="f32")},
            **{one: replace(each[0][one], rows=rows, experts=n.experts) for one, rows in joined.items()},
            **{"share": weights(1, kind="f32"), "shared": feed_forward(n.width)},
        }

    net = {"qkv": weights(2 * keys + values, kind="q6_K"), "z": weights(values), "out": weights(n.hidden, values)}
    net |= {"beta": weights(n.value_heads), "alpha": weights(n.value_heads)}
    floats = {"taps": numbers(2 * keys + values, TAPS), "dt": numbers(1, n.value_heads), "norm": norm(n.state)}
    heads, kv_heads = n.q_heads * n.head_dim, n.kv_heads * n.head_dim
    full = {"q": weights(2 * heads), "k": weights(kv_heads), "v": weights(kv_heads, kind="q6_K")}
    norms = {"q_norm": norm(n.head_dim), "k_norm": norm(n.head_dim)}
    return (
        layer(**net, **floats, a=-np.exp(numbers(1, n.value_heads))),
        layer(**full, **norms, out=weights(n.hidden, heads)),
    )


def hybrid(name: str, layers: tuple[Weights, Weights], of: Operations, pieces: tuple[int, ...]) -> F32:
    """(tokens, hidden) behind both layers, of random tokens, which come in pieces of these numbers."""
    n, (net, full), first, made = HYBRIDS[name], layers, 0, []
    tokens = np.random.default_rng(49).standard_normal((len(TOKENS), n.hidden), np.float32)
    states = [
        np.zeros((len(net["taps"]), TAPS - 1), np.float32),
        np.zeros((n.value_heads, n.state, n.state), np.float32),
    ]
    kv: list[NDArray[Any]] = [np.zeros((0, n.kv_heads, n.head_dim), np.float16)] * 2
    for count in pieces:
        x = _delta_net(n, net, of, tokens[first : first + count], states)
        x = _attention(n, full, of, _experts(n, net, of, x), np.arange(first, first + count, dtype=np.int32), kv)
        made.append(_experts(n, full, of, x))
        first += count
    return np.concatenate(made)


def _normed(of: Operations, x: F32, weight: F32 | None, op: str = "rms") -> F32:
    """Norms of all rows of x."""
    return of.norm(x.reshape(-1, x.shape[-1]), weight, EPS, op).reshape(x.shape)


def _delta_net(n: Sizes, w: Weights, of: Operations, x: F32, states: list[F32]) -> F32:
    """states: the channels' last inputs, and the heads' states."""
    normed = of.norm(x, w["before"], EPS)
    mixed, z, beta, alpha = (of.product(w[one], normed) for one in ("qkv", "z", "beta", "alpha"))
    both, keys = np.concatenate([states[0], mixed.T], 1), n.key_heads * n.state
    parts = np.split(of.convolve(both, w["taps"], np.zeros(len(both), np.float32)), (keys, 2 * keys), 1)
    q, k, v = (np.ascontiguousarray(part).reshape(len(x), -1, n.state) for part in parts)
    q, k = (_normed(of, one, None, "l2") for one in (q, k))
    gate = of.binary("mul", of.unary("softplus", of.binary("add", alpha, w["dt"])), w["a"])
    made = of.delta_net(q, k, v, gate[..., None], of.unary("sigmoid", beta)[..., None], states[1])
    states[:] = both[:, len(x) :], made[v.size :].reshape(states[1].shape)
    y = _normed(of, made[: v.size].reshape(v.shape), w["norm"])
    return of.product(w["out"], of.swiglu(z, y.reshape(z.shape)), x)


def _attention(
    n: Sizes, w: Weights, of: Operations, x: F32, positions: NDArray[np.int32], kv: list[NDArray[Any]]
) -> F32:
    """kv: of the tokens so far. Each head of q has its gate behind it."""
    normed = of.norm(x, w["before"], EPS)
    q, k, v = (of.product(w[one], normed).reshape(len(x), -1, n.head_dim) for one in ("q", "k", "v"))
    q, gate = (np.ascontiguousarray(q[:, first::2]) for first in (0, 1))
    q, k = (of.rope(_normed(of, one, w[name]), positions, n.rope) for one, name in ((q, "q_norm"), (k, "k_norm")))
    kv[:] = [np.concatenate([old, encoded(new, "f16")]) for old, new in zip(kv, (k, v), strict=True)]
    gated = of.binary("mul", of.attend(q, kv[0], kv[1]), of.unary("sigmoid", gate))
    return of.product(w["out"], gated.reshape(len(x), -1), x)


def _experts(n: Sizes, w: Weights, of: Operations, x: F32) -> F32:
    normed, shared = of.norm(x, w["behind"], EPS), w["shared"]
    routed = of.route(of.product(w["router"], normed), n.chosen)
    ids, weights = (np.ascontiguousarray(part) for part in np.split(routed, 2, 1))

    def hidden(of_w: Weights, *ids: Any) -> F32:
        return of.swiglu(of.product(of_w["gate"], normed, *ids), of.product(of_w["up"], normed, *ids))

    chosen = None, ids.view(np.int32)
    y = of.sum_experts(of.product(w["down"], hidden(w, *chosen), *chosen), weights[..., None])
    share = of.unary("sigmoid", of.product(w["share"], normed))
    y = of.binary("add", y, of.binary("mul", of.product(shared["down"], hidden(shared)), share))
    return of.binary("add", x, y)
