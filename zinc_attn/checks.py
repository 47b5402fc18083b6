"""Checks of arguments: each returns the value in the type that the package works with, or raises a typed refusal."""

import math
import operator
import os
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, SupportsIndex

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError, DTypeError, ShapeError, UnsupportedError, ValueRangeError

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_NAMES: Final = {np.dtype(name): name for name in ("float16", "float32")}  # in this machine's byte order


def shown(value: object) -> str:
    """The value's repr for an error's text, cut to 100 characters; the type alone if its repr raises."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print very large ones
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a caller's own class; the refusal must be raised, and not this error in its place
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"
    return text if len(text) <= 100 else f"{text[:100]}..."


def described(instance: object, says: Callable[[], str]) -> str:
    """A repr, ``Class(what it says)``, that never raises: a constructor that failed leaves an object without fields."""
    try:
        return f"{type(instance).__name__}({says()})"
    except Exception as error:  # a debugger and a log want the rest of what they show
        return f"<{type(instance).__name__}: {type(error).__name__}>"


class Uncopied:
    """An object that stands for memory of a device: it is neither copied nor pickled.

    instead: a keyword of subclasses, the refusal's advice in place of a copy. Their subclasses inherit it.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, instead: str | None = None, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls._instead = cls._instead if instead is None else instead

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """``copy``, ``deepcopy`` and ``pickle`` call it. UnsupportedError."""
        name = type(self).__name__
        raise UnsupportedError(
            f"{name}: it stands for memory of a device and cannot be copied or pickled; {self._instead}"
        )


def plain(text: object) -> str:
    """A path, or a text from a file, for an error: without quotes, escaped unless printable, cut to 1000 characters."""
    printable = str(text)
    printable = printable if printable.isprintable() else ascii(printable)[1:-1]
    return printable if len(printable) <= 1000 else f"{printable[:1000]}..."


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int within [least, most], or ArgumentError naming ``name``. A bool is no int."""
    if type(value) is int and value >= least and (most is None or value <= most):  # nearly always
        return value
    try:
        number = operator.index(value)
    except Exception:  # an object that is no integer may raise anything
        raise ArgumentError(f"{name}: got {shown(value)}, expected an int") from None
    if isinstance(value, (bool, np.ma.MaskedArray)) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise ArgumentError(f"{name}: got {shown(value)}, expected an int")
    if number < least or (most is not None and number > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{name}: got {shown(number)}, expected an int {bound}")
    return number


def check_float(name: str, value: Any, expected: str = "a finite number") -> float:
    """``value``, a real number, as a float. ArgumentError for anything else, ValueRangeError for NaN and infinities.

    Numbers: an int, a float, a NumPy number, an array or a torch tensor of no axes with a real dtype; no bool, no text.
    """
    torch, x = sys.modules.get("torch"), value
    if torch is not None and isinstance(x, torch.Tensor) and x.ndim == 0 and x.device.type != "meta":
        value = x.item()
    is_array = isinstance(value, (np.ndarray, np.generic))
    real = value.ndim == 0 and value.dtype.kind in "iuf" if is_array else isinstance(value, Real)
    if not real or isinstance(value, (bool, np.ma.MaskedArray)):
        single = "a single number, " if getattr(x, "ndim", 0) else ""
        raise ArgumentError(f"{name}: got {shown(x)}, expected {single}{expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        text = f"{number:g}" if not isinstance(value, int) else shown(value)
        raise ValueRangeError(f"{name}: got {text}, expected {expected}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is True or False, or ArgumentError naming ``name``."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name}: got {shown(value)}, expected True or False")
    return bool(value)


def check_text(name: str, value: Any, expected: str) -> str:
    """``value`` if it is a str, or ArgumentError naming ``name``."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name}: got {shown(value)}, expected {expected}")
    return value


def check_path(name: str, value: Any) -> Path:
    """``value``, a str, a path-like object or bytes, as a Path, or ArgumentError naming ``name``."""
    try:
        text = os.fsdecode(value)
    except Exception:  # an object that is no path may raise anything
        raise ArgumentError(f"{name}: got {shown(value)}, expected a path") from None
    if not text or "\0" in text:
        raise ArgumentError(f"{name}: got {shown(value)}, expected a path that is not empty and has no NUL bytes")
    return Path(text)


def check_array(name: str, value: Any, dtypes: tuple[str, ...] = ()) -> NDArray[Any]:
    """``value`` as an array in this machine's byte order. dtypes: the names of the allowed dtypes, () for any.

    Lists, and whatever NumPy reads, become arrays; byte order, strides and the writeable flag do not matter. Where
    ``dtypes`` has bfloat16, such arrays of ml_dtypes or torch become float32, which holds all their values.
    ArgumentError: None, and arrays with a mask, which would be lost; ShapeError: ragged lists; DTypeError.
    """
    if type(value) is np.ndarray and (known := _NAMES.get(value.dtype)) and (not dtypes or known in dtypes):
        return value  # nearly always
    if value is None:
        raise ArgumentError(f"{name}: got None, expected an array")
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{name}: got a masked array, expected a plain one; use filled(), or leave the rows out")
    try:
        array = np.asarray(_readable(value))
    except ValueError as error:
        raise ShapeError(f"{name}: {error}") from error
    except Exception as error:  # a foreign class may raise anything
        raise ArgumentError(f"{name}: got a {type(value).__name__}, expected an array: {error}") from error
    if dtypes and array.dtype.name not in dtypes:
        expected = f"{', '.join(dtypes[:-1])} or {dtypes[-1]}" if len(dtypes) > 1 else dtypes[0]
        raise DTypeError(f"{name}: got dtype {array.dtype}, expected {expected}")
    if dtypes and array.dtype == BFLOAT16:
        return array.astype(np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_output(name: str, value: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """``value`` as an array to write results to: float32, of ``shape``, C-contiguous and writeable.

    A torch tensor in the CPU's memory is taken, too; the array is a view of it. ShapeError, DTypeError, ArgumentError.
    """
    torch, argument = sys.modules.get("torch"), value
    expected = f"expected a C-contiguous float32 array of shape {shape}"
    if torch is not None and isinstance(argument, torch.Tensor):
        try:
            value = np.asarray(argument)  # a view of its memory, or an error
        except Exception as error:  # it is on another device, is bfloat16 or requires a gradient
            raise ArgumentError(f"{name}: got a tensor that NumPy cannot view, {expected}: {error}") from error
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{name}: got {shown(argument)}, {expected}")
    if value.dtype != np.float32:
        raise DTypeError(f"{name}: got dtype {value.dtype}, {expected}")
    if value.shape != shape:
        raise ShapeError(f"{name}: got shape {value.shape}, {expected}")
    if not value.flags.c_contiguous or not value.flags.writeable:
        which = "read-only" if value.flags.c_contiguous else "not contiguous"
        raise ArgumentError(f"{name}: got an array that is {which}, {expected} that can be written to")
    return value


def _readable(value: Any) -> Any:
    """``value``, or the same words as an array that NumPy reads if it is a torch tensor of bfloat16."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16:
        return value
    return value.cpu().contiguous().view(torch.int16).numpy().view(BFLOAT16)


def parse_digits(text: str) -> int | None:
    """The number that a text of at most 18 ASCII digits says, else None."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
