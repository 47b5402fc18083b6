"""Whole models on a ZincCache: generation, its self-check, conversations, perplexity, and decode at long contexts.

A model runs in transformers on the CPU, its attention on the Vulkan device. A difference between two runs is put down
to the side that it comes from: if an attention call got the same q, k and v and gave another output, attention is
wrong; if q, k or v differ first, or the logits after equal attention, the model's own arithmetic has moved.
"""

from .chat import Conversation, Turn, open_conversation
from .checkpoints import build_model, load_checkpoint, load_model, load_tokenizer
from .checks import Check, selfcheck
from .generation import Generation, Settings, combined, generate_ids, stream_text
from .hf_model import HFModel
from .perplexity import CONTEXT, TEXT, Perplexity, measure_perplexity, text_ids
from .trace import AttentionTrace
from .validation import BOUND, CONTEXTS, LAYOUTS, STEPS, ContextResult, ValidationOptions, validate

__all__ = [
    "BOUND",
    "CONTEXT",
    "CONTEXTS",
    "LAYOUTS",
    "STEPS",
    "TEXT",
    "AttentionTrace",
    "Check",
    "ContextResult",
    "Conversation",
    "Generation",
    "HFModel",
    "Perplexity",
    "Settings",
    "Turn",
    "ValidationOptions",
    "build_model",
    "combined",
    "generate_ids",
    "load_checkpoint",
    "load_model",
    "load_tokenizer",
    "measure_perplexity",
    "open_conversation",
    "selfcheck",
    "stream_text",
    "text_ids",
    "validate",
]
