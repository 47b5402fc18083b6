"""Hostile arguments: values that no parameter expects, and a walk that gives each of them to each parameter in turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from support import differing

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.checks import shown
from zinc_attn.tools import export

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


# Methods that only other modules of the package call, with checked arguments, and methods that take no arguments of a
# user: of records that the package fills.
_INNER_METHODS = {
    "Attention": "replan window_of",
    "Device": "arithmetic_constant attends_by_units dispatch kernel",
    "KVCache": "check_sequence read_rows",
    "Ranks": "agree exchange fail full leave",
    "Sequence": "retract table",
    "ShardedKVCache": "keep_rows",
    "ShardedSequence": "nodes positions_on tokens",
}
INNER = {f"{owner}.{name}" for owner, names in _INNER_METHODS.items() for name in names.split()}
INNER |= {"Device", "PendingAttention", "DeviceInfo", "Sequence", "ShardedSequence"}


def parameters(call: Callable[..., Any]) -> list[str]:
    """The names of what a caller can pass."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, parameter in inspect.signature(call).parameters.items() if parameter.kind not in kinds]


def _members(cls: type) -> Iterator[tuple[str, list[str]]]:
    """The constructor, as "", and the public methods that a class defines, with their parameters."""
    yield "", parameters(cls)
    for name, member in vars(cls).items():
        if name == "__call__" or not name.startswith("_"):
            if isinstance(member, classmethod):
                yield f".{name}", parameters(getattr(cls, name))
            elif isinstance(member, FunctionType):
                yield f".{name}", parameters(member)[1:]  # without self


def public_callables(prefix: str, module: ModuleType, names: Iterable[str]) -> set[str]:
    """Every function, constructor and method with parameters among ``names`` of ``module``, as ``prefix`` names it,
    but for exceptions.
    """
    paths = set()
    for name in names:
        thing = getattr(module, name)
        if not str(getattr(thing, "__module__", "")).startswith("zinc_attn"):
            continue
        if isinstance(thing, type) and not issubclass(thing, BaseException):
            paths |= {f"{prefix}{name}{attribute}" for attribute, params in _members(thing) if params}
        elif isinstance(thing, FunctionType) and parameters(thing):
            paths.add(f"{prefix}{name}")
    return paths


def all_public() -> set[str]:
    """What the tests of hostile arguments must cover, but for the integration."""
    oracles = [name for name in reference.__all__ if name not in za.__all__ or name == "attention"]
    return (
        public_callables("", za, za.__all__)
        | public_callables("reference.", reference, oracles)
        | public_callables("export.", export, ["export", "load_manifest"])
    )


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


# --- what needs a device -----------------------------------------------------------------------------------

SHAPE = za.AttnShape(2, 2, 64)
Q = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
K, V = (np.linspace(-1, 1, 3 * 128, dtype=np.float32).reshape(3, 2, 64)[::step].copy() for step in (1, -1))


ENCODED = {"k": K.view(np.uint8), "v": V.view(np.uint8)}
OF_CACHES = {"shape": SHAPE, "num_layers": 1, "capacity": 512, "dtype": "f32"}


class Alone:
    """An mpi4py communicator of one rank, as far as Ranks looks at it before an exchange."""

    Iallgatherv = Iprobe = None

    def Idup(self) -> tuple[Alone, Any]:
        return self, SimpleNamespace(Test=lambda: True)

    def Get_rank(self) -> int:
        return 0

    Get_size = Get_rank


