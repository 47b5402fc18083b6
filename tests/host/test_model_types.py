"""The shape read from the config.json of every causal type of transformers, against what its model attends.

The model is built on torch's meta device, which computes shapes only, and run on three tokens; an attention function
and the cache note what they get. By default a twelfth of the types runs, with those of CHANGED; ZINC_ATTN_TEST_FULL=1
runs all of them, in a minute.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import FULL

from zinc_attn.errors import ArgumentError
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.models import from_config

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

MOE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
# Beyond 8 layers: what makes layers differ, and what a type's defaults lack. A dict that is empty has the type drawn.
CHANGED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 5]},
    "deepseek_v2": {**MOE, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1},
    "dots1": MOE,
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4": {"text_config": {"num_hidden_layers": 12}},  # per_layer_config with padded indices
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "nemotron": {"num_key_value_heads": 8},
    **{name: {} for name in ("gemma4_text", "jetmoe", "llama4_text", "mllama", "recurrent_gemma", "zamba2", "dory")},
}
# Models of these cannot be built or run on the meta device, so that nothing tells what they attend.
UNBUILT = ("cohere_compass_text", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "megatron-bert", "rembert")
UNBUILT += ("roformer", "xmod")
CHUNKED = ("llama4", "llama4_text")  # whose windows are in the mask alone
TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*UNBUILT})
DRAWN = TYPES if FULL else sorted({*TYPES[::12], *CHANGED})
Layers = Counter[tuple[str, int | None]]  # attention layers by shape and window


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Layers:
    """The calls of attention "meta", which returns zeros, by models that call transformers' AttentionInterface."""
    layers: Layers = Counter()

    def attend(module: Any, q: Any, k: Any, v: Any, *_: Any, sliding_window: int | None = None, **__: Any) -> Any:
        layers[str(AttnShape(q.shape[1], k.shape[1], q.shape[3], v.shape[3])), sliding_window] += 1
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    transformers.AttentionInterface.register("meta", attend)
    transformers.AttentionMaskInterface.register("meta", lambda *_, **__: None)
    for name, number in (("item", 0), ("__bool__", False)):  # of tensors that have no data
        monkeypatch.setattr(torch.Tensor, name, lambda self, number=number: number)
    return layers


def run(path: Path, attention: str | None) -> list[Any]:
    """Run the model of a config.json on the meta device: the layers of its cache, if it has any, that have rows."""
    kind, config = transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"), torch.no_grad():
        model = kind.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).eval()
        cache = getattr(model(torch.ones(1, 3, dtype=torch.long), use_cache=True), "past_key_values", None)
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None] if cache else []


def written(name: str, folder: Path) -> Path:
    """The folder of the config.json of a type, of 8 layers where it can have so many."""
    kind, changes = transformers.CONFIG_MAPPING[name], CHANGED.get(name, {})
    try:
        config = kind(num_hidden_layers=8, **changes)
    except Exception:  # each class has its own
        config = kind(**changes)
    config.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN)
def test_planned_layers_are_those_that_the_model_attends(name: str, tmp_path: Path, attended: Layers) -> None:
    try:
        model = from_config(written(name, tmp_path))
    except ArgumentError as error:
        assert str(error).endswith("; otherwise give --shape and --layers")
        return
    shape, full, windowed = model.shape, model.attention_layers, model.windowed_layers
    try:
        rows = run(tmp_path, "meta")
    except (KeyError, ValueError):  # a model that does not know the name of this attention
        rows = run(tmp_path, None)
    if not attended:  # a model that computes attention itself
        assert {(row.keys.shape[1], row.keys.shape[3]) for row in rows} == {(shape.kv_heads, shape.head_dim)}
        assert (len(rows), 0) == (full, windowed)
        return
    assert attended[str(shape), None] == full + windowed * (name in CHUNKED)
    if name not in CHUNKED:
        assert sum(attended.values()) == full + windowed
        assert {window for _, window in attended} - {None} == {model.window} - {None}
