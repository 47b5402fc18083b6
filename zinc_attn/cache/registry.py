"""Weak references to living objects, in a container that an interrupt cannot leave half changed.

``weakref.WeakSet`` is written in Python: Ctrl-C within it can lose a removal for good. Here each change is one call
into C, and the death of an object is noted by a callback without bytecode, so neither an interrupt nor a finalizer that
is cut short can hide it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """The living objects that were added and not discarded, in no particular order.

    dead: references to objects that were collected since the last ``purge``, which the owner calls now and then;
    whoever wants to hear of the death of another object may let its weak reference call ``dead.append``.
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
        """Drop the references to what was collected, and empty ``dead``. Serialized with ``add`` and ``discard``."""
        self.dead.clear()
        self._references = {reference for reference in self._references if reference() is not None}

    def __iter__(self) -> Iterator[T]:
        for reference in tuple(self._references):  # tuple() copies the set in one call into C
            if (item := reference()) is not None:
                yield item
