"""An interrupt before any bytecode, or two, leaves a call on page tables done or not done, and loses no page."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupts import files
from page_tables import Append, append, check_counts, interrupt_everywhere

import zinc_attn as za
from zinc_attn.cache.pages import PagePool
from zinc_attn.cache.rows import NO_ROWS
from zinc_attn.cache.sequence_pages import SequencePages, State
from zinc_attn.cache.transaction import Transaction
from zinc_attn.runtime.registry import Keeper, Registry

WHERE = files("cache/pages.py", "cache/sequence_pages.py", "cache/transaction.py", "runtime/registry.py")


KEPT: list[Transaction] = []  # one that dies would make the pool count its pages again


def _with(seq: SequencePages, fail: bool = False) -> None:
    with Append(seq, 0, 30) as reservation:
        KEPT[:] = [reservation]
        assert reservation.place.copies
        if fail:
            reservation.rollback()


def _batch(*seqs: SequencePages) -> None:
    """Both lengths count, or neither, and a second commit counts no row twice."""
    with Transaction() as transaction:
        copies = [transaction.reserve(seq, 0, 30).copies for seq in seqs]
        assert list(map(len, copies)) == [1, 0]
        transaction.commit()


def _keep(seq: SequencePages) -> None:
    with Transaction() as transaction:
        place = transaction.rewrite(seq, 12, 20)
        assert (place.copies, place.lengths, len(place.replaced)) == ([(0, 3)], (32, 32), 3)


def _dropped(seq: SequencePages) -> None:
    """A sequence and a reservation that die, and the next call that must notice."""
    Append(seq.fork(), 0, 30)
    Append(seq, 0, 1).rollback()


INTERRUPTED: dict[str, Callable[[SequencePages, SequencePages], object]] = {
    "reserve": lambda seq, fork: Append(fork, 0, 30),
    "commit": lambda seq, fork: _with(fork),
    "all layers": lambda seq, fork: Append(fork, 1, 30, (0,)).commit(),
    "within a page": lambda seq, fork: Append(seq, 1, 7).commit(),
    "behind an interrupted commit": lambda seq, fork: Append(seq, 0, 30).commit(),
    "rollback": lambda seq, fork: _with(fork, fail=True),
    "batch": _batch,
    "keep": lambda seq, fork: _keep(fork),
    "truncate": lambda seq, fork: seq.truncate(10),
    "retract": lambda seq, fork: seq.retract(0, 40),
    "fork": lambda seq, fork: seq.fork(),
    "free": lambda seq, fork: seq.free(),
    "dropped": lambda seq, fork: _dropped(seq),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_at_any_bytecode_leaves_a_call_done_or_not_done(name: str) -> None:
    def world() -> list[SequencePages]:
        seq = SequencePages(PagePool(12, 16), 2)
        append(seq, 40)
        fork = seq.fork()
        if name in ("within a page", "retract", "behind an interrupted commit"):  # within a step, on its own page
            Append(seq, 0, 7).commit()
        if name == "behind an interrupted commit":  # which was made, and whose end did not come
            change = Append(seq, 1, 7)
            seq.prepare(State(change.place.table, change.place.lengths, False, NO_ROWS, False), change.mark)
            change.mark.done = True
        return [seq, fork]

    def seen(seqs: list[SequencePages]) -> Any:
        return [(sequence.lengths, sequence.table, sequence.closed) for sequence in seqs]

    def check(seqs: list[SequencePages]) -> None:
        pool, live = seqs[0].pool, [sequence for sequence in seqs if not sequence.closed]
        check_counts(pool, live)
        for sequence in live:
            if transaction := sequence.open_transaction():  # whose rollback was cut short; the next call repeats it
                transaction.rollback()
        assert pool.num_pages - pool.free_pages == len({page for twin in live for page in twin.table})
        for sequence in live:  # and it goes on: back in step, then a token
            sequence.truncate(len(sequence))
            append(sequence, 1)
        check_counts(pool, live)
        for sequence in seqs:
            sequence.free()
        assert pool.free_pages == 12
        check_counts(pool, [])

    assert interrupt_everywhere(WHERE, world, INTERRUPTED[name], seen, check) > 30


# --- where an object dies no bytecode runs: Python would report a Ctrl-C there, and not raise it --------------

PACKAGE = Path(za.__file__).parent
IN_PYTHON = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakMethod", "finalize", "__del__"}


def test_callbacks_are_methods_of_c():
    """A weak reference calls ``append`` of a deque or ``pop`` of a dict, and nothing has a finalizer."""
    called = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "name", None)}
            assert not names & IN_PYTHON, (path, node)
            if isinstance(node, ast.Call) and len(node.args) == 2:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "ref" or name.endswith("Tie"):
                    called.add(getattr(node.args[1], "attr", path))
    assert called == {"append", "pop"}


class Thing:
    """Something that dies."""


def test_what_is_kept_goes_with_what_needs_it():
    keeper, registry, item, needed = Keeper(), Registry[Thing](), Thing(), Thing()
    for thing in (item, needed):
        registry.add(thing)
    keeper.keep(item, needed)
    del thing, needed
    assert len([*registry]) == 2
    del item
    assert not [*registry] and not keeper._kept
    registry.purge()
    assert not registry._references and not registry.dead
