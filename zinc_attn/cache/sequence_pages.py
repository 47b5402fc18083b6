"""The pages and the token counts of one sequence: forking, and giving tokens up; ``transaction`` adds tokens.

See ``pages`` for the invariants, and for how an interrupt between any two bytecodes leaves a call done or not done.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

from ..checks import check_int
from ..errors import ClosedError, LimitError
from ..limits import MAX_CONTEXT
from .pages import PagePool, StepError
from .rows import NO_ROWS, Largest


class State(NamedTuple):
    """A sequence's state at one moment.

    table: page ids in token order; lengths: tokens of each layer; closed: whether freed. largest: magnitudes that no
    row exceeds; given_up: whether ``largest`` may come from rows given up, or from another sequence of a call.
    """

    table: tuple[int, ...]
    lengths: tuple[int, ...]
    closed: bool = False
    largest: Largest = NO_ROWS
    given_up: bool = False


class Commit:
    """Whether the changes of a call count. All of them count from the store of ``done`` on."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class Change(Protocol):
    """A transaction, as a sequence with a reservation in it sees it."""

    @property
    def state(self) -> str:
        """One of "open", "committed" and "rolled back"."""

    def new_pages(self, sequence: SequencePages, /) -> tuple[int, ...]:
        """The pages that are held for ``sequence``, without its table's."""

    def rollback(self) -> None:
        """End it without a commit."""


