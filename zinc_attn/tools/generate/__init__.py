"""Whole models on a ZincCache, which run in transformers on the CPU with their attention on the Vulkan device."""

from .chat import Conversation, Turn, open_conversation
from .checkpoints import build_model, load_checkpoint, load_model, load_tokenizer
from .generation import Generation, Settings, generate_ids, stream_text
from .hf_model import HFModel
from .perplexity import CONTEXT, TEXT, Perplexity, measure_perplexity, text_ids
from .validation import CONTEXTS, STEPS, Finding, validate

__all__ = [
    "CONTEXT", "CONTEXTS", "STEPS", "TEXT", "Conversation", "Finding", "Generation", "HFModel", "Perplexity",
    "Settings", "Turn", "build_model", "generate_ids", "load_checkpoint", "load_model", "load_tokenizer",
    "measure_perplexity", "open_conversation", "stream_text", "text_ids", "validate",
]  # fmt: skip
