"""No argument, however wrong, gives anything but a result or a ZincAttnError, and none does harm: on a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hostile import ON_DEVICE, Make, walk
from support import FULL, differing, open_device

import zinc_attn as za
from zinc_attn import reference

SHAPE = za.AttnShape(2, 2, 64)
Q = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
K, V = (np.linspace(-1, 1, 3 * 128, dtype=np.float32).reshape(3, 2, 64)[::step].copy() for step in (1, -1))


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

    def made(**given: Any) -> None:
        make(**given).close()

    made.__wrapped__ = make  # type: ignore[attr-defined]
    return made


TABLE: dict[str, Callable[[Bench], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "Attention": lambda b: (closing(za.Attention), {"cache": b.cache} | b.options()),
    "Attention.__call__": lambda b: (b.attend, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.partial": lambda b: (b.attend.partial, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.prepare": lambda b: (b.attend.prepare, {"tokens": 100, "batch": 2, "q_len": 3}),
    "Attention.submit": lambda b: (b.attend.submit, {"q": Q, "seq": b.seq(), "layer": 0, "k": K, "v": V}),
    "Attention.record": lambda b: (b.attend.record, {"sequence": 0, "q": 0, "seq": b.seq(), "layer": 0}),
    "Device.from_kompute": lambda b: (za.Device.from_kompute, {"manager": 0, "index": 0}),
    "Device.open": lambda b: (closing(za.Device.open), {"device": b.device.info.index, "runtime": "vulkan"}),
    "Fold": lambda b: (closing(za.Fold), {"device": b.device, "shape": SHAPE}),
    "Fold.__call__": lambda b: (za.Fold(b.device, SHAPE), {"parts": [b.part]}),
    "KVCache": lambda b: (
        closing(za.KVCache),
        {"device": b.device, "shape": SHAPE, "num_layers": 1, "capacity": 64, "dtype": "f32", "page_size": 16},
    ),
    "KVCache.append": lambda b: (b.cache.append, {"sequence": b.seq(), "layer": 0, "k": K, "v": V}),
    "KVCache.append_encoded": lambda b: (
        b.cache.append_encoded,
        {"sequence": b.seq(), "layer": 0, "k": K.view(np.uint8), "v": V.view(np.uint8)},
    ),
    "KVCache.load": lambda b: (b.cache.load, {"path": b.file}),
    "Ranks": lambda b: (za.Ranks, {"comm": Alone(), "timeout_s": 1.0}),
    "Sequence.save": lambda b: (b.seq().save, {"path": b.file}),
    "Sequence.drop_last": lambda b: (b.seq().drop_last, {"n": 1}),
    "Sequence.keep": lambda b: (b.seq().keep, {"rows": [1], "last": 2}),
    "Sequence.truncate": lambda b: (b.seq().truncate, {"n": 1}),
    "ShardedAttention": lambda b: (closing(za.ShardedAttention), {"cache": b.sharded} | b.options()),
    "ShardedAttention.__call__": lambda b: (b.attend_apart, {"q": Q, "seq": b.apart(), "layer": 0, "k": K, "v": V}),
    "ShardedKVCache": lambda b: (
        closing(za.ShardedKVCache),
        {"devices": [b.device], "shape": SHAPE, "num_layers": 1, "capacity": 512, "dtype": "f32", "weights": [1.0]},
    ),
    "ShardedKVCache.append": lambda b: (b.sharded.append, {"seq": b.apart(), "layer": 0, "k": K, "v": V}),
    "ShardedSequence.drop_last": lambda b: (b.apart().drop_last, {"n": 1}),
    "ShardedSequence.keep": lambda b: (b.apart().keep, {"rows": [1], "last": 2}),
    "ShardedSequence.truncate": lambda b: (b.apart().truncate, {"n": 1}),
    "attention": lambda b: (za.attention, {"q": Q, "k": K, "v": V, "device": b.device} | b.options()),
}


@pytest.fixture(scope="module")
def device() -> Iterator[za.Device]:
    """One dispatcher: what is tested here lies in front of both."""
    with open_device("default", "vulkan") as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(device: za.Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(device, tmp_path_factory.mktemp("hostile"))
    yield made
    made.sharded.close()
    made.cache.close()


def test_the_table_is_whole() -> None:
    assert set(TABLE) == ON_DEVICE


@pytest.mark.parametrize("name", TABLE)
def test_a_result_or_a_typed_refusal(name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("KVCache.load", "Sequence.save"):
        pytest.importorskip("safetensors")
    make: Make = lambda: TABLE[name](bench)  # noqa: E731
    assert walk(make) == []
    bench.good_call()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_integration(device: za.Device) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from zinc_attn.integrations import transformers as hf

    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64, hidden_size=128
    )
    with hf.ZincCache(config, 64, device=device, max_batch=2) as cache:
        cache.append(lambda layer: (K.astype(np.float16), V.astype(np.float16)), torch.float16)
        x, two = torch.ones((1, 2, 1, 64)), {"batch_size": 1, "q_length": 1, "kv_length": 1}
        table: dict[str, Make] = {
            "attention_forward": lambda: (
                hf.attention_forward,
                {"module": None, "query": x, "key": x, "value": x, "attention_mask": None, "scaling": 0.5},
            ),
            "attention_mask": lambda: (hf.attention_mask, {**two, "attention_mask": torch.ones((1, 1))}),
            "ZincCache": lambda: (closing(hf.ZincCache), {"config": config, "capacity": 64, "device": device}),
            "allocate": lambda: (cache.allocate, {"dtype": torch.float16}),
            "set_layout": lambda: (cache.set_layout, {"num_splits": 1}),
            "crop": lambda: (cache.crop, {"tokens_to_remove": 0}),
            "reorder_cache": lambda: (cache.reorder_cache, {"beam_idx": [0]}),
            "batch_repeat_interleave": lambda: (cache.batch_repeat_interleave, {"repeats": 1}),
            "batch_select_indices": lambda: (cache.batch_select_indices, {"indices": [0]}),
            "update": lambda: (cache.layers[0].update, {"key_states": x, "value_states": x}),
        }
        if not FULL:  # it takes as long as all others together
            del table["attention_forward"]
        assert {name: wrong for name, make in table.items() if (wrong := walk(make))} == {}
        for value in (-1.0, 0.5, float("nan"), 2):
            with pytest.raises(za.errors.ValueRangeError, match=r"^attention_mask\[0, 0\]: got .*, expected 0"):
                hf.attention_mask(1, 1, 1, attention_mask=torch.tensor([[value]]))
        with pytest.raises(za.errors.ShapeError, match=r"^attention_mask: got shape \(2, 1\), expected \(1, 1\)"):
            hf.attention_mask(1, 1, 1, attention_mask=torch.ones((2, 1)))
        with pytest.raises(za.errors.ArgumentError, match=r"^beam_idx: got .*0\.5.*, expected an int"):
            cache.reorder_cache(torch.tensor([0.5]))
