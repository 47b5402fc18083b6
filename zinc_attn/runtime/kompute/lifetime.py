"""When kp's objects may be destroyed.

kp's destructors free what the device may still use, and wait for threads of the driver. So where nothing shows that the
last submission finished, and in a forked child, which has none of these threads, kp's objects are kept for good.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

SETTLE_S: Final = 2.0  # how long a failed submission is waited for
_WAIT_NS: Final = 100_000_000  # one wait of these; kp takes 32 bits
_DEVICE_LOST: Final = -4  # VK_ERROR_DEVICE_LOST
_RESULT: Final = re.compile(r"zinc_attn: (vk\w+): VkResult (-?\d+)")  # scripts/lib/kp_checked.hpp writes it


def vulkan_error(error: Exception) -> tuple[str, int] | None:
    """The Vulkan function and its VkResult where an exception of kp names them."""
    found = _RESULT.search(str(error))
    return (found[1], int(found[2])) if found else None


class Lifetime:
    """Whether the kp objects of a runtime may be destroyed, or are kept for good."""

    kept = False

    def keep(self, objects: Iterable[Any]) -> None:
        """Keep ``objects`` for good; the first call is given all there are, and later ones do nothing."""
        if not self.kept:
            self.kept = True
            for item in objects:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def has_finished(sequence: Any, probe: Callable[[], Any]) -> bool:
    """Whether something shows, within SETTLE_S, that nothing of what was submitted runs.

    Asked are the sequence's own fence and that of ``probe``, which makes one more submission and returns its sequence:
    its fence signals after all earlier ones.
    """
    waits, end, result = [sequence], time.monotonic() + SETTLE_S, 0
    while time.monotonic() < end:
        for wait in waits:
            try:
                wait.eval_await(_WAIT_NS)
                return True
            except RuntimeError as error:
                found = vulkan_error(error)
                result = found[1] if found else 0
        if len(waits) == 1:
            with suppress(RuntimeError, MemoryError):
                waits.append(probe())
        time.sleep(0.01)  # a wait that fails returns at once
    # The specification: what is in use on a lost device is in use no more once a wait has returned this.
    return result == _DEVICE_LOST
