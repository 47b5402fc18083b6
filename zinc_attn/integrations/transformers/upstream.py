"""Every name of torch and transformers that the integration builds on, so that one import finds out what is missing.

The interface that it implements: transformers' AttentionInterface, AttentionMaskInterface and CacheLayerMixin.
"""

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, Cache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "MODEL_MAPPING",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "GenerationMixin",
    "PreTrainedModel",
    "causal_mask_function",
    "get_layer_types_and_kwargs",
    "sdpa_mask",
    "sliding_window_causal_mask_function",
    "sliding_window_overlay",
    "torch",
    "transformers",
]
