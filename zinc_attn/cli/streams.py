"""The standard streams of a command: what happens where stdout or stderr is full, closed or has lost its reader.

Results go to stdout: where it does not take them the command ends with ``Unwritable``, whose ``status`` is that of the
process. Everything else goes to stderr: what that does not take is lost, and changes no status.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TextIO, cast

EX_IOERR: Final = 74  # of sysexits.h
NO_READER: Final = 141  # of a process that SIGPIPE ends, as a shell counts it


class Unwritable(Exception):
    """stdout does not take the results. status: of the process."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout cannot be written: {error.strerror or error}; the results are incomplete")
        self.status = NO_READER if isinstance(error, BrokenPipeError) else EX_IOERR


class Output:
    """A text stream, None for a closed one, that hands each failure of a write or a flush to ``failed``."""

    def __init__(self, stream: TextIO | None, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write; the stream's encoding replaces what it lacks."""
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if self._stream is not None:
            self._call("flush")

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self._stream is not None and self._stream.isatty()

    def _call(self, name: str, *text: str) -> None:
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            getattr(self._stream, name)(*text)
        except OSError as error:
            self._discard()
            self._failed(error)

    def _discard(self) -> None:
        """Send what is still buffered nowhere, so that the interpreter's own flush at its end does not fail."""
        if self._stream is None:
            return
        with suppress(OSError, ValueError):  # a stream without a file descriptor buffers nothing
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _unwritable(error: OSError) -> None:
    raise Unwritable(error) from error


def _keep_descriptors() -> None:
    """Hold descriptors 0 to 2 where they are closed, so that no file that is opened later becomes a standard stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least free descriptor


@contextmanager
def guarded_streams() -> Iterator[None]:
    """stdout and stderr as this module describes them, which replace characters that their encodings lack."""
    _keep_descriptors()
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, Output(before[0], _unwritable))
    sys.stderr = cast(TextIO, Output(before[1], lambda _: None))
    try:
        yield
    finally:
        with suppress(Unwritable):  # main has flushed stdout; this is what an error left there
            sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
