"""The layers that a model's config asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ...errors import UnsupportedError
from ...shapes import AttnShape
from .hard_coded import ADAPTABLE
from .upstream import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

_ATTENTION: Final = ("full_attention", "sliding_attention")  # the layers that attend through this package
_OTHERS: Final = ("linear_attention", "conv", "dummy")  # the layers that keep transformers' own cache layer


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a config. shape: of an attention layer, None for a layer that keeps transformers' own cache layer.

    compressed: in multi-head latent attention, the sizes of the two compressed rows per token, those of all heads' K
    and V and of K's rotated part, that a model may hand to the cache in place of K and V; otherwise None. expanded: the
    shape of what reaches the attention function where ``shape`` is that of the compressed rows; otherwise None.
    """

    index: int
    kind: str
    arguments: dict[str, Any]
    shape: AttnShape | None
    compressed: tuple[int, int] | None = None
    expanded: AttnShape | None = None

    def upstream_layer(self) -> Any:
        """Make transformers' own cache layer."""
        return DYNAMIC_LAYER_TYPE_MAPPING[self.kind](**self.arguments)


def layer_specs(config: Any, latent: bool = False) -> Iterator[LayerSpec]:
    """Yield the layers of a model's config that have a cache layer.

    latent: multi-head latent attention has the shape of its compressed rows.
    UnsupportedError: another layer type, or no layer of latent attention though ``latent`` asks for it.
    """
    found = False
    text = config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(text)
    # In some releases the last layers, which share the keys and values of earlier ones, have no cache layer.
    layers = text.per_layer_config[: len(kinds)]
    for i, (kind, given, layer) in enumerate(zip(kinds, arguments, layers, strict=True)):
        if kind not in _ATTENTION + _OTHERS:
            raise UnsupportedError(
                f"config: layer {i} is of type {kind!r}, expected one of {', '.join(_ATTENTION + _OTHERS)}"
            )
        if kind not in _ATTENTION:
            yield LayerSpec(i, kind, given, None)
        elif getattr(layer, "kv_lora_rank", None) and hasattr(layer, "qk_nope_head_dim"):
            compressed, expanded, found = (layer.kv_lora_rank, layer.qk_rope_head_dim), _latent_shape(layer), True
            if latent:
                yield LayerSpec(i, kind, given, _absorbed_shape(expanded.q_heads, *compressed), compressed, expanded)
            else:
                yield LayerSpec(i, kind, given, expanded, compressed)
        else:
            yield LayerSpec(i, kind, given, _shape(layer, kind))
    if latent and not found:
        raise UnsupportedError(
            f"latent: got True for {type(text).__name__}, expected the config of a model with latent attention, "
            "which has kv_lora_rank and qk_nope_head_dim; make the ZincCache without latent=True"
        )


def _latent_shape(config: Any) -> AttnShape:
    """Return the shape of multi-head latent attention when K and V are expanded: every query head has its own."""
    heads = config.num_attention_heads
    return AttnShape(heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)


def _absorbed_shape(heads: int, rank: int, rotated: int) -> AttnShape:
    """Return the shape of the compressed rows: all query heads read one K row, whose first ``rank`` values are V."""
    return AttnShape(heads, 1, rank + rotated, rank, latent=True)


def _shape(config: Any, kind: str) -> AttnShape:
    """Return the shape of a layer with this config."""
    heads = config.num_attention_heads
    if config.model_type in ADAPTABLE:  # whose classes know no other head_dim, whatever a config has
        kv_heads = heads
        if config.model_type == "falcon" and (config.new_decoder_architecture or config.multi_query):
            kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        return AttnShape(heads, kv_heads, config.hidden_size // heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "mimo_v2_flash" and kind == "sliding_attention":
        kv_heads *= 2  # as the model's class has it; no field of its config says so
    return AttnShape(heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim)
