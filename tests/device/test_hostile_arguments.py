"""No argument, however wrong, gives anything but a result or a ZincAttnError, and none does harm: on a device."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import ON_DEVICE, Bench, Make, closing, walk
from support import FULL

import zinc_attn as za

NATIVE = ONE_DISPATCHER = True


@pytest.fixture(scope="module")
def bench(device: za.Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(device, tmp_path_factory.mktemp("hostile"))
    yield made
    made.sharded.close()
    made.cache.close()


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_result_or_a_typed_refusal(name: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("KVCache.load", "Sequence.save"):
        pytest.importorskip("safetensors")
    make: Make = lambda: ON_DEVICE[name](bench)  # noqa: E731
    assert walk(make) == []
    bench.good_call()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_integration(device: za.Device) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from zinc_attn.integrations import transformers as hf

    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64, hidden_size=128, vocab_size=9
    )
    with hf.ZincCache(config, 64, device=device, max_batch=2) as cache:
        hf.register()
        with torch.no_grad():
            model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="zinc")
            model(torch.ones((1, 3), dtype=torch.int64), cache=cache)
        x, two = torch.ones((1, 2, 1, 64)), {"batch_size": 1, "q_length": 1, "kv_length": 1}
        table: dict[str, Make] = {
            "attention_forward": lambda: (
                hf.attention_forward,
                {"module": None, "query": x, "key": x, "value": x, "attention_mask": None, "scaling": 0.5},
            ),
            "attention_mask": lambda: (hf.attention_mask, {**two, "attention_mask": torch.ones((1, 1))}),
            "ZincCache": lambda: (closing(hf.ZincCache), {"config": config, "max_cache_len": 64, "device": device}),
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
