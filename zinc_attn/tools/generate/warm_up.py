"""The warm-up of a generation: what a driver compiles on first use is compiled before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from ...cache.kv_cache import KVCache
from ...decode.attention import Attention
from .hf_model import HFModel, quiet


def warm_up(model: HFModel, cache: Any, layout: dict[str, int | None], chunks: Sequence[int]) -> float:
    """Compile what a prompt of these chunks, and the steps after it up to the cache's capacity, need: seconds.

    One token goes through the whole model, on a fork of the empty ``cache`` that is dropped again, and the steps are
    prepared. Then one layer of each kind attends zeros in calls of the chunks' sizes: the programs depend on the
    numbers of rows and keys, and not on their values. layout: num_splits or split_size of the cache, if any.
    """
    import torch

    begin = perf_counter()
    kinds: dict[tuple[object, ...], Any] = {}

    def note(call: Any) -> None:
        options = call.options
        kind = (cache.layers[call.layer].shape, options.window, options.softcap, options.sinks is None)
        kinds.setdefault(kind, call)

    twin = cache.fork()
    twin.observer = note
    try:
        with torch.no_grad(), quiet():
            model.logits(torch.zeros((1, 1), dtype=torch.int64), twin)
        twin.prepare()
    finally:
        twin.reset()
    held = cache.caches[0]  # all have its device and its dtype
    for call in kinds.values() if chunks else ():
        shape = cache.layers[call.layer].shape
        options = vars(call.options) | layout
        with KVCache(held.device, shape, 1, sum(chunks), held.dtype, cache.page_size, round_rows=True) as scratch:
            _attend_zeros(scratch, Attention(scratch, arithmetic=cache.arithmetic, **options), chunks)
    return perf_counter() - begin


def _attend_zeros(cache: KVCache, attention: Attention, chunks: Sequence[int]) -> None:
    """Calls of the chunks' sizes, one behind the other."""
    shape, sequence = cache.shape, cache.new_sequence()
    for rows in chunks:
        k, v = (np.zeros((rows, shape.kv_heads, size), np.float32) for size in (shape.head_dim, shape.v_head_dim))
        attention(np.zeros((rows, shape.q_heads, shape.head_dim), np.float32), sequence, 0, k=k, v=v)
