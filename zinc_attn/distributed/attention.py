"""Attention over the sequences of a sharded cache: each shard attends its own nodes, and the states are folded once.

Nothing but the partial states travels between ranks: (head_dim + 2) float32 per node, query row and head.

Source of the idea: attention states merge (Ye et al. 2024, FlashInfer; Liu et al. 2023, ring attention).
"""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from ..cache.kv_cache import KVCache
from ..canonical.partial import PartialState
from ..canonical.state import F32
from ..checks import Uncopied
from ..decode.attention import Attention
from ..decode.requests import CallBatch, call_arguments, check_q, takes
from ..decode.targets import Target, check_targets
from ..errors import ArgumentError
from .cache import ShardedKVCache
from .call import Call
from .fold import Fold
from .ranks import pack_states, unpack_states


class Folder(Protocol):
    """A function that folds the partial states of one sequence, as a Fold does."""

    def __call__(self, parts: Seq[PartialState]) -> tuple[F32, F32]:
        """Return out and lse of the partial states of one call."""

    def release(self) -> None:
        """Free the memory of the calls so far."""


class ShardedAttention(Uncopied, instead="make one for the other cache"):
    """Attention of query rows over sequences of a ShardedKVCache, with the bits of ``Attention`` over a KVCache.

    cache: a ShardedKVCache; options: scale, window, softcap, sinks, alibi, mask_slopes and arithmetic of ``Attention``,
    whose errors they have; with matrix units the bits are those of ``Attention`` where all devices are alike.
    sent_bytes: of the partial states that this rank gave to the others; fold: folds the partial states, a Fold on the
    first device, which another Folder may replace.
    """

    def __init__(self, cache: ShardedKVCache, **options: Any) -> None:
        if not isinstance(cache, ShardedKVCache):
            hint = "; Attention attends over a KVCache" if isinstance(cache, KVCache) else ""
            raise ArgumentError(f"cache: got {type(cache).__name__}, expected a ShardedKVCache{hint}")
        cache.check_open()
        self.cache = cache
        self._attention = {i: Attention(shard, **options) for i, shard in cache.shards.items()}
        self.fold: Folder = Fold(cache.devices[0], cache.shape)
        self.sent_bytes = 0
        cache.users.purge()
        cache.users.add(self)

    @takes(call_arguments)
    def __call__(self, batch: CallBatch, layer: int) -> Any:
        """Append k, v to ``seq``, then attend. Arguments, results and errors are those of ``Attention``.

        A batch's partial states travel in one exchange. A failed call leaves the cache, out and lse as they were.
        """
        with Call.of(self.cache, "attend") as call:
            if not batch.causal:
                raise ArgumentError("causal: got False, expected True: a shard's rows see no keys after them")
            batch.check_new(self.cache.shape.latent)
            call.check(batch.sequences, layer, batch.k, batch.v)
            targets = self._check(call, batch)
            call.reserve()
            parts = self._attend(call, batch)
            folded = [self.fold(states) for states in self._exchanged(call, parts)]
            for target, results in zip(targets, folded, strict=True):
                target.write(*results)
        outs, lses = [out for out, _ in folded], [lse for _, lse in folded]
        return batch.shaped(outs, lses)

    def _check(self, call: Call, batch: CallBatch) -> list[Target]:
        """Check queries and masks as for a whole sequence. A shard's own check lets rows see no key of the shard."""
        shard, attention = next(iter(self._attention.items()))
        cache, window = self.cache.shards[shard], attention.window_of(call.layer)
        for i, (q, end) in enumerate(zip(batch.q, call.ends, strict=True)):
            batch.check_mask(i, len(check_q(cache, q)[0]), end, window, cache)
        shapes = [(*np.shape(x)[:-1], self.cache.shape.v_head_dim) for x in batch.q]
        return check_targets(shapes, batch.out, batch.lse)

    def _attend(self, call: Call, batch: CallBatch) -> list[list[PartialState]]:
        """Attend on every local shard, and return the partial states of each shard, one per sequence."""
        masks = [None] * len(batch.q) if batch.mask is None else batch.mask
        arguments = list(zip(batch.q, masks, batch.sequences, call.pieces, call.ends, strict=True))

        def attend(shard: int) -> list[PartialState]:
            partial = self._attention[shard].partial
            return [
                partial(
                    q, seq.shards[shard], call.layer, *new[shard], nodes=seq.nodes(shard, end), tokens=end, mask=mask
                )
                for q, mask, seq, new, end in arguments
            ]

        return list(call.run_on_shards(attend).values())

    def _exchanged(self, call: Call, parts: list[list[PartialState]]) -> list[tuple[PartialState, ...]]:
        """The partial states of each sequence from the shards of every rank."""
        if self.cache.ranks is not None:
            (states,) = parts
            pairs = zip(call.sequences, states, strict=True)
            call.sequences = [descriptor._replace(query=state.call) for descriptor, state in pairs]
            self.sent_bytes += sum(state.nbytes for state in states)
            parts = [unpack_states(data, len(states)) for data in call.exchange(pack_states(states))]
        return list(zip(*parts, strict=True))

    def close(self) -> None:
        """Free the command buffers and tensors, as ShardedKVCache.close does. A later call makes them anew."""
        self.fold.release()
        for attention in self._attention.values():
            attention.close()
