"""A runtime of one's own for SmolLM2: RoPE, RMSNorm and MLP in torch, attention and the KV cache from zinc_attn.

    .venv/bin/python examples/own_runtime.py SmolLM2-135M-Instruct.Q4_1.gguf [NEW_TOKENS]

transformers unpacks the weights, and at the end its eager attention must have written the same text.
"""

import sys
from pathlib import Path

if len(sys.argv) < 2:
    sys.exit(__doc__)

import torch
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM, AutoTokenizer

import zinc_attn as za

file, new_tokens = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 240
gguf = {"gguf_file": file.name, "local_files_only": True}
model = AutoModelForCausalLM.from_pretrained(file.parent, attn_implementation="eager", dtype=torch.float32, **gguf)
tokenizer = AutoTokenizer.from_pretrained(file.parent, **gguf)
config, weights = model.config, model.state_dict()
shape = za.AttnShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)


def project(x: torch.Tensor, name: str) -> torch.Tensor:
    return linear(x, weights[f"{name}.weight"])


def norm(x: torch.Tensor, name: str) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)


def rope(x: torch.Tensor, begin: int) -> torch.Tensor:
    """x: (tokens, heads, head_dim), from position ``begin`` on; halves of a head turn as real and imaginary parts."""
    angles = torch.outer(torch.arange(begin, begin + len(x)), frequencies)[:, None]
    (a, b), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def next_token(ids: list[int], attention: za.Attention, sequence: za.Sequence) -> int:
    """Append the tokens ``ids`` to the sequence; return the best next token."""
    x, begin = weights["model.embed_tokens.weight"][ids], len(sequence)  # x: (tokens, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (project(h, f"{layer}.self_attn.{kind}_proj").unflatten(-1, (-1, shape.head_dim)) for kind in "qkv")
        out = attention(rope(q, begin).numpy(), sequence, i, k=rope(k, begin).numpy(), v=v.numpy())
        x = x + project(torch.from_numpy(out).flatten(1), f"{layer}.self_attn.o_proj")
        h, mlp = norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"
        x = x + project(silu(project(h, f"{mlp}.gate_proj")) * project(h, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    return int(project(norm(x[-1], "model.norm"), "lm_head").argmax())


turns = [{"role": "user", "content": "Tell me a long story about a ship, a storm and a lighthouse."}]
prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
with za.Device.open() as device, torch.no_grad():
    cache = za.KVCache(device, shape, config.num_hidden_layers, len(prompt) + new_tokens, dtype="f32")
    attention, sequence, ids = za.Attention(cache), cache.new_sequence(), []
    while len(ids) < new_tokens and config.eos_token_id not in ids:
        ids.append(next_token(ids[-1:] or prompt, attention, sequence))
        print(tokenizer.decode(ids[-1]), end="", flush=True)
want = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)[0, len(prompt) :].tolist()
assert ids == want, "transformers' eager attention writes another text"
print(f"\n{len(ids)} tokens, equal to those of transformers' eager attention")
