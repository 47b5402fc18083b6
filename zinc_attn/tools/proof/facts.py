"""What a report says of the device, of this package and of the machine. Each field is chosen; none names a person."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ...errors import KernelError
from ...runtime.device import build_record
from ...runtime.protocol import DeviceInfo

_LEFT_OUT: Final = ("index", "uuid")  # the one holds here alone, the other can identify a card
# Variables that change what a driver does, and so what is measured. No others are reported.
DRIVER_SETTINGS: Final = (
    *("RADV_DEBUG", "RADV_PERFTEST", "AMD_DEBUG", "ACO_DEBUG", "AMD_VULKAN_ICD", "INTEL_DEBUG", "ANV_DEBUG"),
    *("LP_NUM_THREADS", "LP_NATIVE_VECTOR_WIDTH", "MESA_SHADER_CACHE_DISABLE", "MESA_VK_DEVICE_SELECT"),
    *("VK_LOADER_LAYERS_ENABLE", "VK_INSTANCE_LAYERS", "ZINC_ATTN_DEVICE", "ZINC_ATTN_RUNTIME"),
)


def device_facts(info: DeviceInfo, pci: str | None) -> dict[str, Any]:
    """Every field of the device but its index and its UUID, and its PCI address, None where no query tells."""
    return {name: value for name, value in asdict(info).items() if name not in _LEFT_OUT} | {"pci": pci}


def package_facts() -> dict[str, Any]:
    """The version, and what the SPIR-V was built with and from; None where it was not built."""
    try:
        built = build_record()
        spirv = {name: built[name] for name in ("compiler", "sources_sha256")}
    except KernelError:
        spirv = None
    return {"zinc_attn": __version__, "spirv": spirv}


def machine_facts() -> dict[str, Any]:
    """The operating system, the CPU, and the settings of drivers that are set."""
    settings = {name: os.environ[name] for name in DRIVER_SETTINGS if name in os.environ}
    return {
        "system": f"{_distribution()}, {platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_threads": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "driver_settings": settings,
    }


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    except OSError:
        return "unknown distribution"


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or "unknown"
