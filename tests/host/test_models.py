"""Model presets, and the config.json files that people have."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zinc_attn.errors import ArgumentError
from zinc_attn.tools.models import PRESETS, find_model, from_config, slug

QWEN_NEXT = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 40}
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
WINDOWED = ["sliding_attention", "full_attention"] * 12
GPT_OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24}
GPT_OSS |= {"sliding_window": 128, "layer_types": WINDOWED}
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 32}
LLAMA |= {"head_dim": None}
GEMMA_4 = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "num_hidden_layers": 60}
GEMMA_4 |= {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "global_head_dim": 512, "sliding_window": 1024}
GEMMA_4 |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}
QWEN_2 = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "num_hidden_layers": 28}
QWEN_2["sliding_window"] = 4096
LATENT = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
# of DeepSeek-V3, whose config.json states no head_dim; transformers writes that of the rotated part
DEEPSEEK_V3 = {"num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128, "hidden_size": 7168, **LATENT}
GLM_4_7_FLASH = {**LATENT, "model_type": "glm4_moe_lite", "num_attention_heads": 20, "num_key_value_heads": 20}
GLM_4_7_FLASH |= {"num_hidden_layers": 47, "qk_nope_head_dim": 192, "v_head_dim": 256}
MINICPM_3 = {**LATENT, "num_attention_heads": 40, "hidden_size": 2560, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MIMO_V2 = {"model_type": "mimo_v2_flash", "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192}
MIMO_V2 |= {"v_head_dim": 128, "num_hidden_layers": 12, "sliding_window": 129}
MIMO_V2 |= {"hybrid_layer_pattern": [0, *[1] * 4, 0] * 2}
KDA = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128}
KIMI_LINEAR = {**DEEPSEEK_V3, "num_hidden_layers": 4, "linear_attn_config": KDA}
LONGCAT = {"model_type": "longcat_flash", "num_layers": 28, "num_attention_heads": 64, "v_head_dim": 128}
LONGCAT |= {key: value for key, value in LATENT.items() if key != "num_hidden_layers"}
MISTRAL_4 = {**LATENT, "num_attention_heads": 32, "num_hidden_layers": 36, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
MISTRAL_4 |= {"v_head_dim": 128, "head_dim": 128}
BLOOM = {"model_type": "bloom", "n_head": 32, "n_layer": 30, "hidden_size": 4096}
MPT = {"model_type": "mpt", "n_heads": 32, "n_layers": 30, "d_model": 4096, "max_seq_len": 2048}
FALCON = {"model_type": "falcon", "num_attention_heads": 64, "num_hidden_layers": 24, "hidden_size": 4096}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


ADVICE = "otherwise give --shape and --layers"
NO_HEADS = f"without num_attention_heads, expected a Hugging Face config.json that states it; {ADVICE}"


@pytest.mark.parametrize(
    ("config", "shape", "layers"),  # layers: full, windowed, window
    [
        (LLAMA, "32/8/128", (32, 0, None)),
        ({**LLAMA, "head_dim": 72}, "32/8/72", (32, 0, None)),
        ({**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 1}, "64/1/64", (32, 0, None)),
        ({**LLAMA, "num_key_value_heads": None}, "32/32/128", (32, 0, None)),
        ({**QWEN_NEXT, "full_attention_interval": 4}, "16/2/256", (10, 0, None)),
        ({"text_config": {**QWEN_NEXT, "layer_types": PERIOD * 10}}, "16/2/256", (10, 0, None)),
        ({"thinker_config": {"text_config": LLAMA}}, "32/8/128", (32, 0, None)),
        (GPT_OSS, "64/8/64", (12, 12, 128)),
        (GEMMA_4, "32/4/512", (10, 50, 1024)),
        ({**LLAMA, "sliding_window": 512, "model_type": "gemma2"}, "32/8/128", (16, 16, 512)),
        ({**LLAMA, "sliding_window": 512, "sliding_window_pattern": 6}, "32/8/128", (5, 27, 512)),
        ({**LLAMA, "sliding_window": None, "max_position_embeddings": None}, "32/8/128", (32, 0, None)),
        ({**QWEN_2, "use_sliding_window": False}, "28/4/128", (28, 0, None)),
        ({**QWEN_2, "use_sliding_window": True, "max_window_layers": 21}, "28/4/128", (21, 7, 4096)),
        ({**LLAMA, "num_key_value_heads": 1, "v_head_dim": 96}, "32/1/128/96", (32, 0, None)),
        (DEEPSEEK_V3, "128/128/192/128", (61, 0, None)),
        ({**DEEPSEEK_V3, "head_dim": 64}, "128/128/192/128", (61, 0, None)),
        ({"text_config": DEEPSEEK_V3}, "128/128/192/128", (61, 0, None)),
        (GLM_4_7_FLASH, "20/20/256", (47, 0, None)),
        (MINICPM_3, "40/40/96/64", (61, 0, None)),
        (MIMO_V2, "64/4/192/128", (4, 8, 129)),
        ({**MIMO_V2, "sliding_window": 128, "sliding_window_size": 128}, "64/4/192/128", (4, 8, 129)),
        ({**MIMO_V2, "hybrid_layer_pattern": None, "layer_types": WINDOWED[:12]}, "64/4/192/128", (6, 6, 129)),
        (KIMI_LINEAR, "128/128/192/128", (1, 0, None)),
        ({**DEEPSEEK_V3, "layer_group_size": 6}, "128/128/192/128", (10, 0, None)),
        (LONGCAT, "64/64/192/128", (56, 0, None)),
        ({**LONGCAT, "num_hidden_layers": 56}, "64/64/192/128", (56, 0, None)),
        (MISTRAL_4, "32/32/128", (36, 0, None)),
        (BLOOM, "32/32/128", (30, 0, None)),
        ({**BLOOM, "n_head": 8, "num_attention_heads": 32}, "32/32/128", (30, 0, None)),
        (MPT, "32/32/128", (30, 0, None)),
        ({"model_type": "falcon", "n_head": 64, "n_layer": 24, "hidden_size": 4096}, "64/1/64", (24, 0, None)),
        ({**FALCON, "multi_query": False, "num_kv_heads": 8}, "64/64/64", (24, 0, None)),
        ({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 8}, "64/8/64", (24, 0, None)),
        ({**FALCON, "new_decoder_architecture": True}, "64/64/64", (24, 0, None)),
    ],
)
def test_config(tmp_path: Path, config: Any, shape: str, layers: tuple[int, int, int | None]) -> None:
    model = from_config(write(tmp_path, config))
    assert str(model.shape) == shape
    assert (model.attention_layers, model.windowed_layers, model.window) == layers
    assert from_config(tmp_path) == model  # the folder will do


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, f"got a JSON object {NO_HEADS}"),
        ([1], f"got list {NO_HEADS}"),
        ({"num_attention_heads": 32}, f"hidden_size: missing, expected an int; {ADVICE}"),
        ({"num_attention_heads": 32, "head_dim": 64}, f"num_hidden_layers: missing, expected an int; {ADVICE}"),
        ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads: got '32', expected an int of at least 1"),
        (
            {**LLAMA, "hidden_size": 4000, "num_attention_heads": 33},
            "hidden_size: got 4000, expected a multiple of num_attention_heads = 33",
        ),
        ({**LLAMA, "head_dim": 577}, "AttnShape.head_dim: got 577, expected an int from 1 to 576"),
        ({**LLAMA, "v_head_dim": 0}, "v_head_dim: got 0, expected an int of at least 1"),
        ({**MIMO_V2, "num_hidden_layers": 13}, "layers: got a list of 12, expected num_hidden_layers = 13"),
        ({**LLAMA, "layer_types": [1]}, "layer_types: got 1 entries, expected a list of num_hidden_layers = 32"),
        ({**LLAMA, "sliding_window": 9}, "layers: got 0 of 32 that attend to the whole context, expected at least 1"),
        ({**LLAMA, "kv_lora_rank": 512}, f"qk_nope_head_dim: missing, expected an int; {ADVICE}"),
        ({**LONGCAT, "model_type": "other"}, f"num_hidden_layers: missing, expected an int; {ADVICE}"),
        ({**LONGCAT, "num_layers": None}, f"num_layers: missing, expected an int; {ADVICE}"),
        (
            {**DEEPSEEK_V3, "index_topk": 2048},
            "index_topk: sparse attention to chosen keys, expected attention to all keys or a window",
        ),
    ],
)
def test_refusal(tmp_path: Path, config: Any, message: str) -> None:
    path = write(tmp_path, config)
    with pytest.raises(ArgumentError) as error:
        from_config(path)
    assert str(error.value) == f"{path}: {message}"


def test_notes(tmp_path: Path) -> None:
    expanded = "latent attention, with K and V expanded for every head"
    for config, note in (
        (LLAMA, ""),
        (DEEPSEEK_V3, expanded),
        (KIMI_LINEAR, f"1 of 4 layers; {expanded}"),
        (MIMO_V2, "4 of 12 layers"),
    ):
        assert from_config(write(tmp_path, config)).note == note


def test_find_model(tmp_path: Path) -> None:
    assert find_model("Qwen3-8B") is PRESETS["qwen3-8b"]
    assert find_model(str(write(tmp_path, LLAMA))).name == tmp_path.name
    with pytest.raises(ArgumentError) as error:
        find_model("qwen9")
    presets = ", ".join(PRESETS)
    assert str(error.value) == f"model: got 'qwen9', expected a path to a config.json or one of {presets}"


# name, attention layers (windowed ones included), shape, KiB of float16 K and V per token where published
@pytest.mark.parametrize(
    ("name", "layers", "shape", "kib"),
    [
        ("qwen3.6-35b-a3b", 10, "16/2/256", 20),
        ("qwen3-30b-a3b", 48, "32/4/128", 96),
        ("qwen3-8b", 36, "32/8/128", 144),
        ("qwen3.8-27b", 16, "24/4/256", 64),
        ("gpt-oss-20b", 24, "64/8/64", None),
        ("gemma-3-27b", 62, "32/16/128", None),
        ("gemma-4-31b", 60, "32/4/512", None),
        ("llama-3.1-8b", 32, "32/8/128", None),
        ("codellama-34b", 48, "64/8/128", None),
        ("smollm2-135m", 30, "9/3/64", None),
        ("glm-4.7-flash", 47, "20/20/256", 47 * 20),
        ("glm-4.7-flash-latent", 47, "20/1/576/512/latent", 52.875),
        ("deepseek-v3", 61, "128/128/192/128", 61 * 80),
        ("deepseek-v3-latent", 61, "128/1/576/512/latent", 68.625),
        ("kimi-k2", 61, "64/64/192/128", 61 * 40),
        ("kimi-k2-latent", 61, "64/1/576/512/latent", 68.625),
        ("mistral-small-4", 36, "32/32/128", 36 * 16),
        ("mistral-small-4-latent", 36, "32/1/320/256/latent", 22.5),
        ("mimo-v2-flash", 48, "64/4/192/128", None),
    ],
)
def test_presets(name: str, layers: int, shape: str, kib: int | None) -> None:
    model = PRESETS[name]
    assert (str(model.shape), model.attention_layers + model.windowed_layers) == (shape, layers)
    if kib is not None:
        assert model.attention_layers * model.shape.kv_bytes_per_token("f16") == kib * 1024
    assert slug(name) == name and len(PRESETS) == 19


def test_the_tokens_that_a_model_was_made_for(tmp_path: Path) -> None:
    for given, most in ((4096, 4096), (None, None), ("many", None), (0, None)):
        assert from_config(write(tmp_path, {**LLAMA, "max_position_embeddings": given})).max_context == most
    assert from_config(write(tmp_path, LLAMA)).max_context is None
    assert PRESETS["qwen3-8b"].max_context == 40960


def test_presets_are_what_their_configs_say(tmp_path: Path) -> None:
    """But for the maximum context and, in MiMo's case, what the config does not say."""
    kimi = {**DEEPSEEK_V3, "num_attention_heads": 64}
    for name, config in (
        ("deepseek-v3", DEEPSEEK_V3),
        ("glm-4.7-flash", GLM_4_7_FLASH),
        ("kimi-k2", kimi),
        ("mistral-small-4", MISTRAL_4),
    ):
        found = from_config(write(tmp_path, config))
        assert replace(found, name=name, max_context=PRESETS[name].max_context) == PRESETS[name]
    mimo = {**MIMO_V2, "num_hidden_layers": 48, "hybrid_layer_pattern": [0, *[1] * 4, 0, *([1] * 5 + [0]) * 7]}
    found, preset = from_config(write(tmp_path, mimo)), PRESETS["mimo-v2-flash"]
    assert replace(found, name=preset.name, note=preset.note) == preset


def test_slug() -> None:
    assert slug("llvmpipe (LLVM 15.0.6, 256 bits)") == "llvmpipe-llvm-15.0.6-256-bits"
    assert slug("///") == "model"
