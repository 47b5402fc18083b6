"""The Kompute dispatcher: what its import leaves alone, and which interrupts lose the device."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support import open_device

from zinc_attn.errors import DeviceLostError


class Interrupted:
    """A kp.Sequence for which Ctrl-C arrives as ``eval`` returns. running: it says that it has not ended yet."""

    def __init__(self, sequence: Any, running: bool) -> None:
        self.sequence, self.running = sequence, running

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sequence, name)

    def eval(self) -> None:
        self.sequence.eval()
        raise KeyboardInterrupt

    def is_running(self) -> bool:
        return self.running or self.sequence.is_running()


@pytest.mark.parametrize("running", (False, True))
def test_an_interrupt_right_after_eval(running):
    with open_device("default", "kompute") as device:
        runtime: Any = device.runtime
        hit, other = runtime.record([]), runtime.record([])
        hit.sequences[0] = Interrupted(hit.sequences[0], running)
        with pytest.raises(KeyboardInterrupt):
            runtime.run(hit)
        for call in (lambda: runtime.run(other), runtime.empty_submit):
            if running:
                with pytest.raises(DeviceLostError):
                    call()
            else:
                call()


def test_importing_kp_leaves_the_programs_logging_alone():
    pytest.importorskip("kp")
    program = "import logging, kp; assert not logging.getLogger().handlers"
    subprocess.run([sys.executable, "-c", program], check=True)
