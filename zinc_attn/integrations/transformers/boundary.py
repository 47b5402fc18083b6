"""The end of torch's tracing: ``torch.compile`` breaks the graph at this package's functions; all else is refused.

Their results are on the Vulkan device and in host memory, which no graph of torch's operations holds.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from ...errors import UnsupportedError
from .tensors import NAME
from .upstream import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

_EXPECTED: Final = (
    f"expected a call that runs: attention {NAME!r} is no operation of a graph, and its result would be a constant "
    'there. Use torch.compile without fullgraph=True, or export and trace the model with attn_implementation="sdpa": '
    'model.set_attn_implementation("sdpa")'
)
_KEYS: Final = torch._C._TorchDispatchModeKey
_TRACING: Final = tuple(getattr(_KEYS, name) for name in ("FAKE", "PROXY"))


def untraced(function: Function) -> Function:
    """``function``, around which torch.compile breaks the graph. UnsupportedError within another tracer's call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_tracing()
        return function(*args, **kwargs)

    return cast("Function", torch.compiler.disable(call, reason=_EXPECTED))


def opaque(kind: Kind) -> Kind:
    """``kind``, a tensor class whose tensors no graph takes in: they pass from one function to another as they are."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(kind)
    return kind


def _refuse_tracing() -> None:
    """UnsupportedError where another tracer than torch.compile's would take this call's results for constants."""
    if torch.jit.is_tracing():
        where = "a call within torch.jit.trace"
    elif torch.compiler.is_exporting():
        where = "a call within torch.export"
    elif any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        where = "a call within a tracer's mode (FakeTensorMode, make_fx)"
    else:
        return
    raise UnsupportedError(f"attn_implementation: got {where}, {_EXPECTED}")
