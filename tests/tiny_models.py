"""Small random models for the tests: configs, and a byte-level tokenizer."""

from typing import Any

BASE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
UNTIED = {
    **BASE,
    "vocab_size": 199,
    "tie_word_embeddings": False,  # a tied random model repeats its last token
    "pad_token_id": None,  # no token of a text is taken for padding
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5_moe_text": {**HYBRID, **MOE, "dtype": "bfloat16"},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {  # two shapes; the last two layers attend the keys and values of the first two
        **WINDOWS,
        "num_hidden_layers": 4,
        "layer_types": WINDOWS["layer_types"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
    },
    "deepseek_v3": {  # K of 96 and V of 64 for each of four heads, expanded from rows of 32 + 32
        **EXPERTS,
        "num_key_value_heads": 4,
        "head_dim": 32,  # of the rotated part of K
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "mimo_v2_flash": {**WINDOWS, **EXPERTS, "head_dim": 96, "v_head_dim": 64},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 100, "attn_logit_softcapping": 3.0},
    "bloom": {"n_layer": 2, "n_head": 4},  # ALiBi
}
TEXT = "the sea is wide, the sky is blue; a bit that never moves ä€"


def byte_tokenizer() -> Any:
    """A byte-level tokenizer of 300 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompt(n: int, batch: int = 1, seed: int = 3) -> Any:
    """Token ids (batch, n) of a model with UNTIED's vocabulary, the padding's 0 not among them."""
    import torch

    return torch.randint(1, UNTIED["vocab_size"], (batch, n), generator=torch.Generator().manual_seed(seed))
