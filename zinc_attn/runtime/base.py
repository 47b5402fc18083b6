"""The part of a runtime that is the same on every dispatcher: who may call, and which buffers it takes."""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from ..errors import ArgumentError, ClosedError, ForkedProcessError, ZincAttnError
from ..kernels.records import Words
from .protocol import DeviceInfo, Use
from .refusals import no_host_memory, output_words, write_words


class OwnedBuffer(Protocol):
    """A runtime's buffer. view: what the host sees of it, if anything."""

    runtime: Any
    nbytes: int
    use: Use

    @property
    def closed(self) -> bool: ...
    @property
    def view(self) -> Words | None: ...
    def close(self) -> None: ...


class OwnedRecording(Protocol):
    runtime: Any

    @property
    def closed(self) -> bool: ...


B = TypeVar("B", bound=OwnedBuffer)
R = TypeVar("R", bound=OwnedRecording)
P = ParamSpec("P")
S = TypeVar("S", bound="RuntimeBase[Any, Any]")
T = TypeVar("T")


def entered(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method of a runtime under its lock, in the process that opened it, while it is open and not lost."""

    @functools.wraps(method)
    def entered(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if os.getpid() != self.pid:
            raise ForkedProcessError(f"{self.info.name}: opened before fork(); open a Device in the child process")
        with self.lock:
            self.check_open()
            try:
                return method(self, *args, **kwargs)
            except MemoryError as error:
                if isinstance(error, ZincAttnError):
                    raise
                raise no_host_memory(self.info) from error

    return entered


class RuntimeBase(Generic[B, R]):
    """The methods of the protocol's Runtime, and the checks of its objects, that all dispatchers share."""

    buffer_type: type[B]
    recording_type: type[R]

    def __init__(self, info: DeviceInfo) -> None:
        self.info, self.pid, self.lock = info, os.getpid(), threading.RLock()

    def check_open(self) -> None:
        """Refuse a call on a runtime that was closed or lost."""
        raise NotImplementedError

    @entered
    def write(self, buffer: object, data: Words, offset: int = 0) -> None:
        target = self.own_buffer(buffer)
        write_words(target, target.view, data, offset)

    @entered
    def read(self, buffer: object) -> Words:
        return self.peek(buffer).copy()

    @entered
    def peek(self, buffer: object) -> Words:
        source = self.own_buffer(buffer)
        return output_words(source, source.view)

    def own_buffer(self, buffer: object, name: str = "buffer") -> B:
        """``buffer`` if it is an open buffer of this runtime, else a refusal."""
        if not isinstance(buffer, self.buffer_type) or buffer.runtime is not self:
            raise ArgumentError(f"{name}: got {buffer!r}, expected a buffer of this runtime")
        if buffer.closed:
            raise ClosedError(f"{name}: the {buffer.use.value} buffer of {buffer.nbytes} bytes was closed")
        return buffer

    def own_recording(self, recording: object) -> R:
        """``recording`` if it is an open recording of this runtime, else a refusal."""
        if not isinstance(recording, self.recording_type) or recording.runtime is not self:
            raise ArgumentError(f"recording: got {recording!r}, expected a recording of this runtime")
        if recording.closed:
            raise ClosedError("recording: it, or a buffer that it uses, was closed")
        return recording
