"""Random recurrent layers, a case of ``check --graph`` each, over the operations of an oracle or of a device.

A layer is a hybrid model's: RMS_NORM, a product, a convolution, then a gated delta net (with a gate for a head, or for
each channel, as KDA has) or a selective scan (Mamba-1, Mamba-2), and a product back.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ...canonical.state import F32
from . import model
from .model import EPS, TOKENS, WIDTH, random_matrix, rows_normed

TAPS: Final = 4


@dataclass(frozen=True)
class Kind:
    """heads of v or x have ``rows`` each, of ``size`` elements in a state; groups: heads of q and k, or of b and c."""

    heads: int
    rows: int
    size: int
    groups: int
    scans: bool
    each: bool  # whether each element of a row has its own gate or decay

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v, or x, b, c."""
        return 2 * self.groups * self.size + self.heads * self.rows

    @property
    def gates(self) -> int:
        """Gates of a token: gates and beta, or dt."""
        return self.heads * (1 if self.scans else 2 if not self.each else self.size + 1)


LAYERS: Final = {
    "gdn": Kind(4, 40, 40, 2, False, False),
    "kda": Kind(2, 32, 32, 2, False, True),
    "mamba": Kind(96, 1, 16, 1, True, True),
    "mamba2": Kind(4, 24, 64, 2, True, False),
}


class Operations(model.Operations, Protocol):
    """The operations of a layer; scores, then states, lie in one array, as in ggml."""

    def convolve(self, x: F32, w: F32, bias: F32) -> F32:
        """x: (channels, taps - 1 + tokens); with SILU."""

    def delta_net(self, q: F32, k: F32, v: F32, gate: F32, beta: F32, state: F32) -> F32: ...

    def scan(self, state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> F32: ...


def layer(name: str, ops: Operations, pieces: tuple[int, ...]) -> F32:
    """(tokens, WIDTH) of a layer, whose tokens come in pieces of these numbers."""
    kind, rng = LAYERS[name], np.random.default_rng([47, *LAYERS].index(name))
    into = random_matrix("q8_0", kind.channels + kind.gates, WIDTH, rng)
    out = random_matrix("q8_0", WIDTH, kind.heads * kind.rows, rng)
    tokens, norm = (rng.standard_normal(shape, np.float32) for shape in ((len(TOKENS), WIDTH), WIDTH))
    w, bias, a = (
        rng.standard_normal(shape, np.float32) for shape in ((kind.channels, TAPS), kind.channels, kind.heads)
    )
    decays = -np.abs(a[:, None] * np.arange(1, kind.size + 1 if kind.each else 2, dtype=np.float32))
    before = np.zeros((kind.channels, TAPS - 1), np.float32)
    state = np.zeros((kind.heads, kind.rows, kind.size), np.float32)
    outputs, first = [], 0
    for count in pieces:
        x = tokens[first : first + count]
        mixed = ops.product(into, ops.norm(x, norm, EPS))
        both = np.concatenate([before, mixed[:, : kind.channels].T], 1)
        before = both[:, count:]
        y, state = _states(kind, ops, ops.convolve(both, w, bias), mixed[:, kind.channels :], decays, state)
        outputs.append(ops.product(out, y, x))
        first += count
    return np.concatenate(outputs)


def _states(kind: Kind, ops: Operations, mixed: F32, gates: F32, decays: F32, state: F32) -> tuple[F32, F32]:
    """(tokens, heads * rows), and the state after them."""
    tokens, shared = len(mixed), kind.groups * kind.size
    ends = (shared, 2 * shared) if not kind.scans else (kind.heads * kind.rows, kind.heads * kind.rows + shared)
    parts = (np.ascontiguousarray(part) for part in np.split(mixed, ends, 1))
    if kind.scans:
        x, b, c = (
            part.reshape(tokens, -1, size) for part, size in zip(parts, (kind.rows, kind.size, kind.size), strict=True)
        )
        both = ops.scan(state, x, np.ascontiguousarray(gates), decays, b, c)
    else:
        unit = np.full(kind.size, kind.size**-0.5, np.float32)
        q, k, v = (part.reshape(tokens, -1, kind.size) for part in parts)
        q, k = (rows_normed(ops, vectors, unit) for vectors in (q, k))
        gate = -np.abs(gates[:, kind.heads :]).reshape(tokens, kind.heads, -1)
        beta = np.minimum(np.abs(gates[:, : kind.heads, None]), np.float32(1.0))
        both = ops.delta_net(q, k, v, gate, beta, state)
    scores = tokens * kind.heads * kind.rows
    return both[:scores].reshape(tokens, -1), both[scores:].reshape(state.shape)
