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
_HEADS, _LAYERS, _HIDDEN = "num_attention_heads", "num_hidden_layers", "hidden_size"
_GPT_NAMES: Final = {"n_head": _HEADS, "n_layer": _LAYERS, "n_embed": _HIDDEN}
_MPT_NAMES: Final = {"n_heads": _HEADS, "n_layers": _LAYERS, "d_model": _HIDDEN}
_NAMES: Final = {  # a model type's own names of fields
    "bloom": _GPT_NAMES,
    "falcon": _GPT_NAMES,
    "mpt": {**_MPT_NAMES, "max_seq_len": "max_position_embeddings"},
}


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


def _presets() -> dict[str, ModelPreset]:
    """Those of models.json. NAME-latent has the absorbed form of NAME, which caches the compressed rows."""
    data = read_json(Path(__file__).with_name("models.json"), "the package's presets")
    return {name: ModelPreset(name, AttnShape.parse(one.pop("shape")), **one) for name, one in data.items()}


PRESETS: Final = _presets()


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
    return next((part for part in nested if part is not None), data if _HEADS in data else None)


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive int of the config; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ArgumentError(f"{key}: missing, expected an int; otherwise give --shape and --layers")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{key}: got {value!r}, expected an int of at least 1")
    return value


def _preset(config: Mapping[str, Any], name: str) -> ModelPreset:
    """The attention that a text model's config describes."""
    if config.get("index_topk"):
        raise ArgumentError("index_topk: sparse attention to chosen keys, expected attention to all keys or a window")
    shape = _shape(config)
    # LongCat's layers have two attentions each, and each of these counts as a layer
    doubled = config.get("model_type") == "longcat_flash" and config.get(_LAYERS) is None
    layers = 2 * _count(config, "num_layers") if doubled else _count(config, _LAYERS)
    full, windowed = _stated_layers(config, layers) or _windows(config, layers)
    if not full:
        raise ArgumentError(f"layers: got 0 of {layers} that attend to the whole context, expected at least 1")
    notes = [f"{full} of {layers} layers"] if full < layers else []
    if config.get("kv_lora_rank"):
        notes.append("latent attention, with K and V expanded for every head")
    window = None
    if windowed and config.get("model_type") == "mimo_v2_flash" and config.get("sliding_window_size") is not None:
        window = _count(config, "sliding_window_size") + 1  # which counts the keys before the row's own
    elif windowed:
        window = _count(config, "sliding_window", _count(config, "attention_chunk_size", 1))
    most = config.get("max_position_embeddings")
    most = most if isinstance(most, int) and most > 0 else None
    return ModelPreset(name, shape, full, "; ".join(notes), windowed, window, most)


def _shape(config: Mapping[str, Any]) -> AttnShape:
    """The shape of the layers with full attention; of latent attention with K and V expanded for every query head."""
    heads = _count(config, _HEADS)
    if config.get("kv_lora_rank"):
        head_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
        default = _count(config, _HIDDEN) // heads if config.get("v_head_dim") is None else None  # MiniCPM3
        return AttnShape(heads, heads, head_dim, _count(config, "v_head_dim", default))
    if config.get("model_type") != "falcon":
        kv_heads = _count(config, "num_key_value_heads", heads)
    elif config.get("new_decoder_architecture"):
        kv_heads = _count(config, "num_kv_heads", heads)
    else:
        kv_heads = heads if config.get("multi_query") is False else 1
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    elif (hidden := _count(config, _HIDDEN)) % heads:
        raise ArgumentError(f"hidden_size: got {hidden}, expected a multiple of num_attention_heads = {heads}")
    else:
        head_dim = hidden // heads
    head_dim = _count(config, "global_head_dim", head_dim)
    if config.get("attention_k_eq_v"):  # Gemma 4: its global layers share one projection and have heads of their own
        kv_heads = _count(config, "num_global_key_value_heads", kv_heads)
    return AttnShape(heads, kv_heads, head_dim, _count(config, "v_head_dim", head_dim))


def _stated_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int] | None:
    """(layers with full attention, windowed layers) of a config that states them, or None."""
    types, pattern, lists = (config.get(key) for key in ("layer_types", "hybrid_layer_pattern", "linear_attn_config"))
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            given = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArgumentError(f"layer_types: got {given}, expected a list of num_hidden_layers = {layers}")
        return sum(t in _FULL for t in types), sum(t in _WINDOWED for t in types)
    for key in ("full_attention_interval", "layer_group_size"):  # of layers, the last of which has full attention
        if config.get(key) is not None:
            return layers // _count(config, key), 0
    if isinstance(pattern, list):  # MiMo: 0 is a layer with full attention, 1 one with a window
        full, windowed, others = pattern.count(0), len(pattern) - pattern.count(0), 0
    elif isinstance(lists, dict) and isinstance(lists.get("full_attn_layers"), list):  # Kimi Linear: their numbers
        full, windowed, others = len(lists["full_attn_layers"]), 0, len(lists.get("kda_layers") or ())
    else:
        return None
    if (stated := full + windowed + others) != layers:
        raise ArgumentError(f"layers: got a list of {stated}, expected num_hidden_layers = {layers}")
    return full, windowed


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """The same of a config that at most has sliding_window and which layers it is for."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return layers, 0
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    pattern = _ALTERNATING.get(str(config.get("model_type"))) if pattern is None else pattern
    if isinstance(pattern, int) and pattern > 0:  # every pattern-th layer is global
        return layers // pattern, layers - layers // pattern
    # Qwen2: those from layer max_window_layers on
    full = min(_count(config, "max_window_layers", layers), layers) if config.get("use_sliding_window") else 0
    return full, layers - full
