"""Temperature, clocks and load of the machine's cards, from sysfs and from nvidia-smi, where they can be read.

Nothing here needs a right that a user lacks. What cannot be read is left out, and ``Sensors.absent`` says so.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..harness.tables import grouped

DRM: Final = Path("/sys/class/drm")
SAMPLE_S: Final = 2.0  # between two readings while a step runs
SMI_LIMIT_S: Final = 10.0
_HWMON: Final = {"temp": (1e3, "°C"), "freq": (1e6, "MHz")}  # the files' unit, by the begin of their name
_SMI: Final = {  # fields of nvidia-smi, by the name and the unit of a reading
    "temperature.gpu": ("temperature", "°C"),
    "clocks.sm": ("clock sm", "MHz"),
    "clocks.mem": ("clock mem", "MHz"),
    "utilization.gpu": ("busy", "%"),
}
_WANTED: Final = {"temperature": "°C", "clock": "MHz", "load": "%"}  # what a report looks for, by its unit


class Reading(NamedTuple):
    """One value of one card. pci: as Linux writes it, '0000:03:00.0'; None where the card is on no PCI bus.

    All fields but the last say which sensor it is, and are the same in its next reading.
    """

    card: str
    pci: str | None
    name: str
    unit: str
    value: float


class Sensors:
    """The sensors of every card, or of the one at ``pci`` where some reading has that address.

    pci: of the Vulkan device, None where it does not tell. drm: the folder of cards in sysfs. nvidia_smi: the program,
    None where there is none.
    """

    def __init__(self, pci: str | None = None, drm: Path = DRM, nvidia_smi: str | None = None) -> None:
        self.pci, self.drm = pci, drm
        self.nvidia_smi = nvidia_smi if nvidia_smi is not None else shutil.which("nvidia-smi")

    def read(self) -> list[Reading]:
        """Every value that can be read now, of the device's card where it is known, otherwise of each card."""
        found = [*self._sysfs(), *self._smi()]
        return [one for one in found if self.pci is not None and one.pci == self.pci] or found

    def matched(self, readings: Sequence[Reading]) -> bool:
        """Whether the readings are those of the Vulkan device, by its PCI address."""
        return self.pci is not None and any(one.pci == self.pci for one in readings)

    def absent(self, readings: Sequence[Reading]) -> list[str]:
        """What cannot be read here: some of temperature, clock and load."""
        units = {one.unit for one in readings}
        return [name for name, unit in _WANTED.items() if unit not in units]

    def _sysfs(self) -> Iterator[Reading]:
        cards = sorted(path for path in self.drm.glob("card*") if re.fullmatch(r"card\d+", path.name))
        for card in cards:
            device = card / "device"
            slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", _text(device / "uevent") or "", re.MULTILINE)
            about = card.name, slot[1].lower() if slot else None
            for folder in sorted(device.glob("hwmon/hwmon*")):
                yield from _hwmon(folder, *about)
            if (busy := _number(_text(device / "gpu_busy_percent"))) is not None:
                yield Reading(*about, "busy", "%", busy)
            if clock := re.search(r"(\d+)\s*mhz\s*\*", (_text(device / "pp_dpm_sclk") or "").lower()):
                yield Reading(*about, "clock pp_dpm_sclk", "MHz", float(clock[1]))

    def _smi(self) -> Iterator[Reading]:
        if not self.nvidia_smi:
            return
        fields = ",".join(("pci.bus_id", *_SMI))
        try:
            ran = subprocess.run(
                [self.nvidia_smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                check=False,
                timeout=SMI_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        for index, line in enumerate(ran.stdout.splitlines() if ran.returncode == 0 else ()):
            address, *values = (word.strip() for word in line.split(","))
            pci = address.lower()[-len("0000:00:00.0") :]  # nvidia-smi writes the domain with eight digits
            for (name, unit), text in zip(_SMI.values(), values, strict=False):
                if (value := _number(text)) is not None:
                    yield Reading(f"nvidia-smi {index}", pci, name, unit, value)


def _hwmon(folder: Path, card: str, pci: str | None) -> Iterator[Reading]:
    """Temperatures and clocks of one hwmon folder."""
    for begin, (scale, unit) in _HWMON.items():
        word = "temperature" if begin == "temp" else "clock"
        for path in sorted(folder.glob(f"{begin}*_input")):
            value = _number(_text(path))
            plain = path.name.removesuffix("_input")
            label = (_text(path.with_name(f"{plain}_label")) or plain).strip()
            if value is not None:
                yield Reading(card, pci, f"{word} {label}", unit, value / scale)


def _text(path: Path) -> str | None:
    """A file of sysfs; None where there is none, or where the driver gives no value now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class Watch:
    """Readings before, during and after a step. A context manager; a thread reads every ``SAMPLE_S`` seconds."""

    def __init__(self, sensors: Sensors, every_s: float = SAMPLE_S) -> None:
        self._sensors, self._every_s = sensors, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before: list[Reading] = []
        self.during: list[list[Reading]] = []
        self.after: list[Reading] = []

    def __enter__(self) -> Watch:
        self.before = self._sensors.read()
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.before:
            self._thread.join()
            self.after = self._sensors.read()

    def _sample(self) -> None:
        while not self._end.wait(self._every_s):
            self.during.append(self._sensors.read())

    def summary(self) -> list[dict[str, Any]]:
        """A record per sensor: the values before and after, and the least, the median and the largest in between.

        None where a value is missing, as between the two where the step ended before the first sample.
        """
        before, after = ({one[:-1]: one.value for one in readings} for readings in (self.before, self.after))
        during = grouped((one[:-1], one.value) for readings in self.during for one in readings)
        made = []
        for key in dict.fromkeys((*before, *during, *after)):
            values = during.get(key, [])
            figures = (min(values), statistics.median(values), max(values)) if values else (None, None, None)
            names = (*Reading._fields[:-1], "during_min", "during_median", "during_max")
            record = dict(zip(names, (*key, *figures), strict=True))
            made.append(record | {"before": before.get(key), "after": after.get(key), "samples": len(values)})
        return made
