"""What the cost model knows of each card. A field that no document gives is assumed, and listed in ``assumed``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from ...checks import check_int
from ...errors import ArgumentError
from ...kernels.device_info import DeviceInfo
from ...kernels.matrix import MatrixFacts, MatrixFragment
from ...kernels.tuning import SCRATCH_BYTES
from ...limits import WAVE
from .assumptions import READ_EFFICIENCY

GRID: Final = 65535  # workgroups along an axis that every device takes
FRAGMENT: Final = MatrixFragment(16, 16, 16)
# What RADV of a Mesa that offers them tells of matrix units.
RDNA4_UNITS: Final = MatrixFacts(FRAGMENT, 64 << 10, 1024, FRAGMENT)


@dataclass(frozen=True)
class Card:
    """A card of RDNA4: GHz, GB/s (1e9 bytes), MiB.

    Every RDNA4 chip has the same compute units. simds: of each. registers: of a SIMD, per lane, allocated in steps of
    ``register_step``. wave_slots: waves that a SIMD holds at most. lds_kib: shared memory of a compute unit.
    """

    title: str
    compute_units: int
    clock_ghz: float
    bandwidth: float
    l2_mib: float
    infinity_mib: float
    assumed: tuple[str, ...] = ()

    simds: ClassVar[int] = 2
    registers: ClassVar[int] = 1536
    register_step: ClassVar[int] = 24
    wave_slots: ClassVar[int] = 16
    lds_kib: ClassVar[int] = 64

    @property
    def info(self) -> DeviceInfo:
        """The card as a device, of which what no plan depends on is left out."""
        told = ("", "modeled", "", "", self.compute_units, "the card", WAVE, 0, SCRATCH_BYTES, (GRID,) * 3, 0.0)
        return DeviceInfo(0, self.title, "discrete", *told, matrix=RDNA4_UNITS)

    @property
    def all_simds(self) -> int:
        return self.compute_units * self.simds

    @property
    def cache_bytes(self) -> float:
        return (self.l2_mib + self.infinity_mib) * 2**20

    @property
    def read_rate(self) -> float:
        """Bytes per µs of a long read."""
        return self.bandwidth * 1e3 * READ_EFFICIENCY

    def waves(self, vgprs: int) -> int:
        """Waves of so many vector registers that a SIMD holds at the same time."""
        allocated = max(1, -(-vgprs // self.register_step)) * self.register_step
        return max(1, min(self.wave_slots, self.registers // allocated))


MOST_UNITS: Final = 1 << 16  # compute units of a card that is modeled, which takes time for each
CARDS: Final = {
    "r9700": Card("Radeon AI PRO R9700", 64, 2.9, 644.6, 8, 64),  # AMD's figures
    "rx9070xt": Card("Radeon RX 9070 XT", 64, 2.97, 640.0, 8, 64),  # AMD's launch figures (boost)
    "rx9070": Card("Radeon RX 9070", 56, 2.52, 640.0, 8, 64),  # AMD's launch figures (boost)
    "rx9070gre": Card("Radeon RX 9070 GRE", 48, 2.79, 432.0, 6, 48, ("l2_mib", "infinity_mib")),  # press reports
    "rx9060xt": Card("Radeon RX 9060 XT", 32, 3.13, 320.0, 4, 32, ("clock_ghz", "l2_mib")),  # press reports
}


def find_card(name: str) -> Card:
    """A card by name in any case; spaces, hyphens and a leading 'rx' may be left out. ArgumentError lists the cards."""
    word = "".join(c for c in name.lower() if c.isalnum())
    key = word if word in CARDS else f"rx{word}"
    if key not in CARDS:
        raise ArgumentError(f"card: got {name!r}, expected one of {', '.join(CARDS)}")
    return CARDS[key]


def card_with(compute_units: int) -> Card:
    """An RDNA4 card of so many compute units, with the R9700's clock and its bandwidth per compute unit."""
    model, units = CARDS["r9700"], check_int("cu", compute_units, 1, MOST_UNITS)
    if units == model.compute_units:
        return model
    title, bandwidth = f"{units} compute units like an R9700's", model.bandwidth * units / model.compute_units
    return replace(model, title=title, compute_units=units, bandwidth=bandwidth, assumed=("clock_ghz", "bandwidth"))
