"""Model presets, and the config.json files that people have."""

import json
from dataclasses import replace

import pytest

from zinc_attn.errors import ArgumentError
from zinc_attn.tools.models import _KINDS, PRESETS, find_model, from_config, slug

QWEN_NEXT = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 40}
WINDOWED = ["sliding_attention", "full_attention"] * 12
GPT_OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24}
GPT_OSS |= {"sliding_window": 128, "layer_types": WINDOWED}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32}
LLAMA |= {"head_dim": None}
GEMMA_4 = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "num_hidden_layers": 60}
GEMMA_4 |= {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "global_head_dim": 512, "sliding_window": 1024}
GEMMA_4 |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}
LATENT = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
# of DeepSeek-V3, whose config.json states no head_dim; transformers writes that of the rotated part
DEEPSEEK_V3 = {"num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128, "hidden_size": 7168, **LATENT}
GLM_4_7_FLASH = {**LATENT, "model_type": "glm4_moe_lite", "num_attention_heads": 20, "num_key_value_heads": 20}
GLM_4_7_FLASH |= {"num_hidden_layers": 47, "qk_nope_head_dim": 192, "v_head_dim": 256}
MISTRAL_4 = {**LATENT, "num_attention_heads": 32, "num_hidden_layers": 36, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
MISTRAL_4 |= {"v_head_dim": 128, "head_dim": 128}


def write(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


ADVICE = "otherwise give --shape and --layers"
COUNT = "expected an int of at least 1"
UNREAD_FIELDS = (  # which are refused whatever they are
    *("index_topk", "hybrid_layer_pattern", "layer_group_size", "linear_attn_config", "hybrid_override_pattern"),
    *("kv_channels", "block_types", "attn_type_list", "cross_attention_layers", "num_attention_heads_per_layer"),
    *("attention_head_dim", "n_recurrent_loops"),
)
SINGLE = "32/8/128 and 32/8/64, and windows [], expected a single shape and at most a single window"
WHOLE = "that attend to the whole context, expected at least 1"
SOME = "expected those of 32 layers, some of which have a window"
UNREAD = "whose heads or layers are not read here, expected a model without"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, "got no num_attention_heads, expected a Hugging Face config.json that states it"),
        ([1], "got no num_attention_heads, expected a Hugging Face config.json that states it"),
        ({"num_attention_heads": 32, "num_hidden_layers": 2}, f"hidden_size: got none, {COUNT}"),
        ({**LLAMA, "hidden_size": 4001}, "hidden_size: got 4001, expected a multiple of num_attention_heads = 32"),
        ({**LLAMA, "head_dim": 577}, "AttnShape.head_dim: got 577, expected an int from 1 to 576"),
        ({**LLAMA, "layer_types": [1]}, "layer_types: got 1 entries, expected a list of num_hidden_layers = 32"),
        ({**LLAMA, "layer_types": ["hybrid"] * 32}, f"layer_types: got 'hybrid', expected some of {', '.join(_KINDS)}"),
        ({**LLAMA, "per_layer_config": {"3": {"head_dim": 64}}}, f"layers: got layers of {SINGLE}"),
        ({**LLAMA, "per_layer_config": {"32": {}}}, "per_layer_config: got '32', expected the indices of 32 layers"),
        ({**LLAMA, "per_layer_config": [1]}, "per_layer_config: got [1], expected an object of objects"),
        ({**LLAMA, "attn_layer_indices": [32]}, "attn_layer_indices: got [32], expected a list of layers below 32"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, f"layers: got 0 of 32 {WHOLE}"),
        *(
            ({**LLAMA, "sliding_window": 9, **others}, f"layer_types: got none, {SOME}")
            for others in ({}, {"model_type": "gemma2"}, {"use_sliding_window": True, "max_window_layers": 21})
        ),
        ({**LLAMA, "kv_lora_rank": 512}, f"qk_nope_head_dim: got none, {COUNT}"),
        *(
            ({**LLAMA, "model_type": kind}, f"got model_type '{kind}', {UNREAD}")
            for kind in ("diffllama", "falcon", "longcat_flash", "mimo_v2_flash")
        ),
        *(({"text_config": {**DEEPSEEK_V3, key: [1]}}, f"got {key}, {UNREAD}") for key in UNREAD_FIELDS),
    ],
)
def test_refusal(tmp_path, config, message):
    path = write(tmp_path, config)
    with pytest.raises(ArgumentError) as error:
        from_config(path)
    assert str(error.value) == f"{path}: {message}; {ADVICE}"


def test_a_window_that_is_off_and_the_size_of_v(tmp_path):
    """Of types that test_model_types.py has with --full alone. A config's folder will do."""
    qwen_2 = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "num_hidden_layers": 28}
    write(tmp_path, {**qwen_2, "sliding_window": 4096, "use_sliding_window": False})
    model = find_model(str(tmp_path))
    assert (str(model.shape), model.attention_layers, model.windowed_layers) == ("28/4/128", 28, 0)
    assert str(from_config(write(tmp_path, {**LLAMA, "v_head_dim": 96})).shape) == "32/8/128/96"


PUBLISHED = {  # KiB of float16 K and V per token
    **{"gemma-3-27b": 80, "codellama-34b": 192, "smollm2-135m": 22.5, "mimo-v2-flash": 22.5},
    **{"qwen3.6-35b-a3b": 20, "qwen3-30b-a3b": 96, "qwen3-8b": 144, "qwen3.8-27b": 64, "llama-3.1-8b": 128},
    **{"glm-4.7-flash": 940, "glm-4.7-flash-latent": 52.875, "deepseek-v3": 4880, "deepseek-v3-latent": 68.625},
    **{"kimi-k2": 2440, "kimi-k2-latent": 68.625, "mistral-small-4": 576, "mistral-small-4-latent": 22.5},
}


def test_presets(tmp_path):
    assert all(slug(name) == name == model.name for name, model in PRESETS.items())
    assert find_model("Qwen3-8B") is PRESETS["qwen3-8b"]
    assert (slug("llvmpipe (LLVM 15.0.6, 256 bits)"), slug("///")) == ("llvmpipe-llvm-15.0.6-256-bits", "model")
    for model, kib in ((PRESETS[name], kib) for name, kib in PUBLISHED.items()):
        assert model.attention_layers * model.shape.kv_bytes_per_token("f16") == kib * 1024, model.name
    configs = {"deepseek-v3": DEEPSEEK_V3, "glm-4.7-flash": GLM_4_7_FLASH, "mistral-small-4": MISTRAL_4}
    configs |= {"kimi-k2": {**DEEPSEEK_V3, "num_attention_heads": 64}, "gpt-oss-20b": GPT_OSS, "gemma-4-31b": GEMMA_4}
    configs["qwen3.6-35b-a3b"] = {**QWEN_NEXT, "full_attention_interval": 4}
    configs["llama-3.1-8b"] = {"thinker_config": {"text_config": LLAMA}}
    for name, config in configs.items():
        assert replace(from_config(write(tmp_path, config)), name=name) == PRESETS[name]
