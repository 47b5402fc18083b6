"""The pages and the token counts of one sequence: reserving for an append, forking, and giving tokens up.

See ``pages`` for the invariants, and for how an interrupt between any two bytecodes leaves a call done or not done.
"""

from __future__ import annotations

import weakref

from ..checks import check_int
from ..errors import ClosedError, LimitError
from ..limits import MAX_CONTEXT
from .pages import CapacityError, PagePool, StepError
from .reservation import Commit, Reservation

State = tuple[tuple[int, ...], tuple[int, ...], bool]  # page ids in token order, tokens of each layer, whether freed


class SequencePages:
    """The block table and the layers' token counts of one sequence.

    pages: page ids in token order; lengths: tokens of each layer; both are copies.
    A sequence that is garbage collected gives its pages back.
    """

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self.pool = pool
        self._settled: State = (), (0,) * check_int("num_layers", num_layers, 1), False
        self._next: tuple[State, Commit] | None = None  # the state from when on the commit is made
        self._open: weakref.ReferenceType[Reservation] | None = None
        pool.sequences.add(self)

    def __len__(self) -> int:
        """Tokens that every layer has."""
        return min(self.state[1])

    def __bool__(self) -> bool:
        """True: an empty sequence is still a sequence."""
        return True

    @property
    def state(self) -> State:
        """The page ids, the tokens of each layer and whether ``free`` was called, of one moment."""
        following = self._next  # read before _settled: whoever settles writes them in the other order
        return following[0] if following is not None and following[1].made else self._settled

    @property
    def table(self) -> tuple[int, ...]:
        """The page ids in token order. The same object as long as the table does not change."""
        return self.state[0]

    @property
    def pages(self) -> list[int]:
        """The page ids in token order."""
        return list(self.state[0])

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

    @property
    def in_step(self) -> bool:
        """Whether all layers have the same number of tokens."""
        lengths = self.state[1]
        return min(lengths) == max(lengths)

    def check_open(self) -> None:
        """ClosedError after ``free``."""
        if self._settled[2]:
            raise ClosedError("sequence: used after free()")

    def check_idle(self) -> None:
        """ClosedError after ``free``, StepError while a reservation is open."""
        self.check_open()
        if other := self.open_reservation():
            raise StepError(
                f"sequence: a reservation of {other.count} tokens of layer {other.layer} is open; commit() or "
                "rollback() it first"
            )

    def check_in_step(self, what: str) -> None:
        """StepError, which names the call, unless all layers have as many tokens."""
        if not self.in_step:
            lengths = self.state[1]
            low, high = min(lengths), max(lengths)
            raise StepError(
                f"{what}: layer {lengths.index(high)} has length {high}, layer {lengths.index(low)} has length "
                f"{low}, expected equal lengths; append to every layer first, or truncate({low})"
            )

    def reserve(self, layer: int, count: int, also: tuple[int, ...] = ()) -> Reservation:
        """Hold what appending ``count`` tokens (at least 1) to ``layer`` needs; nothing else changes until commit.

        also: further layers, of the same length, to which the same commit appends as many.
        Where all layers have the same length, any layer may append any count. Otherwise a step is under way: the
        layers behind append exactly the count that the layers ahead did, and those wait.
        StepError: out of step, or another reservation is open; CapacityError: too few free pages; LimitError:
        beyond 2**24 tokens; ArgumentError: no such layer; ClosedError: freed.
        Sequences that append in one batch and share a page each need a page for their copy, the last one included.
        """
        self.check_idle()
        pages, lengths, _ = self.state
        layer = check_int("layer", layer, 0, len(lengths) - 1)
        count = check_int("count", count, 1)
        start = self._check_step(lengths, layer, count, also)
        pool = self.pool
        copy = start % pool.page_size > 0 and pool.is_shared(pages[-1])  # within a step it is no longer shared
        reservation = Reservation(self, layer, count, len(pages) - copy, also)
        need = pool.pages_for(start + count) - len(pages) + copy
        if need == 0:
            self._open = weakref.ref(reservation)
            return reservation
        free = len(pool.books().free)
        if need > free:
            room = max(0, (len(pages) - copy + free) * pool.page_size - start)
            raise CapacityError(
                f"k: got {count:,} tokens at length {start:,}, expected at most {room:,}: {free:,} of "
                f"{pool.num_pages:,} pages of {pool.page_size:,} tokens are free (capacity = {pool.asked:,}, in whole "
                "pages); truncate() or free() a sequence, or make the cache with a larger capacity"
            )
        try:
            books = pool.take_books()
            reservation.hold(books.take(need))
            self._open = weakref.ref(reservation, pool.sequences.dead.append)  # from here on they are held
            pool.put_books(books)
            return reservation
        except BaseException:
            pool.lose_books()
            reservation.give_up()
            raise

    @staticmethod
    def _check_step(lengths: tuple[int, ...], layer: int, count: int, also: tuple[int, ...]) -> int:
        """Where ``count`` tokens of ``layer`` begin; StepError, LimitError: see ``reserve``."""
        start, low, high = lengths[layer], min(lengths), max(lengths)
        for at, other in enumerate(also):
            if lengths[check_int("also", other, 0, len(lengths) - 1)] != start or other in (layer, *also[:at]):
                raise StepError(
                    f"also: got layer {other} at length {lengths[other]}, expected layers other than {layer} of its "
                    f"length {start}, each once; append to every layer first, or truncate({low})"
                )
        if start == high > low:
            behind = lengths.index(low)
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected none yet, layer {behind} has length "
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
            books = self.pool.take_books()
            child._settled = self.state  # from here on it holds them
            books.share(child._settled[0])
            self.pool.put_books(books)
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

        StepError where a page of the tokens given up is shared: they are the other sequence's too, so no append of this
        one alone can be undone, and the layer's next rows would go there.
        """
        self.check_idle()
        pages, lengths, _ = self.state
        n = check_int("n", n, 0, lengths[check_int("layer", layer, 0, self.num_layers - 1)])
        given_up = pages[n // self.pool.page_size : self.pool.pages_for(lengths[layer])]
        if n < lengths[layer] and any(self.pool.is_shared(page) for page in given_up):
            raise StepError(
                f"retract: layer {layer} has length {lengths[layer]} and shares pages with another sequence from "
                f"token {n} on, expected an append behind what they share; truncate({n}) cuts every layer"
            )
        self._shrink((*lengths[:layer], n, *lengths[layer + 1 :]))

    def free(self) -> None:
        """Give up every page and roll an open reservation back; a second call does nothing."""
        if reservation := self.open_reservation():
            reservation.rollback()
        self._shrink((0,) * self.num_layers, True)

    def open_reservation(self) -> Reservation | None:
        """The reservation that is neither committed nor rolled back, where there is one."""
        reservation = self._open() if self._open else None
        return reservation if reservation and reservation.state == "open" else None

    def prepare(self, state: State, commit: Commit) -> None:
        """From the store of ``commit.made`` on, ``state`` is the state."""
        self._settle()  # a commit before this one was made, but an interrupt came before its end_commit
        self._next = state, commit

    def end_commit(self) -> None:
        """The commit that ``prepare`` named was made: no reservation is open."""
        self._settle()
        self._open = None

    def _settle(self) -> None:
        """Forget a commit that was made, or was given up, under the lock; reading needs no such step."""
        if self._next is not None:
            self._settled = self.state
            self._next = None

    def _shrink(self, lengths: tuple[int, ...], closed: bool = False) -> None:
        """Give up the tokens beyond ``lengths`` and the pages that no layer needs any more."""
        self._settle()
        pages = self._settled[0]
        kept = self.pool.pages_for(max(lengths))
        if kept == len(pages):
            self._settled = pages, lengths, closed
            return
        books = self.pool.take_books()
        self._settled = pages[:kept], lengths, closed
        books.release(reversed(pages[kept:]))
        self.pool.put_books(books)
