"""Recordings that are submitted together: ``Device.together``."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ZincAttnError
from .protocol import Recording, Runtime


class DeviceSubmission:
    """Recordings of one submission, which is made by ``send``, or before its first result is read."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recordings: list[Recording] = []
        self._sent = False
        self._failure: Callable[[], ZincAttnError] | None = None

    def add(self, recording: Recording) -> None:
        """Submit ``recording`` with the others."""
        self._recordings.append(recording)

    def send(self) -> None:
        """Submit; a second call does nothing, or raises the error of the first. After Ctrl-C it may be made again."""
        if self._failure is not None:
            raise self._failure()
        if self._recordings and not self._sent:
            try:
                self._runtime.start(*self._recordings)
            except ZincAttnError as error:
                kind, text = type(error), str(error)
                self._failure = lambda: kind(text)  # the error itself holds frames, and what their calls were given
                raise
        self._sent = True

    @property
    def open(self) -> bool:
        """Whether it can take more recordings."""
        return not self._sent and self._failure is None
