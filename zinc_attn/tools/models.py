"""Model presets: the attention of models that people run, by name or from a Hugging Face config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError
from ..files import read_json
from ..shapes import AttnShape

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")  # of multimodal models
_FULL: Final = ("full_attention", "attention")  # entries of layer_types
_WINDOWED: Final = ("sliding_attention", "chunked_attention")
_ALTERNATING: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # where old files do not state the pattern
_GPT_NAMES: Final = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_embed": "hidden_size"}
_NAMES: Final = {  # a model type's own names of fields
    "bloom": _GPT_NAMES,
    "falcon": _GPT_NAMES,
    "mpt": {
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
    },
}
_EXPANDED: Final = "latent attention, with K and V expanded for every head"
_LINEAR: Final = "the rest linear attention"
_ABSORBED: Final = "latent attention, absorbed: all heads attend the compressed rows"


@dataclass(frozen=True)
class ModelPreset:
    """The attention of one model.

    shape: of the layers that attend to the whole context. attention_layers: how many of these there are.
    windowed_layers: how many see the last ``window`` keys only. Other layers hold no K and V. max_context: the tokens
    that the model was made for, its config's max_position_embeddings; None where that is not known.
    """

    name: str
    shape: AttnShape
    attention_layers: int
    note: str = ""
    windowed_layers: int = 0
    window: int | None = None
    max_context: int | None = None


def _latent(
    name: str, layers: int, expanded: AttnShape, compressed: tuple[int, int], max_context: int | None = None
) -> tuple[ModelPreset, ModelPreset]:
    """A model with multi-head latent attention as its config.json describes it, and NAME-latent.

    compressed: kv_lora_rank and qk_rope_head_dim. The latter preset has the shape of the absorbed form, which caches
    the compressed rows.
    """
    rank, rotated = compressed
    absorbed = AttnShape(expanded.q_heads, 1, rank + rotated, rank, latent=True)
    return (
        ModelPreset(name, expanded, layers, _EXPANDED, max_context=max_context),
        ModelPreset(f"{name}-latent", absorbed, layers, _ABSORBED, max_context=max_context),
    )


_PRESETS: Final = (
    ModelPreset("qwen3.6-35b-a3b", AttnShape(16, 2, 256), 10, f"10 of 40 layers, {_LINEAR}", max_context=262_144),
    ModelPreset("qwen3-30b-a3b", AttnShape(32, 4, 128), 48, max_context=40_960),
    ModelPreset("qwen3-8b", AttnShape(32, 8, 128), 36, max_context=40_960),
    ModelPreset("qwen3.8-27b", AttnShape(24, 4, 256), 16, f"16 of 64 layers, {_LINEAR}"),
    ModelPreset(
        "gpt-oss-20b", AttnShape(64, 8, 64), 12, "12 of 24 layers; attention sinks", 12, 128, max_context=131_072
    ),
    ModelPreset("gemma-3-27b", AttnShape(32, 16, 128), 10, "10 of 62 layers", 52, 1024, max_context=131_072),
    ModelPreset(
        "gemma-4-31b",
        AttnShape(32, 4, 512),
        10,
        "10 of 60 layers; the others are 32/16/256",
        50,
        1024,
        max_context=262_144,
    ),
    ModelPreset("llama-3.1-8b", AttnShape(32, 8, 128), 32, max_context=131_072),
    ModelPreset("codellama-34b", AttnShape(64, 8, 128), 48, max_context=16_384),
    ModelPreset("smollm2-135m", AttnShape(9, 3, 64), 30, max_context=8_192),
    *_latent("glm-4.7-flash", 47, AttnShape(20, 20, 256), (512, 64), max_context=202_752),
    *_latent("deepseek-v3", 61, AttnShape(128, 128, 192, 128), (512, 64), max_context=163_840),
    *_latent("kimi-k2", 61, AttnShape(64, 64, 192, 128), (512, 64)),
    *_latent("mistral-small-4", 36, AttnShape(32, 32, 128), (256, 64)),
    ModelPreset(
        "mimo-v2-flash",
        AttnShape(64, 4, 192, 128),
        9,
        "9 of 48 layers; the others are 64/8/192/128, with attention sinks",
        39,
        129,
    ),
)
PRESETS: Final = {preset.name: preset for preset in _PRESETS}


def find_model(text: str) -> ModelPreset:
    """A preset by its name in any case, or what ``from_config`` reads at a path. ArgumentError lists the presets."""
    preset = PRESETS.get(text.strip().lower())
    if preset is not None:
        return preset
    if os.path.exists(text):
        return from_config(text)
    raise ArgumentError(f"model: got {text!r}, expected a path to a config.json or one of {', '.join(PRESETS)}")


def from_config(path: str | Path) -> ModelPreset:
    """The attention of a Hugging Face ``config.json`` (or of the folder that holds one).

    Heads: num_attention_heads, num_key_value_heads (absent: as many), head_dim (absent: hidden_size /
    num_attention_heads), v_head_dim (absent: head_dim); in Gemma 4's full layers global_head_dim and
    num_global_key_value_heads; in Falcon num_kv_heads, multi_query and new_decoder_architecture. With kv_lora_rank, the
    shape is that of expanded K and V: num_attention_heads, qk_nope_head_dim + qk_rope_head_dim, v_head_dim. The names
    that BLOOM, Falcon and MPT have for these (n_head, n_heads, d_model and others) are known. Layers:
    num_hidden_layers, in LongCat twice num_layers; which of them attend: layer_types, full_attention_interval,
    layer_group_size, hybrid_layer_pattern, linear_attn_config, sliding_window_pattern or sliding_window. ArgumentError
    names the file and the key.
    """
    file, data = read_config(path)
    config = _text_part(data)
    if config is None:
        kind = "a JSON object" if isinstance(data, dict) else type(data).__name__
        raise ArgumentError(
            f"{file}: got {kind} without num_attention_heads, expected a Hugging Face config.json that "
            "states it; otherwise give --shape and --layers"
        )
    try:
        return _preset(config, file.resolve().parent.name if file.name == "config.json" else file.stem)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from error


def read_config(path: str | Path) -> tuple[Path, Any]:
    """The path of a config.json, given itself or its folder, and what it holds. ArgumentError names the file."""
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    return file, read_json(file, "a Hugging Face config.json")


def slug(text: str) -> str:
    """``text`` as a file name: lower-case letters, digits, dots and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def _text_part(data: Any) -> Mapping[str, Any] | None:
    """The object that states num_attention_heads: ``data`` or a text part nested in it."""
    if not isinstance(data, dict):
        return None
    names = _NAMES.get(str(data.get("model_type")), {})
    data = {new: data[old] for old, new in names.items() if old in data} | data
    nested = (_text_part(data.get(key)) for key in _TEXT_PARTS)
    return next((part for part in nested if part is not None), data if "num_attention_heads" in data else None)


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive int of the config; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ArgumentError(f"{key}: missing, expected an int; otherwise give --shape and --layers")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{key}: got {value!r}, expected an int of at least 1")
    return value


