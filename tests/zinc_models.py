"""Small random-weight models of real architectures with attention 'zinc', and what tests do with them.

Importing it skips the test file where torch or transformers is not installed.
"""

from functools import cache
from typing import Any

import pytest
import tiny_models
from tiny_models import CONFIGS, EXPERTS, UNTIED, prompt

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")

import zinc_attn as za  # noqa: E402
from zinc_attn.integrations import transformers as hf  # noqa: E402

STEPS = 64
ABSENT = object()  # takes a key of UNTIED out of a config
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 32}
HYBRID = {**tiny_models.HYBRID, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
WINDOWS = {**tiny_models.WINDOWS, "num_hidden_layers": 3}
WINDOWS["layer_types"] = [*tiny_models.WINDOWS["layer_types"], "sliding_attention"]
LATENT = {
    **{"head_dim": ABSENT, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
LATENT_MOE = {**LATENT, **EXPERTS, "n_group": 1, "topk_group": 1}
DENSE_FIRST = {**LATENT_MOE, "first_k_dense_replace": 1}
ODD = {"q_lora_rank": None, "kv_lora_rank": 44, "qk_nope_head_dim": 40, "qk_rope_head_dim": 14, "v_head_dim": 36}
# model class, its config beyond UNTIED
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", {**HYBRID, **SHARED_MOE}),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**HYBRID, **SHARED_MOE}),
    "gpt_oss": ("GptOssForCausalLM", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**WINDOWS, "head_dim": 256, "query_pre_attn_scalar": 100, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", {**WINDOWS, "head_dim": 256}),
    "gemma4": (  # layers of two shapes
        "Gemma4ForCausalLM",
        {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "global_head_dim": 128}
        | {"vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**DENSE_FIRST, **ODD}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DENSE_FIRST),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**DENSE_FIRST, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "mistral4": ("Mistral4ForCausalLM", {**DENSE_FIRST, "qk_nope_head_dim": 64}),
    "mimo_v2": (  # K of 192 and V of 128, twice as many KV heads in layers with a window
        "MiMoV2FlashForCausalLM",
        {**WINDOWS, **EXPERTS, "head_dim": 192, "v_head_dim": 128},
    ),
    "llama4": (  # layers with chunks, whose prompts end within one
        "Llama4ForCausalLM",
        {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16, "num_local_experts": 2}
        | {"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "attn_temperature_tuning": False},
    ),
    "falcon_h1": (  # recurrent states and attention in every layer
        "FalconH1ForCausalLM",
        {"head_dim": ABSENT, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
        | {"mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
    "llama_40": ("LlamaForCausalLM", {"head_dim": 40}),
    "llama_72": ("LlamaForCausalLM", {"head_dim": 72}),
    "llama_100": ("LlamaForCausalLM", {"head_dim": 100}),
    "llama_mqa": ("LlamaForCausalLM", {"num_attention_heads": 32, "num_key_value_heads": 1}),
}
# of which one test is enough, since they attend as one of the others does
SIMILAR: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": (  # the decoder's heads and layers are others than those of the encoder, which is not there
        "BartForCausalLM",
        {"head_dim": ABSENT, "num_hidden_layers": ABSENT, "num_attention_heads": ABSENT}
        | {"num_key_value_heads": ABSENT, "hidden_size": 256, "init_std": 0.15}
        | {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 4},
    ),
    "youtu": ("YoutuForCausalLM", LATENT),
    "minicpm3": ("MiniCPM3ForCausalLM", LATENT),
    "axk1": ("AXK1ForCausalLM", LATENT_MOE),
    "longcat_flash": (  # two attentions in each of num_layers layers
        "LongcatFlashForCausalLM",
        {**LATENT_MOE, "num_hidden_layers": ABSENT, "num_layers": 1, "moe_topk": 2, "ffn_hidden_size": 64}
        | {"expert_ffn_hidden_size": 32, "zero_expert_num": 1},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {**LATENT_MOE, "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "num_experts": 4},
    ),
}
# of small heads, whose kernels with masks compile fast, and layers that share keys and values
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", {"head_dim": ABSENT, "layer_types": ["conv", "full_attention"]}),
    "small gemma2": ("Gemma2ForCausalLM", CONFIGS["gemma2"]),
    "small deepseek_v3": ("DeepseekV3ForCausalLM", CONFIGS["deepseek_v3"]),
    "sharing gemma4": ("Gemma4ForCausalLM", {**CONFIGS["gemma4_text"], "vocab_size_per_layer_input": 199}),
    "sharing gemma3n": (
        "Gemma3nForCausalLM",
        {"sliding_window": 24, "layer_types": tiny_models.WINDOWS["layer_types"] * 2, "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 16}
        | {"laurel_rank": 8, "activation_sparsity_pattern": None},
    ),
}
# which ``adapt`` changes, and whose heads may be no power of two
FALCON = {"head_dim": ABSENT, "hidden_size": 256}  # its attention is sdpa: eager adds ALiBi twice, in the mask, too
SIX = {"head_dim": ABSENT, "hidden_size": 240, "num_attention_heads": 6}
ALIBI: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"head_dim": ABSENT, "hidden_size": 256}),
    "bloom of 6 heads": ("BloomForCausalLM", SIX),
    "mpt": ("MptForCausalLM", {**SIX, "attn_config": {"clip_qkv": 2.0}}),
    "falcon": ("FalconForCausalLM", {**FALCON, "alibi": True, "multi_query": False}),
    "falcon_mqa": ("FalconForCausalLM", {**FALCON, "alibi": True}),
    "falcon_rotary": ("FalconForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
}


OTHERS["falcon of 32 heads"] = ("FalconForCausalLM", {**FALCON, "alibi": True, "num_attention_heads": 32})


@cache
def loaded(name: str, dtype: Any = torch.float32, adapted: bool = False) -> Any:
    kind, changes = {**MODELS, **SIMILAR, **OTHERS, **ALIBI}[name]
    values = {key: value for key, value in {**UNTIED, **changes}.items() if value is not ABSENT}
    if "num_experts_per_tok" in values:
        values["experts_implementation"] = "eager"
    torch.manual_seed(11)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**values)).eval()
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            torch.nn.init.normal_(module.sinks, std=2.0)
    if adapted:
        hf.adapt(model)
    return model.to(dtype)


def model_of(name: str, attn: str = "zinc", dtype: Any = torch.float32) -> Any:
    """A model with attention "zinc", or transformers' eager or, of ALIBI, own attention."""
    if name in ALIBI:
        return loaded(name, dtype, adapted=attn == "zinc")
    model = loaded(name, dtype)
    model.set_attn_implementation(attn)
    return model


def cache_of(model: Any, device: za.Device, **options: Any) -> hf.ZincCache:
    fields = {"page_size": 64, **options}
    return hf.ZincCache(model.config, fields.pop("capacity", 256), device=device, **fields)


def generate(model: Any, ids: Any, **options: Any) -> Any:
    """Tokens (batch, new) and logits (batch, new, vocab)."""
    fixed = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": None, "eos_token_id": None, "use_cache": True}
    got = model.generate(ids, return_dict_in_generate=True, output_logits=True, **{**fixed, **options})
    return got.sequences[:, ids.shape[1] :], torch.stack(got.logits, dim=1)


def in_chunks(model: Any, ids: Any, held: hf.ZincCache, *edges: int) -> Any:
    """The logits of ``ids`` in chunks that begin at ``edges``."""
    parts = zip(edges, (*edges[1:], ids.shape[1]), strict=True)
    return torch.cat([model(ids[:, begin:end], cache=held).logits for begin, end in parts], dim=1)


def padded(*lengths: int) -> dict[str, Any]:
    """ids and attention_mask of a batch that is padded on the left."""
    n = max(lengths)
    ids, mask = prompt(n, len(lengths)), torch.ones(len(lengths), n, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, : n - length], mask[i, : n - length] = 0, 0
    return {"ids": ids, "attention_mask": mask}


def attend(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    """The attention function's output for a module that says nothing of itself."""
    return hf.attention_forward(torch.nn.Module(), q, k, v, mask, **options)[0]


def equal(a: Any, b: Any) -> bool:
    """Whether all bits are."""
    return torch.equal(*(x.contiguous().view(torch.int32) for x in (a, b)))
