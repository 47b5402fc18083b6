"""Containers of living objects that an interrupt cannot leave half changed.

Python reports an interrupt in a weak reference's callback, or in a finalizer, and does not raise it: the user's Ctrl-C
would be lost, and the callback's work undone. ``weakref``'s containers have such callbacks, in Python. Here each change
and each callback is one call into C: no bytecode runs where an object dies.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The living objects that were added and not discarded, in no particular order.

    dead: references to objects that were collected since the last ``purge``, which the owner calls now and then. Weak
    references to other objects may call ``dead.append``, too.
    """

    def __init__(self) -> None:
        self._references: set[weakref.ReferenceType[T]] = set()
        self.dead: deque[weakref.ReferenceType[Any]] = deque()

    def add(self, item: T) -> None:
        """Register ``item`` until it is discarded or collected."""
        self._references.add(weakref.ref(item, self.dead.append))

    def discard(self, item: T) -> None:
        """Forget ``item``; nothing happens where it is not registered."""
        self._references.discard(weakref.ref(item))  # references to one living object are equal

    def purge(self) -> None:
        """Drop the references to what was collected, and empty ``dead``."""
        if self.dead:
            self.dead.clear()
            for reference in tuple(self._references):  # tuple() copies the set in one call into C
                if reference() is None:
                    self._references.discard(reference)

    def __iter__(self) -> Iterator[T]:
        for reference in tuple(self._references):
            if (item := reference()) is not None:
                yield item


class _Tie(weakref.ref[Any]):
    """A weak reference that is equal to itself alone, also where the objects of two are equal."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Keeper:
    """Keeps the things that an object needs and does not own, until the object is collected."""

    def __init__(self) -> None:
        self._kept: dict[_Tie, tuple[Any, ...]] = {}

    def keep(self, item: Any, *needed: Any) -> None:
        """Keep ``needed`` as long as ``item`` lives."""
        self._kept[_Tie(item, self._kept.pop)] = needed  # the callback, too, is one call into C
