"""Rows for a cache, and a sequence that grows by them with the oracle's bits at each step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import numpy as np
from page_tables import check_counts
from support import same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows

SMALL = za.AttnShape(4, 2, 64)
DTYPES = ("f16", "f32", "bf16", "q8_0")
Pair = tuple[Any, Any]


def new_rows(rng: np.random.Generator, n: int, shape: za.AttnShape, dtype: str, scale: float = 1.0) -> Pair:
    """k, v (n, kv_heads, head_dim) that a cache of ``dtype`` takes."""

    def drawn() -> Any:
        x = rng.standard_normal((n, shape.kv_heads, shape.head_dim), np.float32) * np.float32(scale)
        if dtype == "bf16":
            return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return x.astype(np.float16) if dtype == "f16" else x

    return drawn(), drawn()


def new_q(rng: np.random.Generator, n: int, shape: za.AttnShape) -> Any:
    return rng.standard_normal((n, shape.q_heads, shape.head_dim), np.float32)


@contextmanager
def filled(
    device: za.Device,
    shape: za.AttnShape,
    k: Any,
    v: Any,
    dtype: str = "f16",
    capacity: int = 4096,
    page_size: int = 64,
    **options: Any,
) -> Iterator[tuple[za.KVCache, za.Sequence]]:
    """A cache of one layer with a sequence of these rows."""
    with za.KVCache(device, shape, 1, capacity, dtype, page_size, **options) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, k, None if shape.latent else v)
        yield cache, seq


class Twin:
    """A sequence of a cache, sharded or not, and beside it the rows that each layer must hold.

    attention: what ``step`` calls, whose results must have the oracle's bits; scoring: of the oracle, where a list has
    an option for each layer; held: (k, v) of each layer, as they are stored.
    """

    def __init__(self, attention: Any, seed: int = 0, scale: float = 1.0, **scoring: Any) -> None:
        self.attention, self.cache, self.scoring = attention, attention.cache, scoring
        self.sequence = self.cache.new_sequence()
        self.rng, self.scale = np.random.default_rng(seed), scale
        none = np.zeros((0, self.cache.shape.kv_heads, self.cache.shape.head_dim), np.float32)
        self.held = [(none, none)] * self.cache.num_layers

    def new(self, layer: int, n: int, q_len: int) -> tuple[Any, Any, Any]:
        """q, k and v of a call; the rows are held from here on."""
        k, v = new_rows(self.rng, n, self.cache.shape, self.cache.dtype, self.scale)
        if n:
            pairs = zip(self.held[layer], rows.stored(k, v, self.cache.dtype), strict=True)
            self.held[layer] = tuple(np.concatenate(pair) for pair in pairs)
        return new_q(self.rng, q_len, self.cache.shape), k, v

    def check(self, layer: int, q: Any, got: Any, label: object = "") -> None:
        """``got``, out and lse of the query rows ``q`` over all that a layer holds, has the oracle's bits."""
        scoring = {name: value[layer] if isinstance(value, list) else value for name, value in self.scoring.items()}
        want = reference.emulate(q, *self.held[layer], **scoring)
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
        same(got, want, (label, layer, len(self.held[layer][0])))

    def append(self, n: int, layers: Seq[int] | None = None) -> None:
        for layer in range(self.cache.num_layers) if layers is None else layers:
            self.cache.append(self.sequence, layer, *self.new(layer, n, 0)[1:])

    def step(self, n: int, q_len: int = 1) -> list[Pair]:
        """``n`` tokens appended and ``q_len`` rows attended in every layer: (out, lse) of each."""
        pairs = []
        for layer in self.rng.permutation(self.cache.num_layers).tolist():
            q, k, v = self.new(layer, n, q_len)
            pairs.append(self.attention(q, self.sequence, layer, k=k, v=v, return_lse=True))
            self.check(layer, q, pairs[-1])
        return pairs

    def look(self, q_len: int = 1, attention: Any = None) -> None:
        """Attend in every layer, also where there are fewer keys than rows."""
        for layer in range(self.cache.num_layers):
            q = new_q(self.rng, q_len, self.cache.shape)
            got = (attention or self.attention)(q, self.sequence, layer, return_lse=True, allow_empty=True)
            self.check(layer, q, got, "no new rows")

    def other(self, sequence: Any, attention: Any = None) -> Twin:
        """``sequence``, perhaps of another cache, beside the rows of this one: a fork, or what was loaded."""
        twin = Twin.__new__(Twin)
        vars(twin).update(vars(self), sequence=sequence, held=list(self.held))
        twin.rng = np.random.default_rng(self.rng.integers(1 << 30))
        if attention is not None:
            twin.attention, twin.cache = attention, attention.cache
        return twin

    def fork(self) -> Twin:
        return self.other(self.sequence.fork())

    def truncate(self, n: int) -> None:
        self.held = [(k[:n], v[:n]) for k, v in self.held]
        self.sequence.truncate(n)

    def keep(self, kept: Seq[int], last: int) -> None:
        ends = [len(k) - last for k, _ in self.held]
        self.held = [
            tuple(np.concatenate([x[:n], x[n:][list(kept)]]) for x in pair)
            for n, pair in zip(ends, self.held, strict=True)
        ]
        self.sequence.keep(kept, last)

    def __len__(self) -> int:
        return len(self.sequence)


