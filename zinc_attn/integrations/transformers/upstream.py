"""Every name of torch and transformers that the integration uses, so that one import reports a missing one.

It implements transformers' AttentionInterface, AttentionMaskInterface and CacheLayerMixin.
"""

import re

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_MAPPING", "AttentionInterface",
    "AttentionMaskInterface", "Cache", "CacheLayerMixin", "GenerationMixin", "LinearAttentionCacheLayerMixin",
    "PreTrainedModel", "causal_mask_function", "get_layer_types_and_kwargs", "release", "sdpa_mask",
    "sliding_window_causal_mask_function", "sliding_window_overlay", "torch", "transformers",
]  # fmt: skip


def release() -> tuple[int, ...]:
    """transformers' release, for example (5, 24); () where its version does not begin with two numbers."""
    match = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    return tuple(map(int, match.groups())) if match else ()


if release() < (5, 24):  # before it, models have other names for their cache, and configs other layers
    raise ImportError(f"got transformers {transformers.__version__}")
