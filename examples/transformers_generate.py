"""Generate with a transformers model whose attention and KV cache are on the Vulkan device.

    .venv/bin/python examples/transformers_generate.py [MODEL] [PROMPT]

MODEL: what AutoModelForCausalLM.from_pretrained takes; without one, a small model with random weights.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from zinc_attn.integrations.transformers import ZincCache, register

register()  # makes attn_implementation="zinc" known
name = sys.argv[1] if len(sys.argv) > 1 else None
if name:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", attn_implementation="zinc")
    prompt = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
    inputs = tokenizer(prompt, return_tensors="pt")
else:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
                         attn_implementation="zinc")  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(0, 512, (1, 100))}

with ZincCache(model.config, max_cache_len=1024) as cache:
    tokens = model.generate(**inputs, cache=cache, max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(tokens[0]) if name else tokens[0, 100:].tolist())
    memory = sum(kv.nbytes for kv in cache.caches) / 2**20
    print(f"{cache.get_seq_length()} tokens in {memory:.1f} MiB on {cache.caches[0].device.info.name}")
