"""Hostile arguments: values that no parameter expects, and a walk that gives each of them to each parameter in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.tools import export

Make = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]  # a fresh callable and good arguments, by name


def _structured() -> Any:
    return np.zeros(3, [("a", np.float32), ("b", np.int32)])


def _read_only() -> Any:
    array = np.ones((2, 2, 64), np.float32)
    array.flags.writeable = False
    return array


class Rude:
    """An object whose every conversion raises an error of its own."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise LookupError("rude")

    __array__ = __index__ = __int__ = __float__ = __len__ = __fspath__ = __repr__ = _raise


HOSTILE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "NumPy's True": lambda: np.True_,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "-2**70": lambda: -(2**70),
    "2**70": lambda: 2**70,
    "an int of 20,000 digits": lambda: 10**20000,
    "0.5": lambda: 0.5,
    "1e308": lambda: 1e308,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "NumPy's NaN": lambda: np.float32("nan"),
    "complex": lambda: 1j,
    "no text": str,
    "text": lambda: "abc",
    "digits": lambda: "0.5",
    "a lone surrogate": lambda: "\udcff",
    "NUL": lambda: "a\0b",
    "a long text": lambda: "9" * 5000,
    "bytes": lambda: b"abc",
    "object": object,
    "a class": lambda: int,
    "a function": lambda: len,
    "an object that raises": Rude,
    "dict": dict,
    "a dict of what it should be": lambda: {"version": 2},
    "set": lambda: {1},
    "no list": list,
    "a list of None": lambda: [None],
    "a ragged list": lambda: [[1.0], [1.0, 2.0]],
    "a list of text": lambda: ["a"],
    "a generator": lambda: (x for x in (1, 2)),
    "an int of no axes": lambda: np.array(1),
    "a float of no axes": lambda: np.array(0.5, np.float32),
    "no elements": lambda: np.zeros((0, 2, 64), np.float32),
    "one axis": lambda: np.zeros(3, np.float32),
    "five axes": lambda: np.zeros((1, 1, 1, 1, 1), np.float32),
    "NaN in it": lambda: np.full((2, 2, 64), np.nan, np.float32),
    "infinity in it": lambda: np.full((2, 64), np.inf, np.float32),
    "2**100 in it": lambda: np.full((2, 2, 64), 2.0**100, np.float32),
    "masked": lambda: np.ma.array(np.ones((2, 2, 64), np.float32), mask=True),
    "objects": lambda: np.full((2, 2, 64), None, object),
    "complex array": lambda: np.ones((2, 2, 64), np.complex64),
    "structured": _structured,
    "dates": lambda: np.zeros((2, 2, 64), "datetime64[s]"),
    "texts": lambda: np.full((2, 2, 64), "1.0"),
    "bools": lambda: np.ones((2, 2, 64), np.bool_),
    "byte-swapped": lambda: np.ones((2, 2, 64), ">f4"),
    "not contiguous": lambda: np.ones((64, 2, 2), np.float32).T,
    "every second, backwards": lambda: np.ones((4, 2, 64), np.float32)[::-2],
    "read-only": _read_only,
    "all of one element": lambda: np.broadcast_to(np.float32(1), (2, 2, 64)),
    "more than memory": lambda: np.broadcast_to(np.float32(1), (2**40, 2, 64)),
}

# What only other modules of the package call, with arguments that they have checked, and what takes no arguments of a
# user's: records that the package fills.
INNER = {
    "Attention.replan",
    "Attention.window_of",
    "Device",
    "Device.dispatch",
    "Device.kernel",
    "Device.submit",
    "PendingAttention",
    "DeviceInfo",
    "KVCache.adopt",
    "KVCache.check_layer",
    "KVCache.check_rows",
    "KVCache.check_sequence",
    "KVCache.commit",
    "KVCache.copy_pages",
    "KVCache.encode_into",
    "KVCache.scales_of",
    "KVCache.forget",
    "KVCache.read_rows",
    "KVCache.write_rows",
    "KVCache.write_values",
    "Ranks.agree",
    "Ranks.exchange",
    "Ranks.fail",
    "Ranks.full",
    "Ranks.leave",
    "Sequence",
    "Sequence.retract",
    "Sequence.table",
    "ShardedKVCache.keep_rows",
    "ShardedSequence",
    "ShardedSequence.nodes",
    "ShardedSequence.places",
    "ShardedSequence.tokens",
    "SplitPlan.build_on",
}  # fmt: skip

# Tested with a device (tests/device/test_hostile_arguments.py); all others without one.
ON_DEVICE = {
    "Attention",
    "Attention.__call__",
    "Attention.partial",
    "Attention.prepare",
    "Attention.submit",
    "Attention.record",
    "Device.from_kompute",
    "Device.open",
    "Fold",
    "Fold.__call__",
    "KVCache",
    "KVCache.append",
    "KVCache.append_encoded",
    "KVCache.load",
    "Ranks",
    "Sequence.save",
    "Sequence.drop_last",
    "Sequence.keep",
    "Sequence.truncate",
    "ShardedAttention",
    "ShardedAttention.__call__",
    "ShardedKVCache",
    "ShardedKVCache.append",
    "ShardedSequence.drop_last",
    "ShardedSequence.keep",
    "ShardedSequence.truncate",
    "attention",
}


def parameters(call: Callable[..., Any]) -> list[str]:
    """The names of what a caller can pass."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in inspect.signature(call).parameters.items() if one.kind not in kinds]


def _members(cls: type) -> Iterator[tuple[str, list[str]]]:
    """The constructor, as "", and the public methods that a class defines, with their parameters."""
    yield "", parameters(cls)
    for name, member in vars(cls).items():
        if name == "__call__" or not name.startswith("_"):
            if isinstance(member, classmethod):
                yield f".{name}", parameters(getattr(cls, name))
            elif isinstance(member, FunctionType):
                yield f".{name}", parameters(member)[1:]  # without self


def public_callables(prefix: str, module: ModuleType, names: Iterable[str], home: str = "") -> set[str]:
    """Every function, constructor and method with parameters among ``names`` of ``module``, as ``prefix`` names it.

    home: only what this module defines; exceptions are left out.
    """
    found = set()
    for name in names:
        thing = getattr(module, name)
        if not str(getattr(thing, "__module__", "")).startswith(home or "zinc_attn"):
            continue
        if isinstance(thing, type) and not issubclass(thing, BaseException):
            found |= {f"{prefix}{name}{attribute}" for attribute, given in _members(thing) if given}
        elif isinstance(thing, FunctionType) and parameters(thing):
            found.add(f"{prefix}{name}")
    return found


def all_public() -> set[str]:
    """What the tests of hostile arguments must cover, but for the integration."""
    oracles = [name for name in reference.__all__ if name not in za.__all__ or name == "attention"]
    return (
        public_callables("", za, za.__all__)
        | public_callables("reference.", reference, oracles)
        | public_callables("export.", export, ["export", "load_manifest"])
    )


def walk(make: Make, check: Callable[[], None] = lambda: None) -> list[str]:
    """What went wrong where each parameter in turn had each hostile value, and the others good ones.

    Right is a result, or a ZincAttnError with a text. check: called after each call; it raises where that did harm.
    """
    wrong = []
    for name in parameters(make()[0]):
        for label, hostile in HOSTILE.items():
            call, arguments = make()
            try:
                call(**(arguments | {name: hostile()}))
            except za.ZincAttnError as error:
                if not str(error):
                    wrong.append(f"{name} = {label}: an error without a text")
            except Exception as error:
                wrong.append(f"{name} = {label}: {type(error).__name__}: {str(error)[:200]}")
            check()
    return wrong