def _preset(config: Mapping[str, Any], name: str) -> ModelPreset:
    """The attention that a text model's config describes."""
    if config.get("index_topk"):
        raise ArgumentError("index_topk: sparse attention to chosen keys, expected attention to all keys or a window")
    shape = _latent_shape(config) if config.get("kv_lora_rank") else _shape(config)
    layers = _layer_count(config)
    full, windowed = _layers(config, layers)
    if not full:
        raise ArgumentError(f"layers: got 0 of {layers} that attend to the whole context, expected at least 1")
    notes = [f"{full} of {layers} layers"] if full < layers else []
    if config.get("kv_lora_rank"):
        notes.append(_EXPANDED)
    most = config.get("max_position_embeddings")
    most = most if isinstance(most, int) and most > 0 else None
    window = _window(config) if windowed else None
    return ModelPreset(name, shape, full, "; ".join(notes), windowed, window, most)


def _layer_count(config: Mapping[str, Any]) -> int:
    """The layers of a model; LongCat's have two attentions each, and each of these counts as one."""
    if config.get("model_type") == "longcat_flash" and config.get("num_hidden_layers") is None:
        return 2 * _count(config, "num_layers")
    return _count(config, "num_hidden_layers")


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """KV heads of a model with ``heads`` query heads."""
    if config.get("model_type") != "falcon":
        return _count(config, "num_key_value_heads", heads)
    if config.get("new_decoder_architecture"):
        return _count(config, "num_kv_heads", heads)
    return heads if config.get("multi_query") is False else 1


