"""zinc_attn in Hugging Face transformers: ``register()``, then ``attn_implementation="zinc"`` and a ``ZincCache``.

The cache's layers live on the Vulkan device. ``ZincCache.update`` hands only the new rows to the model's attention
module, as ``ZincRows``, with which no other code can compute; a model with multi-head latent attention expands them
first, as ``CompressedRows``. The attention function appends them and attends, in one submission per layer. Every batch
row is a Sequence of its own: padding columns are not stored, so left-padded batches work, and beam search forks
sequences. Linear-attention layers keep transformers' own cache layers.

Without a ZincCache the attention function attends the keys and values that it is given. BLOOM, MPT and Falcon, whose
attention transformers hard-codes, take ``adapt(model)`` in place of the attn_implementation.
"""

from ...errors import RuntimeUnavailableError

try:
    import torch as torch
    import transformers as transformers

    from . import upstream as upstream
except ImportError as error:
    raise RuntimeUnavailableError(
        f"zinc_attn.integrations.transformers: {error}; expected torch and transformers 5.24 or later: "
        "pip install torch 'zinc-attn[transformers]'"
    ) from error

from .adapters import adapt
from .attention import attention_forward
from .cache import ZincCache
from .hard_coded import ADAPTABLE
from .layer import ZincLayer
from .masks import attention_mask
from .registration import register
from .rows import CompressedRows, ZincRows
from .tensors import NAME

__all__ = [
    "ADAPTABLE", "NAME", "CompressedRows", "ZincCache", "ZincLayer", "ZincRows", "adapt", "attention_forward",
    "attention_mask", "register",
]  # fmt: skip
