"""The new rows that ``ZincCache.update`` hands to a model, as tensors with which only attention "zinc" can compute."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from ...errors import UnsupportedError
from .boundary import opaque
from .tensors import DTYPES, NAME
from .upstream import torch

_KEPT: Final = frozenset({"to", "contiguous"})  # operations that return the same rows, perhaps on another torch device
# Operations that change no row by another row's values. Most of these move values; linear computes along the last axis.
_ROW_BY_ROW: Final = frozenset(
    {"__getitem__", "cat", "copy_", "expand", "linear", "new_empty", "reshape", "split", "transpose", "view"}
)


@opaque
class ZincRows(torch.Tensor):
    """The new rows of a layer, which ``ZincCache.update`` returns for attention "zinc" and nothing else.

    The tokens before them are on the Vulkan device: operations on the rows alone are refused, but for moves.
    """

    layer: Any  # the ZincLayer whose update() returned them
    serial: int  # of the update() that returned them
    allowed: ClassVar[frozenset[str]] = _KEPT

    @classmethod
    def of(cls, x: Any, layer: Any, serial: int) -> ZincRows:
        """``x`` as rows of ``layer``'s update number ``serial``."""
        with torch._C.DisableTorchFunctionSubclass():
            rows: ZincRows = x.as_subclass(cls)
        rows.layer, rows.serial = layer, serial
        return rows

    def plain(self) -> Any:
        """The same values as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "__repr__"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rows = _first_rows([*args, *(kwargs or {}).values()])
        assert rows is not None
        if name in cls.allowed:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            parts = result if isinstance(result, tuple) else (result,)
            # torch.autocast narrows the result of a projection.
            if all(part.dtype in (DTYPES if name in _ROW_BY_ROW else (rows.dtype,)) for part in parts):
                wrapped = tuple(cls.of(part, rows.layer, rows.serial) for part in parts)
                return wrapped if isinstance(result, tuple) else wrapped[0]
        raise UnsupportedError(
            f"ZincCache: {name} was called on the rows that update() returned, expected them to reach attention "
            f"{NAME!r} as they are; {rows.layer.cache.advice()}"
        )


@opaque
class CompressedRows(ZincRows):
    """The new rows of multi-head latent attention, which a model compresses before update() and expands after it.

    The expansion is the model's own, token by token, so it may run on the new rows alone: moves of values and a linear
    layer are allowed, and give rows of the same update. An operation that would bring tokens together is refused.
    """

    allowed: ClassVar[frozenset[str]] = _KEPT | _ROW_BY_ROW


def _first_rows(args: Any) -> ZincRows | None:
    """The first rows among a function's arguments, also in a list of tensors."""
    for argument in args:
        rows = _first_rows(argument) if isinstance(argument, (list, tuple)) else argument
        if isinstance(rows, ZincRows):
            return rows
    return None