@contextmanager
def done_or_not_done(twins: Seq[Twin]) -> Iterator[None]:
    """Around a call that may be cut short: then all twins of the call hold the rows from before it, or all those from
    behind it."""
    before = [(list(twin.held), list(twin.sequence.lengths)) for twin in twins]
    try:
        yield
    except BaseException:
        acting = [
            (twin, held, list(twin.sequence.lengths) == lengths)
            for twin, (held, lengths) in zip(twins, before, strict=True)
            if any(x is not y for x, y in zip(twin.held, held, strict=True))
        ]
        assert len({undone for *_, undone in acting}) <= 1, acting
        for twin, held, undone in acting:
            twin.held = held if undone else twin.held
        raise


def together(
    twins: Seq[Twin],
    counts: Seq[int],
    q_lens: Seq[int] | None = None,
    attention: Any = None,
    layers: Seq[int] | None = None,
) -> None:
    """One call of all ``twins`` in every layer, with so many new rows (0 of each: none) and query rows of each."""
    attention = attention or twins[0].attention
    for layer in layers or range(attention.cache.num_layers):
        new = [twin.new(layer, n, m) for twin, n, m in zip(twins, counts, q_lens or counts, strict=True)]
        q, k, v = (list(column) for column in zip(*new, strict=True))
        rows_of = {"k": k, "v": v} if any(counts) else {}
        outs, lses = attention(q, [twin.sequence for twin in twins], layer, return_lse=True, **rows_of)
        for twin, rows_q, *got in zip(twins, q, outs, lses, strict=True):
            twin.check(layer, rows_q, got, "batch")


def story(a: Twin, b: Twin, c: Twin, path: Any) -> Iterator[Callable[[], Any]]:
    """Each call is hit on its own, and the ones behind it show what is left behind."""

    def attend(twin: Twin, layer: int, n: int = 1, q_len: int = 1) -> Callable[[], Any]:
        return lambda: together([twin], [n], [q_len], layers=(layer,))

    for layer in (1, 0):  # copies the shared page for one of its two holders, in any order of layers
        yield lambda layer=layer: together([a, b, c], [3] * 3, layers=(layer,))
    for layer in (0, 1) * 3:  # from the second on steady: nothing is new but the token
        yield attend(a, layer)
    yield lambda: b.append(40, [1])
    yield lambda: b.append(40, [0])
    yield attend(c, 0, 90, 90)
    yield attend(c, 1, 0, 2)
    yield attend(c, 1, 90, 90)
    yield lambda: c.sequence.save(path)
    yield lambda: c.cache.load(path).free()
    yield lambda: a.truncate(5)
    yield attend(a, 0, 1)
    yield attend(a, 1, 1)
    yield lambda: len(b) >= 40 and b.keep([0, 1, 4, 5, 20, 33], 40)  # where what came before has not failed


def check_books(cache: za.ShardedKVCache, live: list[za.ShardedSequence], collect: bool = True) -> int:
    """Nodes that ``live``, all sequences of the cache, have: the allocator and the shards have counted the same."""
    if collect:
        gc.collect()
    cache.settle()  # as the next call does
    holders = Counter(node for seq in live for node in seq.held)
    assert all(cache.allocator.is_shared(node) == (count > 1) for node, count in holders.items())
    assert cache.allocator.used.tolist() == [sum(node.shard == i for node in holders) for i in cache.shards]
    for shard, part in cache.shards.items():
        check_counts(part.pool, [seq.shards[shard].pages for seq in live])
    return len(holders)
