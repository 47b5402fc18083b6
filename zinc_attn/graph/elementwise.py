"""Operations element by element, with the bits of shaders/graph/{binary,unary,glu,add_id}.comp.

Arrays have ggml's dimension 0 last. Operands are float32 as ``widened`` gives them; ``encoded`` narrows results.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32, f32, flush
from . import constants, floats
from .floats import quietly, quotient


def widened(x: NDArray[Any], kind: str) -> F32:
    """float32 numbers of an array of a type: float32, float16, or uint16 of bf16."""
    return x.astype(np.float32) if kind != "bf16" else (x.astype(np.uint32) << 16).view(np.float32)


@quietly
def encoded(x: F32, kind: str) -> NDArray[Any]:
    """x in a type, rounded to nearest, ties to even."""
    if kind != "bf16":
        return x.astype(np.float16 if kind == "f16" else np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 64, rounded).astype(np.uint16)


def repeated(b: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.tile(b, [n // m for n, m in zip(shape, b.shape, strict=True)])


@quietly
def binary(op: str, a: F32, b: F32) -> F32:
    """a op b, one rounding; b's sizes divide a's, and it repeats."""
    functions: dict[str, Callable[..., F32]]
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": quotient}
    return flush(functions[op](flush(a), flush(repeated(b, a.shape))))


def sigmoid(x: F32) -> F32:
    return quotient(f32(1.0), f32(1.0) + floats.exp(-x))


def silu(x: F32, alpha: float = 1.0) -> F32:
    return quotient(x, f32(1.0) + floats.exp(f32(alpha) * -x))


def gelu(x: F32) -> F32:
    near = np.where(x < f32(constants.GELU_LEAST), f32(constants.GELU_LEAST), x)
    cubic = f32(1.0) + (f32(constants.GELU_A) * near) * near
    return (f32(0.5) * near) * (f32(1.0) + floats.tanh((f32(constants.GELU_B) * near) * cubic))


def gelu_quick(x: F32) -> F32:
    gate: F32 = quotient(f32(1.0), f32(1.0) + floats.exp(f32(constants.GELU_QUICK) * x))
    return x * gate


def gelu_erf(x: F32) -> F32:
    return (f32(0.5) * x) * (f32(1.0) + floats.erf(x * f32(constants.SQRT_HALF)))


def relu(x: F32) -> F32:
    return np.where(x > 0, x, f32(0.0))


def _hardsigmoid(x: F32) -> F32:
    sixth = quotient(x + f32(3.0), f32(6.0))
    return np.where(sixth > 0, np.where(sixth < 1, sixth, f32(1.0)), f32(0.0))


def _round(x: F32) -> F32:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= f32(0.5), whole + np.where(x < 0, f32(-1.0), f32(1.0)), whole)


def _clamp(x: F32, least: float, most: float) -> F32:
    below = np.where(x < f32(most), x, f32(most))
    return np.where(below > f32(least), below, f32(least))


def _xielu(x: F32, alpha_n: float, alpha_p: float, beta: float, eps: float) -> F32:
    linear = f32(beta) * x
    below = (floats.expm1(np.where(x < f32(eps), x, f32(eps))) - x) * f32(alpha_n) + linear
    return np.where(x > 0, (f32(alpha_p) * x) * x + linear, below)


_UNARY: Final[dict[str, Callable[..., F32]]] = {
    "abs": np.abs,
    "sgn": lambda x: np.where(x > 0, f32(1.0), np.where(x < 0, f32(-1.0), f32(0.0))),
    "neg": np.negative,
    "step": lambda x: np.where(x > 0, f32(1.0), f32(0.0)),
    "tanh": floats.tanh,
    "elu": lambda x: np.where(x > 0, x, floats.expm1(x)),
    "relu": relu,
    "sigmoid": sigmoid,
    "gelu": gelu,
    "gelu_quick": gelu_quick,
    "silu": silu,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardsigmoid": _hardsigmoid,
    "exp": floats.exp,
    "expm1": floats.expm1,
    "softplus": floats.softplus,
    "gelu_erf": gelu_erf,
    "xielu": _xielu,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round,
    "trunc": np.trunc,
    "scale": lambda x, factor, bias: x * f32(factor) + f32(bias),
    "clamp": _clamp,
    "sqr": np.square,
    "sqrt": floats.root,
    "log": floats.log,
    "sin": lambda x: floats.cos_sin(x)[1],
    "cos": lambda x: floats.cos_sin(x)[0],
    "leaky_relu": lambda x, slope: np.where(x > 0, x, np.where(x < 0, x * f32(slope), f32(0.0))),
    "fill": np.full_like,
}


@quietly
def unary(op: str, x: F32, *numbers: float) -> F32:
    """op(x). numbers: the kernel's a, b, c, d, as many as the operation has."""
    return flush(_UNARY[op](flush(x), *numbers))


@quietly
def glu(op: str, a: F32, b: F32, alpha: float = 1.0, limit: float = 0.0) -> F32:
    """act(a) * b; act(a) is flushed as an operation of its own."""
    a, b = flush(a), flush(b)
    if op == "mul":
        return flush(a * b)
    if op in ("swiglu_oai", "swiglu_clamp"):
        most = f32(limit)
        a = np.where(most < a, most, a)
        b = np.where(b < -most, -most, np.where(most < b, most, b))
    if op == "swiglu_oai":
        return flush(flush(silu(a, alpha)) * (b + f32(1.0)))
    activation = {"reglu": relu, "geglu": gelu, "geglu_erf": gelu_erf, "geglu_quick": gelu_quick}.get(op, silu)
    product = flush(flush(activation(a)) * b)
    return np.where(a > 0, product, f32(0.0)) if op == "reglu" else product


@quietly
def add_id(a: F32, b: F32, ids: NDArray[np.int32]) -> F32:
    """a (..., tokens, used, n) + rows of b (experts, n) that ids (tokens, used) names."""
    return flush(flush(a) + flush(b)[ids])