def _shape(config: Mapping[str, Any]) -> AttnShape:
    """The shape of the layers with full attention."""
    heads = _count(config, "num_attention_heads")
    kv_heads = _kv_heads(config, heads)
    if config.get("head_dim") is None:
        hidden = _count(config, "hidden_size")
        if hidden % heads:
            raise ArgumentError(f"hidden_size: got {hidden}, expected a multiple of num_attention_heads = {heads}")
        head_dim = hidden // heads
    else:
        head_dim = _count(config, "head_dim")
    head_dim = _count(config, "global_head_dim", head_dim)
    if config.get("attention_k_eq_v"):  # Gemma 4: its global layers share one projection and have heads of their own
        kv_heads = _count(config, "num_global_key_value_heads", kv_heads)
    return AttnShape(heads, kv_heads, head_dim, _count(config, "v_head_dim", head_dim))


def _latent_shape(config: Mapping[str, Any]) -> AttnShape:
    """The shape of multi-head latent attention when K and V are expanded: every query head has its own."""
    heads = _count(config, "num_attention_heads")
    head_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
    default = _count(config, "hidden_size") // heads if config.get("v_head_dim") is None else None  # MiniCPM3
    return AttnShape(heads, heads, head_dim, _count(config, "v_head_dim", default))


def _window(config: Mapping[str, Any]) -> int:
    """The keys that a row of a windowed layer sees, its own included."""
    if config.get("model_type") == "mimo_v2_flash" and config.get("sliding_window_size") is not None:
        return _count(config, "sliding_window_size") + 1  # which counts the keys before the row's own
    return _count(config, "sliding_window", _count(config, "attention_chunk_size", 1))


def _layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(layers with full attention, windowed layers)."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            given = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArgumentError(f"layer_types: got {given}, expected a list of num_hidden_layers = {layers}")
        return sum(t in _FULL for t in types), sum(t in _WINDOWED for t in types)
    if (stated := _stated_layers(config, layers)) is not None:
        return stated
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return layers, 0
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    pattern = _ALTERNATING.get(str(config.get("model_type"))) if pattern is None else pattern
    if isinstance(pattern, int) and pattern > 0:  # every pattern-th layer is global
        return layers // pattern, layers - layers // pattern
    if config.get("use_sliding_window"):  # Qwen2: from layer max_window_layers on
        full = min(_count(config, "max_window_layers", layers), layers)
        return full, layers - full
    return 0, layers


def _stated_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int] | None:
    """(layers with full attention, windowed layers) of a config that states them outside layer_types, or None."""
    for key in ("full_attention_interval", "layer_group_size"):  # of layers, the last of which has full attention
        if config.get(key) is not None:
            return layers // _count(config, key), 0
    pattern, lists = config.get("hybrid_layer_pattern"), config.get("linear_attn_config")
    if isinstance(pattern, list):  # MiMo: 0 is a layer with full attention, 1 one with a window
        full, windowed, others = pattern.count(0), len(pattern) - pattern.count(0), 0
    elif isinstance(lists, dict) and isinstance(lists.get("full_attn_layers"), list):  # Kimi Linear: their numbers
        full, windowed, others = len(lists["full_attn_layers"]), 0, len(lists.get("kda_layers") or ())
    else:
        return None
    if full + windowed + others != layers:
        given = full + windowed + others
        raise ArgumentError(f"layers: got a list of {given}, expected num_hidden_layers = {layers}")
    return full, windowed
