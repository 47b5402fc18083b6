"""A line in the log where a driver compiles for long, which explains why a first call takes long."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from .protocol import DeviceInfo
from .refusals import address_space

LONG_S: Final = 2.0  # a longer compilation is logged
_LOG: Final = logging.getLogger("zinc_attn")  # where the host program sets up no logging, warnings go to stderr


def tell(info: DeviceInfo, kernels: Iterable[str]) -> None:
    """Log that the caller waits for these kernels."""
    text = "%s: waiting for %s, which the driver compiles before the first run: once, and for up to a minute"
    _LOG.warning(text, info.name, ", ".join(sorted(kernels)))


@contextmanager
def telling(info: DeviceInfo, kernel: str) -> Iterator[None]:
    """``tell`` once of ``kernel`` if the block, a call into the driver, takes longer than LONG_S."""
    timer = threading.Timer(LONG_S, tell, (info, [kernel]))
    timer.daemon = True
    try:
        if address_space(info) is None:  # under a limit, a CPU driver's compiler needs the thread's memory
            with suppress(RuntimeError):  # a process that may have no more threads compiles in silence
                timer.start()
        yield
    finally:
        timer.cancel()
