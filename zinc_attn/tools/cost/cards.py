"""The cost model's facts of each card. A field that no document gives is assumed, and listed in ``assumed``."""

import re
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...checks import check_int
from ...errors import ArgumentError
from ...kernels.declarations import GRID_SIDE
from ...kernels.device_info import DeviceInfo
from ...kernels.matrix import MatrixFacts, MatrixFragment
from ...kernels.tuning import SCRATCH_BYTES
from ...limits import WAVE
from .assumptions import READ_EFFICIENCY

FRAGMENT: Final = MatrixFragment(16, 16, 16)
# Matrix units, as RADV of a Mesa that offers them tells of them.
RDNA4_UNITS: Final = MatrixFacts(FRAGMENT, 64 << 10, 1024, FRAGMENT)


class Family(NamedTuple):
    """The facts that chips of an architecture share.

    simds: of a compute unit (NVIDIA's multiprocessor, Intel's Xe core). registers: of a SIMD, per lane of 32,
    allocated in steps of ``register_step``. wave_slots: waves that a SIMD holds at most. lds_kib: shared memory of a
    compute unit. issue: cycles in which a SIMD issues what gfx1201's issues in one. Pass 1 compiled for others has 1.05
    to 1.11 times gfx1201's slots (RDNA3, RADV 26.2.6), or 1.84 to 2.16 without dual issue (sm_90 and sm_120); a SIMD of
    Xe2 has 16 lanes, so 32 take two cycles.
    """

    simds: int
    registers: int
    register_step: int
    wave_slots: int
    lds_kib: int
    issue: float

    def waves(self, registers: int) -> int:
        """Waves of so many registers that a SIMD holds at the same time."""
        allocated = max(1, -(-registers // self.register_step)) * self.register_step
        return max(1, min(self.wave_slots, self.registers // allocated))


RDNA4: Final = Family(2, 1536, 24, 16, 64, 1.0)
RDNA3: Final = RDNA4._replace(issue=1.08)
XE2: Final = Family(8, 512, 64, 8, 128, 3.9)
ADA: Final = Family(4, 512, 8, 12, 100, 1.95)
HOPPER: Final = Family(4, 512, 8, 16, 228, 1.95)


@dataclass(frozen=True)
class Card:
    """A card: GHz, GB/s (1e9 bytes), MiB."""

    title: str
    compute_units: int
    clock_ghz: float
    bandwidth: float
    l2_mib: float
    infinity_mib: float
    assumed: tuple[str, ...] = ()
    family: Family = RDNA4

    @property
    def info(self) -> DeviceInfo:
        """The card as a device, without facts that no plan depends on."""
        told = ("", "modeled", "", "", self.compute_units, "the card", WAVE, 0, SCRATCH_BYTES, (GRID_SIDE,) * 3, 0.0)
        return DeviceInfo(0, self.title, "discrete", *told, matrix=RDNA4_UNITS)

    @property
    def all_simds(self) -> int:
        return self.compute_units * self.family.simds

    @property
    def cache_bytes(self) -> float:
        return (self.l2_mib + self.infinity_mib) * 2**20

    @property
    def read_rate(self) -> float:
        """Bytes per µs of a long read."""
        return self.bandwidth * 1e3 * READ_EFFICIENCY


MOST_UNITS: Final = 1 << 16  # compute units of a modeled card; the model's run time grows with them
CARDS: Final = {
    "r9700": Card("Radeon AI PRO R9700", 64, 2.9, 644.6, 8, 64),  # AMD's figures
    "rx9070xt": Card("Radeon RX 9070 XT", 64, 2.97, 640.0, 8, 64),  # AMD's launch figures (boost)
    "rx9070": Card("Radeon RX 9070", 56, 2.52, 640.0, 8, 64),  # AMD's launch figures (boost)
    "rx9070gre": Card("Radeon RX 9070 GRE", 48, 2.79, 432.0, 6, 48, ("l2_mib", "infinity_mib")),  # press reports
    "rx9060xt": Card("Radeon RX 9060 XT", 32, 3.13, 320.0, 4, 32, ("clock_ghz", "l2_mib")),  # press reports
    # Makers' figures, and clocks that others report; what their compilers make of pass 1 is as Family.issue says.
    "rx7900xtx": Card("Radeon RX 7900 XTX", 96, 2.5, 960.0, 6, 96, ("issue",), RDNA3),
    "8060s": Card("Radeon 8060S", 40, 2.9, 256.0, 2, 32, ("issue",), RDNA3),
    "b580": Card("Arc(tm) B580", 20, 2.67, 456.0, 18, 0, ("issue", "registers"), XE2),
    "rtx4090": Card("GeForce RTX 4090", 128, 2.52, 1008.0, 72, 0, ("issue", "registers"), ADA),
    "h200": Card("NVIDIA H200", 132, 1.98, 4800.0, 50, 0, ("issue", "registers"), HOPPER),
}


def card_of(device: str) -> Card | None:
    """The card of a device's name in Vulkan; None: its facts are not known."""
    ends = r"(?: Graphics)?(?: \(|$)"  # an 'RTX 4090 Laptop GPU' is another card
    return next((card for card in CARDS.values() if re.search(re.escape(card.title) + ends, device)), None)


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
