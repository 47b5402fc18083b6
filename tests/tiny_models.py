"""Small random models for the tests: configs, a byte-level tokenizer with a chat template, and GGUF files of both."""

import json
from pathlib import Path
from typing import Any

import numpy as np

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
TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}] {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def config_file(path: Path, kind: str = "llama", **changes: Any) -> Path:
    """A config.json of a model type."""
    path.write_text(json.dumps({"model_type": kind, **BASE, **CONFIGS[kind], **changes}))
    return path


def byte_tokenizer(template: str | None = None) -> Any:
    """A byte-level tokenizer of 300 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


def saved(path: Path, kind: str = "llama", template: str | None = None, *, tokenizer: bool = True) -> Path:
    """A random checkpoint of a model type at ``path``, with a tokenizer or without."""
    from zinc_attn.tools import generate
    from zinc_attn.tools.generate.hf_model import quiet

    host = generate.build_model(config_file(path.with_suffix(".json"), kind), seed=7)
    with quiet():  # its progress bar would be among what a command says
        host.model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer(template).save_pretrained(path)
    return path


def write_gguf(path: Path, model: Any, template: str | None = TEMPLATE, **fields: Any) -> Path:
    """A float32 GGUF file of a Llama model and of ``byte_tokenizer``, as llama.cpp's converter writes it.

    fields: others to write, by their keys with __ for a point; architecture: in place of llama; layers: in place of
    the model's; tokenizer: False for none.
    """
    import gguf

    config, architecture = model.config, fields.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(fields.pop("layers", config.num_hidden_layers))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if fields.pop("tokenizer", True):
        _write_tokenizer(writer, template)
    for key, value in fields.items():
        name = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        else:
            {str: writer.add_string, float: writer.add_float32, int: writer.add_uint16}[type(value)](name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        array = weight.float().numpy()
        if rows := heads.get(name.split(".")[-2]):  # the two halves of a head's rows take turns in a GGUF file
            array = array.reshape(rows, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any, template: str | None) -> None:
    made = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(made["vocab"], key=made["vocab"].get))
    writer.add_token_types([1] * len(made["vocab"]))
    writer.add_token_merges([" ".join(pair) for pair in made["merges"]])
    if template is not None:
        writer.add_chat_template(template)


def prompt(n: int, batch: int = 1, seed: int = 3) -> Any:
    """Token ids (batch, n) of a model with UNTIED's vocabulary, the padding's 0 not among them."""
    import torch

    return torch.randint(1, UNTIED["vocab_size"], (batch, n), generator=torch.Generator().manual_seed(seed))
