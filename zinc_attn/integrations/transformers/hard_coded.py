"""Models that have no use for attention "zinc": encoder-decoders, and models that never call the selected attention."""

import functools
from typing import Any, Final

from ...errors import UnsupportedError
from .tensors import NAME
from .upstream import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

ADAPTABLE: Final = ("bloom", "falcon", "mpt")  # the model types that ``adapt`` takes


def refuse_selection(config: Any) -> None:
    """Refuse a model of this config by UnsupportedError where attention "zinc" cannot serve it.

    A part of a composite model, of images for example, may compute its attention itself.
    """
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"attn_implementation: got {NAME!r} for {config.model_type}, an encoder-decoder, whose encoder and "
            'cross-attention are not causal, expected a decoder alone; use attn_implementation="eager" for this model'
        )
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.sub_configs:
        refuse_hard_coded(config)


def refuse_hard_coded(config: Any) -> None:
    """Refuse by UnsupportedError where a model of this config would add a mask of "zinc" to scores of its own.

    Nothing is refused where the config's model class is not known.
    """
    if config is None or not _is_hard_coded(config.__class__):
        return
    kind = config.model_type
    advice = "call adapt(model) of zinc_attn.integrations.transformers" if kind in ADAPTABLE else 'use "eager"'
    raise UnsupportedError(
        f"attn_implementation: got {NAME!r} for a model of type {kind}, which computes its attention itself, expected "
        f"a model that calls transformers' AttentionInterface; load it without attn_implementation, and {advice}"
    )


@functools.cache
def _is_hard_coded(kind: type) -> bool:
    """Whether transformers says that the attention of the model class of a config class cannot be selected."""
    model: Any = MODEL_MAPPING.get(kind, None) or MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    model = model[0] if isinstance(model, tuple) else model
    if not hasattr(model, "_can_set_attn_implementation"):
        return False
    can = model._can_set_attn_implementation()
    # transformers caches its finding in the class's source; without a source it caches nothing
    return not can and getattr(model, "_can_set_attn_implementation_cached_value", None) is False
