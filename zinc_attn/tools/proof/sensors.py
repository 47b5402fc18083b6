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
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..harness.tables import grouped

DRM: Final = Path("/sys/class/drm")
SAMPLE_S: Final = 2.0  # between two readings while a step runs
SMI_LIMIT_S: Final = 10.0
# Begins of hwmon's files: the quantity, the file's unit in that of a reading, and the reading's.
_HWMON: Final = {"temp": ("temperature", 1e3, "°C"), "freq": ("clock", 1e6, "MHz")}
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
    None for the one on the path, empty for none.
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
        for card in sorted(path for path in self.drm.glob("card*") if re.fullmatch(r"card\d+", path.name)):
            device = card / "device"
            slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", _text(device / "uevent"), re.MULTILINE)
            about = card.name, slot[1].lower() if slot else None
            for folder in sorted(device.glob("hwmon/hwmon*")):
                for begin, (word, scale, unit) in _HWMON.items():
                    for path in sorted(folder.glob(f"{begin}*_input")):
                        plain = path.name.removesuffix("_input")
                        label = _text(folder / f"{plain}_label").strip() or plain
                        for value in _numbers(_text(path)):
                            yield Reading(*about, f"{word} {label}", unit, value / scale)
            for value in _numbers(_text(device / "gpu_busy_percent")):
                yield Reading(*about, "busy", "%", value)
            if clock := re.search(r"(\d+)\s*mhz\s*\*", _text(device / "pp_dpm_sclk").lower()):
                yield Reading(*about, "clock pp_dpm_sclk", "MHz", float(clock[1]))

    def _smi(self) -> Iterator[Reading]:
        if not self.nvidia_smi:
            return
        argv = [self.nvidia_smi, f"--query-gpu={','.join(('pci.bus_id', *_SMI))}", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=SMI_LIMIT_S).stdout
        except (OSError, subprocess.SubprocessError):
            return
        for index, line in enumerate(said.splitlines()):
            address, *values = line.split(",")
            pci = address.strip().lower()[-len("0000:00:00.0") :]  # nvidia-smi writes the domain with eight digits
            for (name, unit), text in zip(_SMI.values(), values, strict=False):
                for value in _numbers(text):
                    yield Reading(f"nvidia-smi {index}", pci, name, unit, value)


def _text(path: Path) -> str:
    """A file of sysfs; empty where there is none, or where the driver gives no value now."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(text: str) -> list[float]:
    """The number that a text is; none where it is none."""
    with suppress(ValueError):
        return [float(text)]
    return []


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