class SequencePages:
    """The block table and the layers' token counts of one sequence.

    unseen: by layer, see the module ``unseen``. A sequence that is garbage collected gives its pages back.
    """

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self.pool = pool
        self._settled = State((), (0,) * check_int("num_layers", num_layers, 1))
        self._next: tuple[State, Commit] | None = None  # the state after the commit
        self._open: weakref.ReferenceType[Change] | None = None
        self.unseen: dict[int, int] = {}
        pool.sequences.add(self)

    def __len__(self) -> int:
        """Tokens that every layer has."""
        return min(self.state[1])

    def __bool__(self) -> bool:
        """True: an empty sequence is still a sequence."""
        return True

    @property
    def state(self) -> State:
        """The sequence's state, of one moment."""
        following = self._next  # read before _settled: whoever settles writes them in the other order
        return following[0] if following is not None and following[1].done else self._settled

    @property
    def table(self) -> tuple[int, ...]:
        """The page ids in token order. The same object as long as the table does not change."""
        return self.state[0]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer."""
        return list(self.state[1])

    def length(self, layer: int) -> int:
        """Tokens of one layer."""
        return self.state[1][layer]

    @property
    def closed(self) -> bool:
        """Whether ``free`` was called."""
        return self._settled[2]

    @property
    def num_layers(self) -> int:
        """Layers, each with its own token count."""
        return len(self._settled[1])

    def check_open(self) -> None:
        """ClosedError after ``free``."""
        if self._settled[2]:
            raise ClosedError("sequence: used after free()")

    def check_idle(self) -> None:
        """ClosedError after ``free``, StepError while a reservation is open."""
        self.check_open()
        if self.open_transaction():
            raise StepError("sequence: a reservation of it is open; commit() or rollback() its transaction first")

    def check_in_step(self, what: str) -> None:
        """StepError, which names the call, unless all layers have as many tokens."""
        lengths = self.state[1]
        low, high = min(lengths), max(lengths)
        if low != high:
            raise StepError(
                f"{what}: layer {lengths.index(high)} has length {high}, layer {lengths.index(low)} has length "
                f"{low}, expected equal lengths; append to every layer first, or truncate({low})"
            )

    def check_append(self, layer: int, count: int, also: tuple[int, ...] = ()) -> int:
        """The position of the first of ``count`` tokens that ``layer``, and the layers ``also`` of its length, append.

        Where all layers have the same length, any layer may append any count. Otherwise a step is under way: the
        shorter layers append exactly the count of the longer ones, which wait.
        StepError: out of step, or a reservation is open; LimitError: beyond 2**24 tokens; ArgumentError, ClosedError.
        """
        self.check_idle()
        lengths = self.state[1]
        layer, count = check_int("layer", layer, 0, len(lengths) - 1), check_int("count", count, 1)
        start, low, high = lengths[layer], min(lengths), max(lengths)
        for index, other in enumerate(also):
            if lengths[check_int("also", other, 0, len(lengths) - 1)] != start or other in (layer, *also[:index]):
                raise StepError(
                    f"also: got layer {other} at length {lengths[other]}, expected layers other than {layer} of its "
                    f"length {start}, each once; append to every layer first, or truncate({low})"
                )
        if start == high > low:
            shortest = lengths.index(low)
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected none yet, layer {shortest} has length "
                f"{low}; append {high - low} to every layer that is behind first, or truncate({low})"
            )
        if start < high and count != high - start:
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected {high - start}, layer "
                f"{lengths.index(high)} has length {high}; append as many as it did, or truncate({low})"
            )
        if start + count > MAX_CONTEXT:
            raise LimitError(f"k: got {count} tokens at length {start}, expected a length of at most {MAX_CONTEXT}")
        return start

    def fork(self) -> SequencePages:
        """A second sequence with the same tokens that shares all pages. StepError unless all layers are in step."""
        self.check_idle()
        self.check_in_step("fork")
        child = SequencePages(self.pool, self.num_layers)
        try:
            counts = self.pool.begin_update()
            child.unseen = dict(self.unseen)
            child._settled = self.state  # from here on it holds them
            counts.share(child._settled[0])
            self.pool.end_update(counts)
            return child
        except BaseException:
            child.free()
            raise

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens of every layer, 0 <= n <= len(self), and give up the pages beyond them.

        Allowed within a step too: the layers ahead are cut as well, so all layers end in step, with ``n`` tokens.
        """
        self.check_idle()
        n = check_int("n", n, 0, len(self))
        self._shrink((n,) * self.num_layers)

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, 0 <= n <= its length, and the pages that some layer needs.

        StepError: another sequence shares a page of the tokens given up, which the layer's next rows would overwrite.
        """
        self.check_idle()
        pages, lengths, *_ = self.state
        n = check_int("n", n, 0, lengths[check_int("layer", layer, 0, self.num_layers - 1)])
        given_up = pages[n // self.pool.page_size : self.pool.pages_for(lengths[layer])]
        if n < lengths[layer] and any(self.pool.is_shared(page) for page in given_up):
            raise StepError(
                f"retract: layer {layer} has length {lengths[layer]} and shares pages with another sequence from "
                f"token {n} on, expected an append after what they share; truncate({n}) cuts every layer"
            )
        self._shrink((*lengths[:layer], n, *lengths[layer + 1 :]))

    def free(self) -> None:
        """Give up every page and roll an open reservation back; a second call does nothing."""
        if transaction := self.open_transaction():
            transaction.rollback()
        self._shrink((0,) * self.num_layers, True)

    def open_transaction(self) -> Change | None:
        """The transaction with a reservation of this sequence that is neither committed nor rolled back, or None."""
        transaction = self._open() if self._open else None
        return transaction if transaction and transaction.state == "open" else None

    def held(self) -> tuple[tuple[int, ...], ...]:
        """The page ids of the table, and those that an open transaction holds for the sequence; no page is in both."""
        transaction = self.open_transaction()
        return (self.table, transaction.new_pages(self)) if transaction else (self.table,)

    def note(self, largest: Largest, given_up: bool) -> None:
        """Set the magnitudes that no row exceeds, and whether the rows that had them may be gone."""
        self._settle()
        self._settled = self._settled._replace(largest=largest, given_up=given_up)

    def enter(self, transaction: Change) -> None:
        """``transaction`` is about to hold pages for this sequence."""
        self._open = weakref.ref(transaction, self.pool.sequences.dead.append)

    def prepare(self, state: State, commit: Commit) -> None:
        """From the store of ``commit.done`` on, ``state`` is the state."""
        self._settle()  # a commit before this one is done, but an interrupt came before its end_commit
        self._next = state, commit

    def end_commit(self) -> None:
        """The commit that ``prepare`` named is done: no reservation is open."""
        self._settle()
        self._open = None

    def _settle(self) -> None:
        """Take over the state of a commit that is done, or forget a commit that was given up. Under the lock."""
        if self._next is not None:
            self._settled = self.state
            self._next = None

    def _shrink(self, lengths: tuple[int, ...], closed: bool = False) -> None:
        """Give up the tokens beyond ``lengths`` and the pages that no layer needs any more."""
        self._settle()
        pages, before, _, largest, given_up = self._settled
        kept = self.pool.pages_for(max(lengths))
        after = State(pages[:kept], lengths, closed, largest, given_up or lengths != before)
        if not kept:
            after = State((), lengths, closed)
        if kept == len(pages):
            self._settled = after
            return
        counts = self.pool.begin_update()
        self._settled = after
        counts.release(reversed(pages[kept:]))
        self.pool.end_update(counts)
