"""Hostile arguments: values that no parameter expects, and a walk that gives each of them to each parameter in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np

import zinc_attn as za
from zinc_attn.checks import shown

Make = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]  # a fresh callable and good arguments, by name


class Rude:
    """An object whose every conversion raises an error of its own."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise LookupError("rude")

    __array__ = __index__ = __int__ = __float__ = __len__ = __fspath__ = __repr__ = _raise


def hostile_values() -> Iterator[Any]:
    """Made anew by each walk, since a call may keep or change what it is given."""
    yield from (None, True, np.True_, 0, 1, -1, -(2**70), 2**70, 10**20000)
    yield from (0.5, 1e308, float("nan"), float("inf"), np.float32("nan"), 1j)
    yield from ("", "abc", "0.5", "\udcff", "a\0b", "9" * 5000, b"abc")
    yield from (object(), int, len, Rude(), {}, {"version": 2}, {1})
    yield from ([], [None], [[1.0], [1.0, 2.0]], ["a"], (x for x in (1, 2)))
    yield from (np.array(1), np.array(0.5, np.float32), np.zeros(3, np.float32), np.zeros((1,) * 5, np.float32))
    yield from (np.zeros((0, 2, 64), np.float32), np.zeros(3, [("a", np.float32), ("b", np.int32)]))
    yield from (np.full((2, 2, 64), bad, np.float32) for bad in (np.nan, 2.0**100))
    yield from (np.full((2, 64), np.inf, np.float32), np.full((2, 2, 64), None, object))
    ones = np.ones((2, 2, 64), np.float32)
    yield from (ones.astype(dtype) for dtype in ("complex64", "datetime64[s]", "U3", "bool", ">f4"))
    yield from (np.ma.array(ones, mask=True), np.ones((64, 2, 2), np.float32).T, np.ones((4, 2, 64), np.float32)[::-2])
    yield from (np.broadcast_to(np.float32(1), shape) for shape in ((2, 2, 64), (2**40, 2, 64)))
    ones.flags.writeable = False
    yield ones


def parameters(call: Callable[..., Any]) -> list[str]:
    """The names of what a caller can pass."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, parameter in inspect.signature(call).parameters.items() if parameter.kind not in kinds]


def walk(make: Make) -> list[str]:
    """The faults where each parameter in turn had each hostile value, and the others good ones.

    Right is a result, or a ZincAttnError with a text.
    """
    wrong, names = [], parameters(make()[0])
    assert names, "nothing is called"
    for name in names:
        for number, hostile in enumerate(hostile_values()):
            call, arguments = make()
            argument = f"{name} = value {number}, {shown(hostile)}"
            try:
                call(**(arguments | {name: hostile}))
            except za.ZincAttnError as error:
                if not str(error):
                    wrong.append(f"{argument}: an error without a text")
            except Exception as error:
                wrong.append(f"{argument}: {type(error).__name__}: {str(error)[:200]}")
    return wrong


def closing(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose result is closed at once; its parameters are those of ``make``."""

    @wraps(make)
    def closed(**arguments: Any) -> None:
        make(**arguments).close()

    return closed
