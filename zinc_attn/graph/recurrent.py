"""Recurrent layers, with the bits of shaders/graph/{ssm_conv,delta_net,ssm_scan}.comp.

Tokens change a state one by one, so how many come at once changes no bit. Axes are ggml's dimensions, the last first.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32, f32, flush
from . import constants, floats
from .elementwise import binary, unary
from .floats import quietly
from .rows import halves_sum


class Scanned(NamedTuple):
    """outputs: (sequences, tokens, heads, rows); kept: states after the last tokens, (slots, *state's shape)."""

    outputs: F32
    kept: F32


def _above(x: F32, least: float) -> F32:
    return np.where(np.abs(x) < f32(least), f32(0.0), x)


def _state_sum(x: F32) -> F32:
    """The sum along the last axis: ``halves_sum`` of sums r, of elements i / 4 mod STATE_LANES = r, ascending."""
    lanes = constants.STATE_LANES
    whole = np.zeros((*x.shape[:-1], -(-x.shape[-1] // (4 * lanes)), lanes, 4), np.float32)
    whole.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]] = x
    partial = np.zeros((*x.shape[:-1], lanes), np.float32)
    for vector in range(whole.shape[-3]):
        for element in range(4):
            partial = partial + whole[..., vector, :, element]
    return halves_sum(partial)


def _scanned(outputs: F32, states: list[F32], slots: int) -> Scanned:
    """states: after each token."""
    return Scanned(outputs, np.stack(states[::-1][:slots]))


@quietly
def ssm_conv(x: F32, w: F32, bias: F32 | None = None, silu: bool = False) -> F32:
    """y (sequences, tokens, channels) of x (sequences, channels, taps - 1 + tokens) and w (channels, taps)."""
    x, w = _above(x, constants.PRODUCT_MIN), _above(w, constants.PRODUCT_MIN)
    tokens = x.shape[-1] - w.shape[-1] + 1
    total = np.zeros((), np.float32)
    for tap in range(w.shape[-1]):
        total = np.asarray(total + x[..., tap : tap + tokens] * w[:, tap, None])
    y = np.ascontiguousarray(flush(total).swapaxes(-1, -2))
    y = y if bias is None else binary("add", y, bias)
    return unary("silu", y) if silu else y


@quietly
def delta_net(q: F32, k: F32, v: F32, gate: F32, beta: F32, state: F32, slots: int = 1) -> Scanned:
    """q, k (sequences, tokens, heads, size), v with as many heads or a multiple, and sequences; gate (.., size or 1);
    beta (.., 1); state (sequences, heads, rows, size), whose rows are the columns of S."""
    sequences, tokens, heads, size = v.shape
    q, k = (_above(part, constants.STATE_MIN) for part in (q, k))
    q, k = (np.repeat(part, sequences // len(part), 0)[:, :, np.arange(heads) % part.shape[2]] for part in (q, k))
    decay = _above(floats.exp(flush(gate)), constants.DECAY_MIN)
    v, beta, s = flush(v), flush(beta), _above(state, constants.STATE_MIN)
    outputs, states = np.empty(v.shape, np.float32), []
    for t in range(tokens):
        s = s * decay[:, t, :, None]
        error = v[:, t] - _state_sum(s * k[:, t, :, None])
        delta = _above(error * beta[:, t], constants.FACTOR_MIN)
        s = _above(s + k[:, t, :, None] * delta[..., None], constants.STATE_MIN)
        outputs[:, t] = flush(_state_sum(s * q[:, t, :, None]) * f32(scale_of(size)))
        states.append(s)
    return _scanned(outputs, states, slots)


def scale_of(size: int) -> float:
    """The factor of a delta net's outputs, 1 / sqrt(size), each rounded."""
    return float(f32(1.0) / np.sqrt(f32(size)))


@quietly
def ssm_scan(state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32, ids: NDArray[np.int32], slots: int = 1) -> Scanned:
    """state (states, heads, rows, size), x (sequences, tokens, heads, rows), dt (sequences, tokens, heads), a (heads,
    size or 1), b, c (sequences, tokens, groups, size); ids of the sequences' states."""
    tokens, heads = x.shape[1:3]
    b, c = (_above(np.repeat(part, heads // part.shape[2], 2), constants.STATE_MIN) for part in (b, c))
    step = flush(floats.softplus(flush(dt)))
    decay = _above(floats.exp(flush(step[..., None] * flush(a))), constants.DECAY_MIN)
    added = _above(flush(x) * step[..., None], constants.FACTOR_MIN)
    s = _above(state[ids], constants.STATE_MIN)
    outputs, states = np.empty(x.shape, np.float32), []
    for t in range(tokens):
        s = s * decay[:, t, :, None] + b[:, t, :, None] * added[:, t, ..., None]
        s = _above(s, constants.STATE_MIN)
        outputs[:, t] = flush(_state_sum(s * c[:, t, :, None]))
        states.append(s)
    return _scanned(outputs, states, slots)
