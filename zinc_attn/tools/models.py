"""Model presets: the attention of models that people run, by name or from a Hugging Face config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError
from ..shapes import AttnShape

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")  # of multimodal models
_FULL: Final = ("full_attention", "attention")  # entries of layer_types
_WINDOWED: Final = ("sliding_attention", "chunked_attention")
_ALTERNATING: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # where old files do not state the pattern


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


PRESETS: Final = {
    preset.name: preset
    for preset in (
        ModelPreset(
            "qwen3.6-35b-a3b",
            AttnShape(16, 2, 256),
            10,
            "10 of 40 layers, the rest linear attention",
            max_context=262_144,
        ),
        ModelPreset("qwen3-30b-a3b", AttnShape(32, 4, 128), 48, max_context=40_960),
        ModelPreset("qwen3-8b", AttnShape(32, 8, 128), 36, max_context=40_960),
        ModelPreset("qwen3.8-27b", AttnShape(24, 4, 256), 16, "16 of 64 layers, the rest linear attention"),
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
    )
}


def find_model(text: str) -> ModelPreset:
    """A preset by its name in any case, or what ``from_config`` reads at a path. ArgumentError lists the presets."""
    preset = PRESETS.get(text.strip().lower())
    if preset is not None:
        return preset
    if Path(text).exists():
        return from_config(text)
    raise ArgumentError(f"model: got {text!r}, expected a path to a config.json or one of {', '.join(PRESETS)}")


def from_config(path: str | Path) -> ModelPreset:
    """The attention of a Hugging Face ``config.json`` (or of the folder that holds one).

    Heads: num_attention_heads, num_key_value_heads (absent: as many), head_dim (absent: hidden_size /
    num_attention_heads); in Gemma 4's full layers global_head_dim and num_global_key_value_heads. Layers:
    num_hidden_layers; which of them attend: layer_types, full_attention_interval, sliding_window_pattern or
    sliding_window. ArgumentError names the file and the key.
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
    file = file / "config.json" if file.is_dir() else file
    try:
        return file, json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"model: cannot read {file}: {error.strerror}; expected a Hugging Face config.json"
        raise ArgumentError(text) from error
    except ValueError as error:
        raise ArgumentError(f"model: {file} is not JSON: {error}") from error


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
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ArgumentError(f"{key}: missing, expected an int; otherwise give --shape and --layers")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{key}: got {value!r}, expected an int of at least 1")
    return value


def _preset(config: Mapping[str, Any], name: str) -> ModelPreset:
    """The attention that a text model's config describes."""
    if config.get("kv_lora_rank"):
        raise ArgumentError("kv_lora_rank: latent attention (MLA), expected grouped-query attention")
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    head_dim = config.get("head_dim")
    if head_dim is None:
        hidden = _count(config, "hidden_size")
        if hidden % heads:
            raise ArgumentError(f"hidden_size: got {hidden}, expected a multiple of num_attention_heads = {heads}")
        head_dim = hidden // heads
    else:
        head_dim = _count(config, "head_dim")
    head_dim = _count(config, "global_head_dim", head_dim)
    if config.get("attention_k_eq_v"):  # Gemma 4: its global layers share one projection and have heads of their own
        kv_heads = _count(config, "num_global_key_value_heads", kv_heads)
    layers = _count(config, "num_hidden_layers")
    full, windowed = _layers(config, layers)
    if not full:
        raise ArgumentError(f"layers: got 0 of {layers} that attend to the whole context, expected at least 1")
    note = f"{full} of {layers} layers" if full < layers else ""
    window = _count(config, "sliding_window", _count(config, "attention_chunk_size", 1)) if windowed else None
    most = config.get("max_position_embeddings")
    most = most if isinstance(most, int) and most > 0 else None
    return ModelPreset(name, AttnShape(heads, kv_heads, head_dim), full, note, windowed, window, most)


def _layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(layers with full attention, windowed layers)."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            given = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArgumentError(f"layer_types: got {given}, expected a list of num_hidden_layers = {layers}")
        return sum(t in _FULL for t in types), sum(t in _WINDOWED for t in types)
    if config.get("full_attention_interval") is not None:
        return layers // _count(config, "full_attention_interval"), 0
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
