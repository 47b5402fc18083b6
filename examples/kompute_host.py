"""A Kompute program that records attention in its own kp.Sequence, between its own operations.

The host owns the manager, the sequence and the tensors of q and of the new token's rows; nothing goes through NumPy
between the layers.

    .venv/bin/python examples/kompute_host.py
"""

import kp
import numpy as np

import zinc_attn as za
from zinc_attn.cache import rows

rng = np.random.default_rng(0)
shape = za.AttnShape(q_heads=16, kv_heads=2, head_dim=256)
za.list_devices()  # without a driver this is an error that says so; kp would end the process
manager = kp.Manager(0)
device = za.Device.from_kompute(manager)
cache = za.KVCache(device, shape, num_layers=2, capacity=1024, dtype="f16")
attention, seq = za.Attention(cache), cache.new_sequence()

q = manager.tensor_t(np.zeros(shape.q_heads * shape.head_dim, np.float32))
new = manager.tensor_t(np.zeros(cache.row_words, np.uint32))
sequence = manager.sequence()
sequence.record(kp.OpTensorSyncDevice([q, new]))  # stands for the host's own operations that make q, k and v
first, second = (attention.record(sequence, q, seq, layer, new) for layer in range(2))

for _ in range(5):
    q.data()[:] = rng.standard_normal(q.size(), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, shape.kv_heads, shape.head_dim)).astype(np.float16)
    new.data()[:] = rows.encode(k, v, cache.shape, "f16").reshape(-1)
    with first.step(second):  # the new token counts when the block ends without an error
        sequence.eval()
    print(f"{len(seq)} tokens, |out| = {np.linalg.norm(second.out.data().view(np.float32)[: q.size()]):.6f}")
