"""The facts of this machine's processor as a device."""

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...kernels.declarations import GRID_SIDE
from ...kernels.families import CPU
from ..protocol import DeviceInfo
from .library import cpu_facts, no_compiler

NAME: Final = "cpu"
_VENDORS: Final = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}


def memory_bytes() -> tuple[int, int]:
    """(bytes, free bytes) of the host's memory."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.M)
        if match:
            return size, int(match[1]) << 10
    return size, size


def threads() -> int:
    """Threads that this process may run at a time."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_info(index: int) -> DeviceInfo:
    """The processor as device ``index`` of a list."""
    facts = cpu_facts()
    return DeviceInfo(
        index=index,
        name=NAME,
        kind="cpu",
        vendor=_VENDORS.get(facts.get("vendor_id", ""), platform.machine()),
        driver=f"native code, {facts.get('model name', platform.machine())}",
        api_version="",
        uuid="",
        compute_units=threads(),
        compute_units_source="CPU threads of this process",
        subgroup_size=CPU.lanes,
        memory_bytes=memory_bytes()[0],
        max_buffer_bytes=(1 << 32) - 4,
        max_workgroups=(GRID_SIDE, GRID_SIDE, GRID_SIDE),
        timestamp_period_ns=1.0,
        layout=CPU,
        refusal=no_compiler(),
        native=True,
    )
