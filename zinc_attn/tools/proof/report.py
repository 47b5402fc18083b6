"""The report of a proof as one JSON object: facts, steps, bits, points and sensors, scrubbed of names and folders."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ...errors import KernelError
from ...runtime.device import build_record
from ..cost import card_of_device, prediction_compilers
from .privacy import Scrubber
from .results import bench_summary, bits_summary, sweep_summary
from .sensors import Reading, Sensors
from .spec import ProofSpec
from .steps import StepResult

FORMAT: Final = 1  # of report.json
FINISHED: Final = "finished"
_LEFT_OUT: Final = ("index", "uuid")  # of the device: the one holds here alone, the other can identify a card
# Variables that change what a driver does, and so what is measured. No others are reported.
DRIVER_SETTINGS: Final = (
    *("RADV_DEBUG", "RADV_PERFTEST", "AMD_DEBUG", "ACO_DEBUG", "AMD_VULKAN_ICD", "INTEL_DEBUG", "ANV_DEBUG"),
    *("LP_NUM_THREADS", "LP_NATIVE_VECTOR_WIDTH", "MESA_SHADER_CACHE_DISABLE", "MESA_VK_DEVICE_SELECT"),
    *("VK_LOADER_LAYERS_ENABLE", "VK_INSTANCE_LAYERS", "ZINC_ATTN_DEVICE", "ZINC_ATTN_RUNTIME"),
)


@dataclass(frozen=True)
class Setting:
    """What a report says beside the steps. sensors: those of the machine; first: what they read before all steps."""

    spec: ProofSpec
    pci: str | None
    sensors: Sensors
    first: Sequence[Reading]
    scrubber: Scrubber


def make_report(setting: Setting, results: Sequence[StepResult], ended: str) -> dict[str, Any]:
    """The report of the steps that have run.

    ended: ``FINISHED``, or why there are fewer steps than planned. passed: all steps ran and are ok, and the digests
    of all restarts agree. card: which one the model timed, what it was chosen by, and what is assumed of it; it, and
    what rests on it, is None for a CPU device. sensors: whether they are those of the device, what cannot be read, and
    the values before all steps.
    """
    info, sensors, first = setting.spec.info, setting.sensors, setting.first
    card = card_of_device(info.name, info.kind, info.compute_units)
    bits, planned = bits_summary(results), len(setting.spec.steps())
    well = len(results) == planned and all(one.status == "ok" for one in results)
    report = {
        "format": FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ended": ended,
        "passed": bool(ended == FINISHED and well and bits["agree"]),
        "zinc_attn": __version__,
        "spirv": _spirv(),
        "arguments": setting.spec.to_dict(),
        "device": {k: x for k, x in asdict(info).items() if k not in _LEFT_OUT} | {"pci": setting.pci},
        "machine": machine_facts(),
        "card": card
        and {"title": card.card.title, "by": card.by, "source": card.card.source, "assumed": list(card.card.assumed)},
        "compiler": dict(prediction_compilers()),
        "steps_planned": planned,
        "steps": [one.to_dict() for one in results],
        "bits": bits,
        "sweep": sweep_summary(results, card),
        "bench": bench_summary(results, card),
        "sensors": {
            "matched_by_pci": sensors.matched(first),
            "absent": sensors.absent(first),
            "before_all": [one._asdict() for one in first],
        },
    }
    found: dict[str, Any] = setting.scrubber.value(report)
    return found


def machine_facts() -> dict[str, Any]:
    """The operating system, the CPU, and the settings of drivers that are set. None of it names a person."""
    release, cpu = {}, None
    with suppress(OSError):
        release = platform.freedesktop_os_release()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {
        "system": f"{release.get('PRETTY_NAME', 'unknown distribution')}, {system}",
        "cpu": cpu[1].strip() if cpu else platform.processor() or "unknown",
        "cpu_threads": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "driver_settings": {name: os.environ[name] for name in DRIVER_SETTINGS if name in os.environ},
    }


def _spirv() -> dict[str, Any] | None:
    """What the SPIR-V was built with and from; None where it was not built."""
    try:
        built = build_record()
    except KernelError:
        return None
    return {name: built[name] for name in ("compiler", "sources_sha256")}
