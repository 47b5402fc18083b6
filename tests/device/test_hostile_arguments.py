"""No argument, however wrong, gives anything but a result or a ZincAttnError, and none does harm to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import Make, closing, parameters, walk
from support import differing

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.tools import export

NATIVE = ONE_DISPATCHER = True
SHAPE = za.AttnShape(2, 2, 64)
Q = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
K, V = (np.linspace(-1, 1, 3 * 128, dtype=np.float32).reshape(3, 2, 64)[::step].copy() for step in (1, -1))
ENCODED = {"k": K.view(np.uint8), "v": V.view(np.uint8)}
OF_CACHES = {"shape": SHAPE, "num_layers": 1, "capacity": 512, "dtype": "f32"}


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


M = np.zeros((1, 1, 2), np.float32)
PART = za.PartialState(np.zeros(1, np.int64), M, M + 1, np.ones((1, 1, 2, 64), np.float32), (0, 1), "a call")
PLAN = {"context_len": 100, "shape": SHAPE, "boundaries": (0, 100), "q_len": 1, "begin": 0}
OPTIONS = {"scale": 0.5, "causal": True, "window": 2, "softcap": 1.0, "sinks": np.zeros(2, np.float32)}
CALL = {"q": Q, "k": K, "v": V} | OPTIONS
MERGED = {"v_a": K, "s_a": K[..., 0], "v_b": V, "s_b": V[..., 0]}


@wraps(za.PartialState)
def folded(**fields: Any) -> object:
    """A part is examined where it is folded."""
    return za.fold([za.PartialState(**fields)])


WITHOUT_A_DEVICE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AttnShape": (za.AttnShape, {"q_heads": 2, "kv_heads": 2, "head_dim": 64}),
    "AttnShape.parse": (za.AttnShape.parse, {"text": "2/2/64"}),
    "AttnShape.kv_bytes_per_token": (SHAPE.kv_bytes_per_token, {"dtype": "f16"}),
    "PartialState": (folded, vars(PART)),
    "PartialState.from_bytes": (za.PartialState.from_bytes, {"data": PART.to_bytes()}),
    "SplitPlan": (za.SplitPlan, PLAN),
    "SplitPlan.fixed": (za.SplitPlan.fixed, {"context_len": 100, "shape": SHAPE, "num_splits": 2}),
    "SplitPlan.from_dict": (za.SplitPlan.from_dict, {"data": za.SplitPlan(**PLAN).to_dict()}),
    "fold": (za.fold, {"parts": [PART]}),
    "merge_state": (za.merge_state, MERGED),
    "merge_states": (za.merge_states, {"v": np.ones((3, 1, 2, 64)), "s": np.zeros((3, 1, 2))}),
    "plan_splits": (za.plan_splits, {"context_len": 100, "shape": SHAPE}),
    "reference.attention": (reference.attention, CALL),
    "reference.emulate": (reference.emulate, CALL),
    "reference.gather": (reference.gather, {"parts": [PART]}),
    "export.export": (export.export, {"directory": "made", "attn_shapes": ()}),
    "export.load_manifest": (export.load_manifest, {"path": "made"}),
}


OF_THE_PACKAGE = {  # methods that only other modules call; "": a class that users do not make, or a ShardedKVCache does
    "Attention": ("replan", "window_of"),
    "Device": ("", "arithmetic_constant", "attends_by_units", "dispatch", "kernel"),
    "DeviceInfo": ("",),
    "KVCache": ("check_sequence", "read_rows"),
    "PendingAttention": ("",),
    "Ranks": ("", "agree", "exchange", "fail", "full", "leave"),
    "Sequence": ("", "retract", "table"),
    "ShardedKVCache": ("keep_rows", "make_shard"),
    "ShardedSequence": ("", "nodes", "positions_on", "tokens"),
}


def public_callables() -> Iterator[str]:
    """Functions, constructors and methods with parameters in ``za`` and ``reference``; exceptions have none."""
    for module, prefix in ((za, ""), (reference, "reference.")):
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing) or (prefix and thing is getattr(za, name, None)):
                continue
            is_class = isinstance(thing, type) and not issubclass(thing, BaseException)
            if is_class or (not isinstance(thing, type) and parameters(thing)):
                yield prefix + name
            for method in vars(thing) if is_class else ():
                member = getattr(thing, method)
                if (method == "__call__" or method[0] != "_") and callable(member) and {*parameters(member)} - {"self"}:
                    yield f"{name}.{method}"


def test_every_public_callable_is_in_a_table() -> None:
    left_out = {f"{owner}.{name}".rstrip(".") for owner, names in OF_THE_PACKAGE.items() for name in names}
    walked = {name for name in (*ON_DEVICE, *WITHOUT_A_DEVICE) if not name.startswith("export.")}
    assert {*public_callables()} == walked | left_out


@pytest.mark.parametrize("name", WITHOUT_A_DEVICE)
def test_a_result_or_a_typed_refusal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "export.load_manifest":
        export.export("made")
    call, arguments = WITHOUT_A_DEVICE[name]
    call(**arguments)
    assert walk(lambda: WITHOUT_A_DEVICE[name]) == []


@pytest.fixture(scope="module")
def bench(device: za.Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(device, tmp_path_factory.mktemp("hostile"))
    yield made
    made.sharded.close()
    made.cache.close()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_device_takes_no_harm(name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("KVCache.load", "Sequence.save"):
        pytest.importorskip("safetensors")
    make: Make = lambda: ON_DEVICE[name](bench)  # noqa: E731
    assert walk(make) == []
    bench.good_call()
