"""Random operations on sequences of one pool: they hold what plain lists hold, and take the pages that a model says."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_tables import state
from support import FULL

from zinc_attn.cache.pages import CapacityError, PagePool, StepError
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction

LAYERS = 3
OPS = (
    *("token", "rows", "rollback", "dropped", "step", "step", "step", "step", "layers", "batch"),
    *("fork", "fork", "fork", "keep", "truncate", "free", "new"),
)


@dataclass
class World:
    """A pool with its sequences, the tokens they should hold, and the page contents that the appends left."""

    page_size: int
    num_pages: int
    seed: int
    seqs: list[SequencePages] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)  # per sequence and layer
    next_token: int = 1
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.order = random.Random(self.seed).sample(range(self.num_pages), self.num_pages)
        self.pool = PagePool(self.num_pages, self.page_size, self.order)
        self.slots = np.zeros((LAYERS, self.num_pages, self.page_size), np.int64)
        self.new()

    def new(self) -> None:
        self.seqs.append(SequencePages(self.pool, LAYERS))
        self.tokens.append([[] for _ in range(LAYERS)])

    def free_pages(self) -> tuple[int, ...]:
        """In the order in which they are taken."""
        used = {page for seq in self.seqs for pages in seq.held() for page in pages}
        return tuple(page for page in self.order if page not in used)

    def reserve(self, i: int, layers: Sequence[int], count: int, transaction: Transaction) -> bool:
        """Reserve, copy and write as a cache does; False where the model says that the pool must refuse."""
        seq, before, free = self.seqs[i], state(self.pool, *self.seqs), self.free_pages()
        lengths = [len(t) for t in self.tokens[i]]
        start, low, high = lengths[layers[0]], min(lengths), max(lengths)
        legal = low == high or (start == low and count == high - low)
        last = seq.pages[-1] if seq.pages else None
        leaving = [r.start <= start for r in transaction.reservations if last in r.replaced]
        copy = low == high and start % self.page_size and sum(last in s.pages for s in self.seqs) - sum(leaving) > 1
        need = -(-(start + count) // self.page_size) - len(seq.pages) + bool(copy)
        if not legal or need > len(free):
            room = max(0, (len(seq.pages) - bool(copy) + len(free)) * self.page_size - start)
            text = (
                rf"^k: got {count} tokens at length {start}, expected at most {room}: {len(free)} of {self.num_pages} "
            )
            with pytest.raises(CapacityError, match=text) if legal else pytest.raises(StepError):
                transaction.reserve(seq, layers[0], count, tuple(layers[1:]))
            assert state(self.pool, *self.seqs) == before
            self.counts["refused"] += 1
            return False
        place = transaction.reserve(seq, layers[0], count, tuple(layers[1:]))
        assert (place.new_pages, place.start) == (free[:need], start)
        assert place.table == (*seq.pages[: place.table_start], *place.new_pages)
        for source, target, keep in place.copies:
            self.counts["copied"] += 1
            self.slots[:, target] = -1
            self.slots[:, target, :keep] = self.slots[:, source, :keep]
        new = np.arange(self.next_token, self.next_token + count)
        self.next_token += count
        for page, slot, row, rows in place.writes():
            for layer in layers:
                self.slots[layer, page, slot : slot + rows] = new[row : row + rows]
        return True

    def append(self, i: int, layers: Sequence[int], count: int, end: str = "commit") -> None:
        before = state(self.pool, *self.seqs)
        transaction, first = Transaction(), self.next_token
        if not self.reserve(i, layers, count, transaction):
            return
        if end == "commit":
            transaction.commit()
            for layer in layers:
                self.tokens[i][layer] += range(first, first + count)
            return
        if end == "rollback":
            transaction.rollback()
        del transaction  # one that is collected while it is open counts as rolled back
        assert state(self.pool, *self.seqs) == before

    def batch(self, count: int, pick: int) -> None:
        """Reserve for all sequences in two transactions, then commit one or both or none, in either order."""
        batches = [Transaction(), Transaction()]
        new: list[list[tuple[list[int], range]]] = [[], []]
        for i in range(len(self.seqs)):
            which, first = pick >> i & 1, self.next_token
            layer = self.tokens[i].index(min(self.tokens[i], key=len))
            if self.reserve(i, [layer], count, batches[which]):
                new[which].append((self.tokens[i][layer], range(first, first + count)))
        self.pool.check(self.seqs)
        for which in (0, 1) if pick & 32 else (1, 0):
            if pick >> 6 >> which & 1:
                batches[which].rollback()
                continue
            batches[which].commit()
            for tokens, rows in new[which]:
                tokens.extend(rows)

    def keep(self, i: int, size: int) -> None:
        """Drop a token and keep some behind it, in all layers; commit, or roll back."""
        seq, before, n = self.seqs[i], state(self.pool, *self.seqs), len(self.seqs[i])
        start = max(0, n - size % (2 * self.page_size))
        sources = [at for at in range(start + 1, n) if at * size % 3]
        transaction, free = Transaction(), self.free_pages()
        need = -(-(start + len(sources)) // self.page_size) - start // self.page_size if sources else 0
        if need > len(free):
            with pytest.raises(CapacityError, match=r"^keep: got \d+ rows that move to token \d+ and behind, expec"):
                transaction.rewrite(seq, start, len(sources))
            return
        old, place = np.array(seq.pages, np.int64), transaction.rewrite(seq, start, len(sources))
        assert place.new_pages == free[:need]
        for source, target, keep in place.copies:
            self.slots[:, target, :keep] = self.slots[:, source, :keep]
        new, targets = np.array(place.table, np.int64), start + np.arange(len(sources))
        for source, target in zip(sources, targets.tolist(), strict=True):
            (to, slot), (page, at) = divmod(target, self.page_size), divmod(source, self.page_size)
            self.slots[:, new[to], slot] = self.slots[:, old[page], at]
        if size & 64:
            transaction.rollback()
            assert state(self.pool, *self.seqs) == before
        else:
            transaction.commit()
            self.tokens[i] = [t[:start] + [t[at] for at in sources] for t in self.tokens[i]]

    def truncate(self, i: int, n: int) -> None:
        self.seqs[i].truncate(n)
        self.tokens[i] = [t[:n] for t in self.tokens[i]]

    def apply(self, op: str, which: int, layer: int, size: int) -> None:
        i = which % len(self.seqs) if self.seqs else -1
        if op == "new" or i < 0:
            if len(self.seqs) < 5:
                self.new()
            return
        seq, lengths = self.seqs[i], [len(t) for t in self.tokens[i]]
        behind = max(lengths) - lengths[layer]
        if op == "token":
            self.append(i, [layer], behind or 1)  # refused only where the layer is ahead, or the pool is full
        elif op == "layers":
            alike = [at for at in range(LAYERS) if lengths[at] == lengths[layer] and (size >> at & 1 or at == layer)]
            self.append(i, alike, behind or 1 + size % self.page_size)
        elif op in ("rows", "rollback", "dropped"):
            end = {"rows": "commit"}.get(op, op)
            self.append(i, [layer], 1 + size % (2 * self.page_size + 1), end)
            if size % 4:  # go back into step
                self.truncate(i, len(seq))
        elif op == "step":
            for each in random.Random(size).sample(range(LAYERS), LAYERS):
                count = max(lengths) - lengths[each] if behind or not seq.in_step else 1 + size % self.page_size
                if count:
                    self.append(i, [each], count)
        elif op == "batch":
            self.batch(1 + size % 5, size)
        elif op == "fork":
            if not seq.in_step:
                with pytest.raises(StepError):
                    seq.fork()
            elif len(self.seqs) < 5:
                self.seqs.append(seq.fork())
                self.tokens.append([list(t) for t in self.tokens[i]])
                self.truncate(-1, max(0, len(seq) - size % 3))
        elif op == "keep":
            if seq.in_step:
                self.keep(i, size)
        elif op == "truncate":
            self.truncate(i, max(0, len(seq) - size % (2 * self.page_size)))
        elif op == "free":
            del self.tokens[i], self.seqs[i]
            if size % 2:  # else it is collected
                seq.free()

    def compare(self) -> None:
        self.pool.check(self.seqs)
        for seq, tokens in zip(self.seqs, self.tokens, strict=True):
            assert seq.lengths == [len(t) for t in tokens]
            content = self.slots[:, seq.pages].reshape(LAYERS, -1)
            for layer in range(LAYERS):
                assert content[layer, : seq.lengths[layer]].tolist() == tokens[layer]


def test_10_000_random_operations_hold_what_a_plain_list_holds() -> None:
    counts: Counter[str] = Counter()

    @settings(
        max_examples=4000 if FULL else 420,
        deadline=None,
        database=None,
        derandomize=not FULL,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        page_size=st.sampled_from((16, 64, 256)),
        num_pages=st.integers(1, 32),
        seed=st.integers(0, 999),
        ops=st.binary(min_size=400, max_size=400),  # four bytes each: one draw in place of hundreds
    )
    def run(page_size: int, num_pages: int, seed: int, ops: bytes) -> None:
        world = World(page_size, num_pages, seed)
        for op, which, high, low in zip(*[iter(ops)] * 4, strict=True):
            size = (high << 4 | low & 15) >> low % 11  # below 4096, and small ones often
            world.apply(OPS[op % len(OPS)], which % 5, which % LAYERS, size)
            world.compare()
        for seq in world.seqs:
            seq.free()
        assert world.pool.free_pages == num_pages
        world.pool.check([])
        counts.update(world.counts, done=len(ops) // 4)

    run()
    assert counts["done"] >= 10_000 and counts["refused"] >= 500 and counts["copied"] >= 500
