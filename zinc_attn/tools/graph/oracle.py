"""The operations of a forward pass in NumPy."""

import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...canonical.emulate import emulate
from ...canonical.state import F32
from ...errors import WrongResultError
from ...graph import blocks, elementwise, moves, products, recurrent, routing, rows
from ...graph.declarations import FLOAT_TYPES
from ...graph.rope import Rope, rope
from .hybrid import ROUTE_LEAST, Operations
from .model import Matrix

DRAWN: Final = 8  # operations, of which one is drawn on average


class Oracle:
    """``Operations`` with the bits that every device has."""

    def embed(self, weights: Matrix, tokens: NDArray[np.int32]) -> F32:
        chosen = Matrix(weights.kind, weights.rows[tokens], weights.columns)
        if weights.kind in FLOAT_TYPES:
            return chosen.floats()
        return moves.from_weights(chosen.rows, weights.kind)

    def norm(self, x: F32, weight: F32 | None, eps: float, op: str = "rms") -> F32:
        return rows.norm(op, x, eps, *(() if weight is None else (("mul", weight[None]),)))

    def product(self, weights: Matrix, x: F32, added: F32 | None = None, ids: NDArray[np.int32] | None = None) -> F32:
        if ids is not None:
            experts = weights.split()
            slots = x.reshape(len(x), -1, x.shape[-1])
            return products.of_experts(
                lambda expert, some: self.product(experts[expert], some), len(experts), slots, ids, len(experts[0].rows)
            )
        if weights.kind in FLOAT_TYPES:
            y = products.multiply_floats(weights.floats(), x)
        else:
            y = products.multiply(blocks.decode(weights.kind, weights.rows), x)
        return y if added is None else products.add(y, added)

    def rope(self, x: F32, positions: NDArray[np.int32], way: Rope) -> F32:
        turned: F32 = rope(x[None], np.tile(positions, (4, 1)), way.table(), way.step)[0]
        return turned

    def attend(self, q: F32, k: NDArray[Any], v: NDArray[Any]) -> F32:
        out: F32 = emulate(q, k, v)[0]
        return out

    def swiglu(self, gate: F32, up: F32) -> F32:
        product: F32 = elementwise.glu("swiglu", gate, up)
        return product

    def unary(self, op: str, x: F32) -> F32:
        return elementwise.unary(op, x)

    def binary(self, op: str, a: F32, b: F32) -> F32:
        return elementwise.binary(op, a, b)

    def route(self, scores: F32, k: int) -> F32:
        ids, weights = routing.route(scores, k, "soft_max", norm="sum", clamp=(ROUTE_LEAST, np.inf))
        return np.concatenate([ids.view(np.float32), weights], -1)

    def sum_experts(self, x: F32, weights: F32) -> F32:
        return routing.sum_experts(x, weights)

    def convolve(self, x: F32, w: F32, bias: F32) -> F32:
        y: F32 = recurrent.ssm_conv(x[None], w, bias[None, None], True)[0]
        return y

    def delta_net(self, q: F32, k: F32, v: F32, gate: F32, beta: F32, state: F32) -> F32:
        result = recurrent.delta_net(q[None], k[None], v[None], gate[None], beta[None], state[None])
        return np.concatenate([result.outputs.reshape(-1), result.kept.reshape(-1)])

    def scan(self, state: F32, x: F32, dt: F32, a: F32, b: F32, c: F32) -> F32:
        result = recurrent.ssm_scan(state[None], x[None], dt[None], a, b[None], c[None], np.zeros(1, np.int32))
        return np.concatenate([result.outputs.reshape(-1), result.kept.reshape(-1)])


class DrawnOracle:
    """``Oracle``'s operations by native code of the processor.

    NumPy also makes the first operation of each name and type of weights, and others that the case draws.
    WrongResultError: native code has other bits.
    """

    def __init__(self, native: Operations, case: str) -> None:
        self._native, self._numpy, self._shown = native, Oracle(), set[tuple[str, ...]]()
        self._rng = np.random.default_rng(zlib.crc32(case.encode()))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*operands: Any) -> Any:
            got = getattr(self._native, name)(*operands)
            kind = name, *(x if isinstance(x, str) else x.kind for x in operands if isinstance(x, str | Matrix))
            if self._rng.integers(DRAWN) == 0 or kind not in self._shown:
                want = getattr(self._numpy, name)(*operands)
                if not np.array_equal(got.view(np.uint32), want.view(np.uint32)):
                    raise WrongResultError(
                        f"oracle: native code of the processor has other bits than NumPy in {' '.join(kind)}; use "
                        "--oracle numpy"
                    )
                self._shown.add(kind)
            return got

        return operation
