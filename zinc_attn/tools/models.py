"""Model presets: the attention of models that people run, by name (models.json) or from a Hugging Face config.json."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import ArgumentError
from ..files import read_json
from ..shapes import AttnShape

_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")  # of multimodal models
_KINDS: Final = {  # the keys that a layer attends, by its entry in layer_types
    **dict.fromkeys(("full_attention", "attention"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "windowed"),
    **dict.fromkeys(("linear_attention", "conv", "mamba", "recurrent", "mlp", "moe"), "none"),
}
_ADVICE: Final = "otherwise give --shape and --layers"
# Heads or layers of these follow rules of their own, which the fields that are read here do not tell.
_UNREAD_TYPES: Final = ("diffllama", "falcon", "longcat_flash", "mimo_v2_flash")
_UNREAD_FIELDS: Final = re.compile(
    r"^(index|indexer|hybrid|swa|loop|mixer)_|attn_(layers|type)|attention_(types?$|layers|head_dim|window|groups)|"
    r"block_(types?|configs)$|layer_(ids|group_size)$|_per_layer$|kv_channels|linear_attn_config|recurrent_l|mamba_step"
)


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


# The presets of models.json. NAME-latent has the absorbed form of NAME, which caches the compressed rows.
PRESETS: Final[dict[str, ModelPreset]] = {
    name: ModelPreset(name, AttnShape.parse(entry.pop("shape")), **entry)
    for name, entry in read_json(Path(__file__).with_name("models.json"), "the package's presets").items()
}


def find_model(text: str) -> ModelPreset:
    """A preset by its name in any case, or the model of a config's path. ArgumentError lists the presets."""
    if (preset := PRESETS.get(text.strip().lower())) is not None:
        return preset
    if os.path.exists(text):
        return from_config(text)
    raise ArgumentError(f"model: got {text!r}, expected a path to a config.json or one of {', '.join(PRESETS)}")


def from_config(path: str | Path) -> ModelPreset:
    """The attention of a Hugging Face ``config.json`` (or of the folder that holds one).

    Heads: num_attention_heads, num_key_value_heads (absent: as many), head_dim (absent: hidden_size /
    num_attention_heads), v_head_dim (absent: head_dim); in Gemma 4's full layers global_head_dim and
    num_global_key_value_heads, or what per_layer_config says. With kv_lora_rank, the shape is that of expanded K and V:
    num_attention_heads, qk_nope_head_dim + qk_rope_head_dim, v_head_dim. Layers: num_hidden_layers; which of them
    attend: see ``_kinds``. ArgumentError names the file and the key.
    """
    file, data = read_config(path)
    try:
        if (config := _text_part(data)) is None:
            raise ArgumentError("got no num_attention_heads, expected a Hugging Face config.json that states it")
        return _preset(config_name(file), config)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}; {_ADVICE}") from error


def _preset(name: str, config: Mapping[str, Any]) -> ModelPreset:
    """The preset of a text part. ArgumentError: its layers are of two shapes or two windows, or something is unread."""
    layers = _layers(config)
    unread = sorted(key for key in set().union(*layers) if _UNREAD_FIELDS.search(key) and config.get(key, True))
    if unread or config.get("model_type") in _UNREAD_TYPES:
        first = unread[0] if unread else f"model_type {config['model_type']!r}"
        raise ArgumentError(f"got {first}, whose heads or layers are not read here, expected a model without")
    kinds = _kinds(config)
    shapes = list({_shape(layer) for layer, kind in zip(layers, kinds, strict=True) if kind == "full"})
    windows = list({_window(layer) for layer, kind in zip(layers, kinds, strict=True) if kind == "windowed"})
    if len(shapes) > 1 or len(windows) > 1:
        got = f"layers of {' and '.join(sorted(map(str, shapes)))}, and windows {sorted(windows)}"
        raise ArgumentError(f"layers: got {got}, expected a single shape and at most a single window")
    return ModelPreset(name, shapes[0], kinds.count("full"), kinds.count("windowed"), windows[0] if windows else None)


def read_config(path: str | Path) -> tuple[Path, Any]:
    """(path, content) of a config.json, given by itself or by its folder. ArgumentError names the file."""
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    return file, read_json(file, "a Hugging Face config.json")


def config_name(file: Path) -> str:
    """The name of a config file's model: its folder's where the file has the usual name."""
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


def _count(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """An int of the config, at least ``least``; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        got = "none" if value is None else repr(value)
        raise ArgumentError(f"{key}: got {got}, expected an int of at least {least}")
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


def _layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config of each layer, in which the entries of per_layer_config, if any, take the place of the others."""
    layers, changes = _count(config, "num_hidden_layers"), config.get("per_layer_config") or {}
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        raise ArgumentError(f"per_layer_config: got {changes!r}, expected an object of objects")
    wrong = [key for key in changes if not key.isdecimal() or int(key) >= layers]
    if wrong:
        raise ArgumentError(f"per_layer_config: got {wrong[0]!r}, expected the indices of {layers} layers")
    by_layer = {int(key): change for key, change in changes.items()}  # transformers pads the indices with zeros
    return [{**config, **by_layer.get(i, {})} for i in range(layers)]


def _window(config: Mapping[str, Any]) -> int:
    """How many keys a layer sees at most."""
    return _count(config, "sliding_window" if config.get("sliding_window") else "attention_chunk_size")


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """A value of _KINDS for each layer, of which some are "full".

    layer_types names them; without it, attn_layer_indices or full_attn_idxs lists those that attend, or they are every
    full_attention_interval-th, or every attn_layer_period-th from attn_layer_offset on, or all.
    """
    layers, types = _count(config, "num_hidden_layers"), config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            got = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise ArgumentError(f"layer_types: got {got}, expected a list of num_hidden_layers = {layers}")
        unknown = [kind for kind in types if kind not in list(_KINDS)]
        if unknown:
            raise ArgumentError(f"layer_types: got {unknown[0]!r}, expected some of {', '.join(_KINDS)}")
        kinds = [_KINDS[kind] for kind in types]
    elif any(config.get(key) for key in ("sliding_window", "attention_chunk_size")) and (
        config.get("use_sliding_window") is not False
    ):
        raise ArgumentError(f"layer_types: got none, expected those of {layers} layers, some of which have a window")
    else:
        full = _attending(config, layers)
        kinds = ["full" if i in full else "none" for i in range(layers)]
    if "full" not in kinds:
        raise ArgumentError(f"layers: got 0 of {layers} that attend to the whole context, expected at least 1")
    return kinds


def _attending(config: Mapping[str, Any], layers: int) -> Sequence[int]:
    """The indices of the layers that attend, of a config without layer_types."""
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if key in config:
            listed = config[key] or []
            if not isinstance(listed, list) or not all(index in range(layers) for index in listed):
                raise ArgumentError(f"{key}: got {listed!r}, expected a list of layers below {layers}")
            return listed
    if config.get("full_attention_interval") is not None:  # of layers, the last of which has full attention
        interval = _count(config, "full_attention_interval")
        return range(interval - 1, layers, interval)
    period = _count(config, "attn_layer_period", 1)
    return range(_count(config, "attn_layer_offset", 0, least=0), layers, period)
