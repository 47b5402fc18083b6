"""What tests of sharded caches share: a shape, and what must hold of the nodes that sequences have."""

import gc
from collections import Counter

import zinc_attn as za

SHAPE = za.AttnShape(6, 2, 64)


def check_books(cache: za.ShardedKVCache, live: list[za.ShardedSequence], collect: bool = True) -> int:
    """Nodes that ``live``, all sequences of the cache, have: the allocator and the shards have counted the same."""
    if collect:
        gc.collect()
    cache.begin()  # as the next call does
    holders = Counter(node for seq in live for node in seq.held)
    assert all(cache.allocator.is_shared(node) == (count > 1) for node, count in holders.items())
    assert cache.allocator.used.tolist() == [sum(node.shard == i for node in holders) for i in cache.shards]
    for shard, one in cache.shards.items():
        one.pool.check([seq.shards[shard].pages for seq in live])
    return len(holders)
