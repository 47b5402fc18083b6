"""How pass 1 lies in a device's registers: a line for each family of devices. No number changes a bit of the results.

``zinc-attn compilers`` shows without the device what its compiler makes of a line. A good line has the fewest spills
and as many waves as registers allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ..limits import WAVE

if TYPE_CHECKING:
    from ..shapes import AttnShape


class Layout(NamedTuple):
    """The registers of a wave of pass 1."""

    lanes: int = WAVE  # invocations of a wave
    chunks: int = 4  # most chunks of K in flight; 1 for a CPU alone
    rows_ahead: int = 8  # most rows of V in flight
    pass_sums: int = 2048  # sums of weighted values of a wave in a pass over V
    sums: int = 8192  # in all passes, at most four: with more heads a KV head has more workgroups

    def vectors(self, shape: AttnShape) -> int:
        """Query vectors that a workgroup serves at most."""
        return max(1, self.sums // WAVE // shape.value_slice)


class Family(NamedTuple):
    """Devices with a layout: of a vendor (0: any), with a driver whose major version is at least ``major``, and whose
    smallest subgroups have at least ``subgroup`` invocations."""

    name: str
    layout: Layout
    vendor: int = 0
    major: int = 0
    subgroup: int = 0


CPU: Final = Layout(WAVE, 1, 4)
RDNA: Final = Layout()
OTHER: Final = Layout(WAVE, 2, 4, 1024, 4096)
AMD, NVIDIA, INTEL = 0x1002, 0x10DE, 0x8086  # PCI
# The first fitting family is taken. RADV of Mesa 26 needs 192 VGPRs with 4 rows of 16/2/256, and 120 with 2. A lane has
# 128 registers in Intel's smallest subgroups, which spill with 4 rows, or in two workgroups of NVIDIA's multiprocessor.
FAMILIES: Final = (
    Family("RDNA, Mesa 26 or later", RDNA._replace(rows_ahead=2), AMD, 26),
    Family("RDNA", RDNA, AMD),
    Family("Xe2 and later", Layout(16, 2, 2, 512, 512), INTEL, subgroup=16),
    Family("Xe", Layout(8, 2, 2, 256, 256), INTEL),
    Family("NVIDIA", OTHER, NVIDIA),
    Family("other", OTHER),
)


def layout_of(kind: str, vendor: int = AMD, major: int = 0, subgroup: int = WAVE) -> Layout:
    """The layout of a device. kind: ``DeviceInfo.kind``; the others as ``Family`` has them."""
    fits = (f for f in FAMILIES if f.vendor in (0, vendor) and f.major <= major and f.subgroup <= subgroup)
    return CPU if kind == "cpu" else next(fits).layout