class Bench:
    """A device with a plain and a sharded cache; ``seq`` and ``apart`` give a sequence of three tokens each."""

    def __init__(self, device: za.Device, folder: Path) -> None:
        self.device, self.file = device, folder / "file"
        self.cache = za.KVCache(device, SHAPE, 1, 4096, "f32", 16)
        self.sharded = za.ShardedKVCache([device, device], SHAPE, 1, 4096, "f32", 16)
        self.attend, self.attend_apart = za.Attention(self.cache), za.ShardedAttention(self.sharded)
        self.part = self.attend.partial(Q, self.seq(), 0)
        self.seq().save(self.file)
        self.want = reference.emulate(Q, K, V)[0]

    def seq(self) -> za.Sequence:
        seq = self.cache.new_sequence()
        seq.cache.append(seq, 0, K, V)
        return seq

    def apart(self) -> za.ShardedSequence:
        seq = self.sharded.new_sequence()
        self.sharded.append(seq, 0, K, V)
        return seq

    def options(self) -> dict[str, Any]:
        return {"scale": 0.5, "window": 2, "softcap": 1.0, "sinks": np.zeros(2, np.float32)}

    def good_call(self) -> None:
        """The same bits as ever, in both caches."""
        assert not differing(self.attend(Q, self.seq(), 0), self.want)
        assert not differing(self.attend_apart(Q, self.apart(), 0), self.want)


def closing(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, whose result is closed at once; its parameters are those of ``make``."""

    @wraps(make)
    def closed(**arguments: Any) -> None:
        make(**arguments).close()

    return closed


ON_DEVICE: dict[str, Callable[[Bench], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "Attention": lambda b: (closing(za.Attention), {"cache": b.cache} | b.options()),
    "Attention.__call__": lambda b: (b.attend, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.partial": lambda b: (b.attend.partial, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.prepare": lambda b: (b.attend.prepare, {"tokens": 100, "batch": 2, "q_len": 3}),
    "Attention.submit": lambda b: (b.attend.submit, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.record": lambda b: (b.attend.record, {"sequence": 0, "q": 0, "seq": b.seq(), "layer": 0}),
    "Device.from_kompute": lambda b: (za.Device.from_kompute, {"manager": 0, "index": 0}),
    "Device.open": lambda b: (closing(za.Device.open), {"device": b.device.info.index}),
    "Fold": lambda b: (closing(za.Fold), {"device": b.device, "shape": SHAPE}),
    "Fold.__call__": lambda b: (za.Fold(b.device, SHAPE), {"parts": [b.part]}),
    "KVCache": lambda b: (closing(za.KVCache), {"device": b.device, "page_size": 16} | OF_CACHES),
    "KVCache.append": lambda b: (b.cache.append, {"sequence": b.seq(), "layer": 0, "k": K, "v": V}),
    "KVCache.append_encoded": lambda b: (b.cache.append_encoded, {"sequence": b.seq(), "layer": 0} | ENCODED),
    "KVCache.load": lambda b: (b.cache.load, {"path": b.file}),
    "Ranks": lambda b: (za.Ranks, {"comm": Alone(), "timeout_s": 1.0}),
    "Sequence.save": lambda b: (b.seq().save, {"path": b.file}),
    "Sequence.drop_last": lambda b: (b.seq().drop_last, {"n": 1}),
    "Sequence.keep": lambda b: (b.seq().keep, {"rows": [1], "last": 2}),
    "Sequence.truncate": lambda b: (b.seq().truncate, {"n": 1}),
    "ShardedAttention": lambda b: (closing(za.ShardedAttention), {"cache": b.sharded} | b.options()),
    "ShardedAttention.__call__": lambda b: (b.attend_apart, {"q": Q, "seq": b.apart(), "layer": 0, "k": K, "v": V}),
    "ShardedKVCache": lambda b: (closing(za.ShardedKVCache), {"devices": [b.device], "weights": [1.0]} | OF_CACHES),
    "ShardedKVCache.append": lambda b: (b.sharded.append, {"seq": b.apart(), "layer": 0, "k": K, "v": V}),
    "ShardedSequence.drop_last": lambda b: (b.apart().drop_last, {"n": 1}),
    "ShardedSequence.keep": lambda b: (b.apart().keep, {"rows": [1], "last": 2}),
    "ShardedSequence.truncate": lambda b: (b.apart().truncate, {"n": 1}),
    "attention": lambda b: (za.attention, {"q": Q, "k": K, "v": V, "device": b.device} | b.options()),
}
