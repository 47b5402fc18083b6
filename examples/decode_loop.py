"""A decode loop on the resident cache: prefill a prompt, then one token at a time, for two layers.

.venv/bin/python examples/decode_loop.py
"""

import numpy as np

import zinc_attn as za

rng = np.random.default_rng(0)
shape = za.AttnShape(q_heads=16, kv_heads=2, head_dim=256)
layers = 2

with za.Device.open() as device:
    cache = za.KVCache(device, shape, num_layers=layers, capacity=4096, dtype="f16")
    attention = za.Attention(cache)
    sequence = cache.new_sequence()

    def step(tokens: int) -> np.ndarray:
        """One pass over the layers with made-up projections of ``tokens`` new tokens."""
        for layer in range(layers):
            q = rng.standard_normal((tokens, shape.q_heads, shape.head_dim), dtype=np.float32)
            k, v = rng.standard_normal((2, tokens, shape.kv_heads, shape.head_dim)).astype(np.float16)
            out = attention(q, sequence, layer, k=k, v=v)  # append, attend and merge: one submission
        return out

    step(300)  # the prompt
    for _ in range(5):
        out = step(1)
        print(f"{len(sequence)} tokens, |out| = {np.linalg.norm(out):.6f}")
    print(f"{cache.nbytes / 2**20:.0f} MiB on {device.info.name}, {cache.free_tokens} tokens in free pages")
