"""Model presets: the attention of models that people run, by name (models.json) or from a Hugging Face config.json."""

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
_ADVICE: Final = "otherwise give --shape and --layers"
# Heads or layers of these follow rules of their own, which the fields that are read here do not tell.
_UNREAD_TYPES: Final = ("falcon", "longcat_flash", "mimo_v2_flash")
_UNREAD_FIELDS: Final = ("index_topk", "hybrid_layer_pattern", "layer_group_size", "linear_attn_config")


@dataclass(frozen=True)
class ModelPreset:
    """The attention of one model.

    shape: of the layers that attend to the whole context. attention_layers: how many of these there are.
    windowed_layers: how many see the last ``window`` keys only. Other layers hold no K and V.
    """

    name: str
    shape: AttnShape
    attention_layers: int
    windowed_layers: int = 0
    window: int | None = None


# Those of models.json. NAME-latent has the absorbed form of NAME, which caches the compressed rows.
PRESETS: Final[dict[str, ModelPreset]] = {
    name: ModelPreset(name, AttnShape.parse(one.pop("shape")), **one)
    for name, one in read_json(Path(__file__).with_name("models.json"), "the package's presets").items()
}


def find_model(text: str) -> ModelPreset:
    """A preset by its name in any case, or what ``from_config`` reads at a path. ArgumentError lists the presets."""
    if (preset := PRESETS.get(text.strip().lower())) is not None:
        return preset
    if os.path.exists(text):
        return from_config(text)
    raise ArgumentError(f"model: got {text!r}, expected a path to a config.json or one of {', '.join(PRESETS)}")


def from_config(path: str | Path) -> ModelPreset:
    """The attention of a Hugging Face ``config.json`` (or of the folder that holds one).

    Heads: num_attention_heads, num_key_value_heads (absent: as many), head_dim (absent: hidden_size /
    num_attention_heads), v_head_dim (absent: head_dim); in Gemma 4's full layers global_head_dim and
    num_global_key_value_heads. With kv_lora_rank, the shape is that of expanded K and V: num_attention_heads,
    qk_nope_head_dim + qk_rope_head_dim, v_head_dim. Layers: num_hidden_layers; which of them attend: layer_types or
    full_attention_interval. ArgumentError names the file and the key.
    """
    file, data = read_config(path)
    try:
        if (config := _text_part(data)) is None:
            raise ArgumentError("got no num_attention_heads, expected a Hugging Face config.json that states it")
        unread = [key for key in _UNREAD_FIELDS if config.get(key)]
        if unread or config.get("model_type") in _UNREAD_TYPES:
            name = unread[0] if unread else f"model_type {config['model_type']!r}"
            raise ArgumentError(f"got {name}, whose heads or layers are not read here, expected a model without")
        full, windowed = _layers(config)
        window = _count(config, "sliding_window", _count(config, "attention_chunk_size", 1)) if windowed else None
        return ModelPreset(config_name(file), _shape(config), full, windowed, window)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}; {_ADVICE}") from error


def read_config(path: str | Path) -> tuple[Path, Any]:
    """The path of a config.json, given itself or its folder, and what it holds. ArgumentError names the file."""
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    return file, read_json(file, "a Hugging Face config.json")


def config_name(file: Path) -> str:
    """What the model of a config file is called: its folder where the file has the usual name."""
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def slug(text: str) -> str:
    """``text`` as a file name: lower-case letters, digits, dots and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def _text_part(data: Any) -> Mapping[str, Any] | None:
    """The object that states num_attention_heads: ``data`` or a text part nested in it."""
    if not isinstance(data, dict):
        return None
    nested = (_text_part(data.get(key)) for key in _TEXT_PARTS)
    return next((part for part in nested if part is not None), data if "num_attention_heads" in data else None)


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive int of the config; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{key}: got {'none' if value is None else repr(value)}, expected an int of at least 1")
    return value


def _shape(config: Mapping[str, Any]) -> AttnShape:
    """The shape of the layers with full attention; of latent attention with K and V expanded for every query head."""
    heads = _count(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        head_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
        return AttnShape(heads, heads, head_dim, _count(config, "v_head_dim"))
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    elif (hidden := _count(config, "hidden_size")) % heads:
        raise ArgumentError(f"hidden_size: got {hidden}, expected a multiple of num_attention_heads = {heads}")
    else:
        head_dim = hidden // heads
    head_dim = _count(config, "global_head_dim", head_dim)
    kv_heads = _count(config, "num_key_value_heads", heads)
    if config.get("attention_k_eq_v"):  # Gemma 4: its global layers share one projection and have heads of their own
        kv_heads = _count(config, "num_global_key_value_heads", kv_heads)
    return AttnShape(heads, kv_heads, head_dim, _count(config, "v_head_dim", head_dim))


def _layers(config: Mapping[str, Any]) -> tuple[int, int]:
    """(layers with full attention, of which there are some, layers with a window)."""
    layers, types = _count(config, "num_hidden_layers"), config.get("layer_types")
    full, windowed = layers, 0
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            given = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArgumentError(f"layer_types: got {given}, expected a list of num_hidden_layers = {layers}")
        full, windowed = sum(one in _FULL for one in types), sum(one in _WINDOWED for one in types)
    elif config.get("full_attention_interval") is not None:  # of layers, the last of which has full attention
        full = layers // _count(config, "full_attention_interval")
    elif config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise ArgumentError(f"layer_types: got none, expected those of {layers} layers, some of which have a window")
    if not full:
        raise ArgumentError(f"layers: got 0 of {layers} that attend to the whole context, expected at least 1")
    return full, windowed
