"""The layers that a model's config asks for."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ...errors import UnsupportedError
from ...shapes import AttnShape
from .hard_coded import ADAPTABLE
from .upstream import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs

_HYBRID: Final = ("hybrid", "hybrid_sliding")  # the layers that attend and keep recurrent states, too
_FULL: Final = ("full_attention", "hybrid")  # the layers without a window
_ATTENTION: Final = ("full_attention", "sliding_attention", "chunked_attention", *_HYBRID)
_OTHERS: Final = ("linear_attention", "conv", "dummy")  # the layers that keep transformers' own cache layer


@dataclass(frozen=True)
class LayerSpec:
    """An attention layer of a config. is_sliding: whether it has a window, or chunks.

    shape: of the rows that are cached; expanded: of the query, key and value that reach the attention function, which
    differs where ``shape`` is of compressed rows. compressed: in multi-head latent attention, the sizes of a token's
    two compressed rows (of all heads' K and V; of K's rotated part), which a model may hand to the cache in place of K
    and V; otherwise None. states: the arguments of transformers' cache layer for the layer's recurrent states, or None.
    """

    index: int
    is_sliding: bool
    shape: AttnShape
    expanded: AttnShape
    compressed: tuple[int, int] | None = None
    states: dict[str, Any] | None = None


def layer_specs(config: Any, latent: bool = False) -> Iterator[LayerSpec | CacheLayerMixin]:
    """Yield the attention layers of a model's config, and in place of its others transformers' own cache layers.

    latent: multi-head latent attention has the shape of its compressed rows.
    UnsupportedError: another layer type, cross-attention, or ``latent`` without a layer of latent attention.
    """
    has_latent = False
    text = _decoder(config)
    kinds, arguments = get_layer_types_and_kwargs(text)
    # In some releases the last layers, which share the keys and values of earlier ones, have no cache layer.
    layers = text.per_layer_config[: len(kinds)]
    for i, (kind, options, layer) in enumerate(zip(kinds, arguments, layers, strict=True)):
        is_sliding = kind not in _FULL
        if kind in _OTHERS:
            yield DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
        elif kind not in _ATTENTION:
            raise UnsupportedError(
                f"config: layer {i} is of type {kind!r}, expected one of {', '.join(_ATTENTION + _OTHERS)}"
            )
        elif getattr(layer, "kv_lora_rank", None) and hasattr(layer, "qk_nope_head_dim"):
            has_latent, heads = True, layer.num_attention_heads  # K and V expanded: every query head has its own
            expanded = AttnShape(heads, heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
            shape, rank, rotated = expanded, layer.kv_lora_rank, layer.qk_rope_head_dim
            if latent:  # all query heads read one compressed row as K, whose first ``rank`` values are V
                shape = AttnShape(expanded.q_heads, 1, rank + rotated, rank, latent=True)
            yield LayerSpec(i, is_sliding, shape, expanded, (rank, rotated))
        else:
            shape = _shape(layer, is_sliding)
            yield LayerSpec(i, is_sliding, shape, shape, states=options if kind in _HYBRID else None)
    if latent and not has_latent:
        raise UnsupportedError(
            f"latent: got True for {type(text).__name__}, expected the config of a model with latent attention, "
            "which has kv_lora_rank and qk_nope_head_dim; make the ZincCache without latent=True"
        )


def _decoder(config: Any) -> Any:
    """The config of the model's text decoder. UnsupportedError: it attends another text, or images, too."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or getattr(text, "cross_attention_layers", None):
        advice = 'use attn_implementation="eager"' if config.is_encoder_decoder else "call it"
        raise UnsupportedError(
            f"config: got {config.model_type}, whose cross-attention keeps keys of another text or of images, expected "
            f"a decoder of its own text alone; {advice} without a ZincCache for this model"
        )
    if hasattr(text, "decoder_attention_heads"):  # of an encoder-decoder, whose attribute_map names the encoder's sizes
        text = copy.deepcopy(text)
        text.num_attention_heads, text.num_hidden_layers = text.decoder_attention_heads, text.decoder_layers
    return text


def _shape(config: Any, is_sliding: bool) -> AttnShape:
    """Return the shape of a layer with this config."""
    heads = config.num_attention_heads
    if config.model_type in ADAPTABLE:  # their classes read no head_dim of a config
        kv_heads = heads
        if config.model_type == "falcon" and (config.new_decoder_architecture or config.multi_query):
            kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        return AttnShape(heads, kv_heads, config.hidden_size // heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "mimo_v2_flash" and is_sliding:
        kv_heads *= 2  # the model's class does so without a field of its config
    return AttnShape(heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim)
