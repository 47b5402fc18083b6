"""Buffers and recordings: objects that own Vulkan handles, and when the handles are destroyed."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from ...kernels.records import Words
from ..protocol import Dispatch, Use
from ..registry import Registry
from .device import LogicalDevice, Undo, destroy
from .queue import ComputeQueue


class _Tie(weakref.ref["Owned"]):
    """A weak reference that knows its object's key when the object is gone."""

    __slots__ = ("key",)
    key: int


class _RuntimeTie(weakref.ref[Any]):
    """A weak reference to a runtime that knows its handles when the runtime is gone."""

    __slots__ = ("handles",)
    handles: Handles


_runtimes: Final[set[_RuntimeTie]] = set()  # references to open runtimes
collected: Final[deque[_RuntimeTie]] = deque()  # references to runtimes that were dropped without being closed


def close_collected() -> None:
    """Destroy the handles of runtimes that were dropped without being closed."""
    for tie in tuple(collected):
        if os.getpid() == tie.handles.pid:
            tie.handles.close()
        with suppress(ValueError):  # another thread was faster
            collected.remove(tie)


class Handles:
    """The handles of living objects, destroyed once: at close(), with the device, or after a drop.

    A callback without bytecode, which Ctrl-C cannot cut short, notes the death of an object. Finalizers run anywhere,
    also within a call, so the next call destroys the handles (``purge``). Handles that a submission may use are left
    to ``clear``. dropped: objects that ``purge`` releases.
    """

    def __init__(self, device: LogicalDevice, queue: ComputeQueue, lock: threading.RLock, runtime: object) -> None:
        self.device, self.queue, self.lock = device, queue, lock
        self.closed = False
        self.pid = os.getpid()
        self.undo: dict[int, Undo] = {}  # per open object; below 0: closed while it may be in use
        self._keys = itertools.count(1)
        self._ties: dict[int, _Tie] = {}
        self.dropped: deque[_Tie] = deque()
        self._runtime = _RuntimeTie(runtime, collected.append)
        self._runtime.handles = self
        _runtimes.add(self._runtime)

    def add(self, owned: Owned) -> int:
        """A key for a new object, with an empty undo list."""
        key = next(self._keys)
        self.undo[key] = []
        tie = _Tie(owned, self.dropped.append)
        tie.key = key
        self._ties[key] = tie
        return key

    @contextmanager
    def making(self, owned: Owned) -> Iterator[Undo]:
        """The undo list of an object under construction, which is closed if that fails."""
        try:
            yield self.undo[owned.key]
        except BaseException:
            self.release(owned.key)
            raise

    def release(self, key: int) -> None:
        """Destroy an object's handles; while a submission may use them, leave them to ``clear``."""
        self._ties.pop(key, None)
        undo = self.undo.pop(key, [])
        if self.device.is_gone():
            undo.clear()
        elif self.queue.in_flight and undo:
            self.undo[-next(self._keys)] = undo
        else:
            destroy(undo)

    def purge(self) -> None:
        """Release the objects that were dropped since the last call, also those of other runtimes."""
        close_collected()
        while self.dropped:
            self.release(self.dropped.popleft().key)

    def clear(self) -> None:
        """Destroy everything, the youngest first."""
        for key in reversed(list(self.undo)):
            self.release(key)

    def close(self) -> None:
        """Destroy everything, and the device; a second call does nothing. See ``VulkanRuntime.close``."""
        with self.lock:
            _runtimes.discard(self._runtime)
            if self.closed:
                return
            self.closed = True
            # a host program has destroyed it, or the driver may still use it
            if self.device.is_gone() or (self.queue.in_flight and not self.queue.is_idle()):
                self._ties.clear()
                self.undo.clear()
                self.device.undo.clear()
                return
            self.queue.in_flight = False
            self.clear()
            destroy(self.device.undo)


class Owned:
    """Vulkan handles, destroyed once: by close(), by the runtime's close(), or after it was dropped.

    runtime: kept alive, since it destroys them.
    """

    def __init__(self, handles: Handles, runtime: object) -> None:
        self._handles, self.runtime = handles, runtime
        self.key = handles.add(self)

    @property
    def closed(self) -> bool:
        """Whether its handles are gone."""
        return self.key not in self._handles.undo

    def close(self) -> None:
        """Free it; a second call, or one in a forked child, does nothing."""
        handles = self._handles
        if os.getpid() == handles.pid:
            with handles.lock:
                if handles.queue.in_flight and not (handles.device.lost or handles.device.is_gone()):
                    handles.queue.settle()  # where that fails, the next call says so
                handles.release(self.key)


class VulkanBuffer(Owned):
    """A storage buffer of ``nbytes`` bytes. Closing it closes the recordings that use it."""

    def __init__(self, handles: Handles, runtime: object, nbytes: int, use: Use) -> None:
        super().__init__(handles, runtime)
        self.nbytes, self.use = nbytes, use
        self.handle: Any = None
        self.view: Words | None = None  # (nbytes / 4,) mapped memory
        self.users: Registry[VulkanRecording] = Registry()

    def close(self) -> None:
        for recording in self.users:
            recording.close()
        self.view = None
        super().close()


class VulkanRecording(Owned):
    """A command buffer recorded once, with its descriptor sets and, where asked for, its timestamps."""

    def __init__(self, handles: Handles, runtime: object, steps: tuple[Dispatch, ...]) -> None:
        super().__init__(handles, runtime)
        self.steps = steps  # keeps the buffers alive
        self.commands: Any = None  # for the queue's send
        self.queries: Any = None
        self.cold = True  # until its first run
        self.ran = False  # whether the last run finished
