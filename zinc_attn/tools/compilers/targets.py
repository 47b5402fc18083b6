"""GPUs that are not here, the drivers whose compilers know them, and the process in which a driver offers one.

A drm shim answers a driver's ioctls in place of the kernel. RADV of Mesa 25.0 to 25.2 needs none: it has null hardware.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, NoVulkanError
from ...kernels.families import AMD, INTEL, NVIDIA
from ..cost.cards import ADA, HOPPER, RDNA3, RDNA4, Family

ICD_FOLDERS: Final = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
PACKAGE_ROOT: Final = Path(__file__).parents[3]
WORKER: Final = (sys.executable, "-m", f"{__package__}.worker")
HOW: Final = "take what scripts/lib/compilers.sh fetches (docs/compilers.md)"


class Driver(NamedTuple):
    """A Vulkan driver of Mesa: its library's name, its shim's and the shim's variables, and its statistics' names.

    figures: registers, scratch memory, instructions, cycles. spills: of every kind. shared: empty if it tells none.
    """

    library: str
    shim: str
    variables: Mapping[str, str]
    figures: tuple[str, str, str, str]
    spills: tuple[str, str]
    shared: str = ""
    vendor: int = AMD


RADV: Final = Driver(
    "radeon",
    "amdgpu",
    {"AMDGPU_GPU_ID": "{}"},
    ("VGPRs", "Scratch size", "Instructions", "Latency"),
    ("Spilled VGPRs", "Spilled SGPRs"),
    "LDS size",
)
ANV: Final = Driver(
    "intel",
    "intel",
    {"INTEL_STUB_GPU_PLATFORM": "{}", "INTEL_FORCE_PROBE": "*"},
    ("Max live registers", "Scratch Memory Size", "Instructions", "Cycles"),
    ("Spills", "Fills"),
    "Workgroup Memory Size",
    INTEL,
)
NVK: Final = Driver(
    "nouveau",
    "nouveau",
    {"NOUVEAU_CHIPSET": "{}", "NVK_I_WANT_A_BROKEN_VULKAN_DRIVER": "1"},
    ("Number of GPRs", "SLM size", "Instruction count", "Static cycle count"),
    ("Spills to memory", "Fills from memory"),
    vendor=NVIDIA,
)


class Target(NamedTuple):
    """A GPU. chip: as the shim calls it; its name in Vulkan has this, or ``word``.

    family: None where the driver's registers do not tell the waves. shim: unlike the driver's. subgroup: the smallest.
    """

    title: str
    driver: Driver
    chip: str
    family: Family | None = None
    word: str = ""
    shim: str = ""
    subgroup: int = 32


TARGETS: Final = {
    "gfx1201": Target("Radeon AI PRO R9700, RX 9070", RADV, "gfx1201", RDNA4),
    "gfx1151": Target("Radeon 8060S", RADV, "gfx1151", RDNA3, "strix_halo", "gfx1151"),
    "gfx1100": Target("Radeon RX 7900 XTX", RADV, "navi31", RDNA3),
    "gfx1030": Target("Radeon RX 6800", RADV, "navi21", RDNA4._replace(registers=1024, register_step=8)),
    "bmg": Target("Arc B580, Battlemage", ANV, "bmg", subgroup=16),
    "lnl": Target("Lunar Lake", ANV, "lnl", subgroup=16),
    "ptl": Target("Panther Lake, Xe3", ANV, "ptl", subgroup=16),
    "dg2": Target("Arc A770, Alchemist", ANV, "dg2", subgroup=8),
    "turing": Target("GeForce RTX 20", NVK, "162", ADA._replace(wave_slots=8), "nvk"),
    "ampere": Target("GeForce RTX 30", NVK, "172", ADA, "nvk"),
    "ada": Target("GeForce RTX 40", NVK, "192", ADA, "nvk"),
    "hopper": Target("H100, H200", NVK, "180", HOPPER, "nvk"),
    "blackwell": Target("GeForce RTX 50", NVK, "1b2", ADA, "nvk"),
}


class Compiler(NamedTuple):
    """A target's compiler: the system's Mesa, or one in a folder with all libraries that it wants (``--mesa``)."""

    name: str = "gfx1201"
    mesa: Path | None = None

    @property
    def target(self) -> Target:
        if self.name not in TARGETS:
            raise ArgumentError(f"target: got {self.name!r}, expected one of {', '.join(TARGETS)}")
        return TARGETS[self.name]

    def process(self) -> dict[str, Any]:
        """The worker's command and environment, in which the loader offers this driver alone, with this chip."""
        driver, icd = self.target.driver, str(self._icd())
        dropped = ("VK_ADD_DRIVER_FILES", "VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE", "VK_INSTANCE_LAYERS")
        kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("RADV_")}
        kept |= {k: v.format(self.target.chip) for k, v in driver.variables.items()}
        kept |= {"VK_ICD_FILENAMES": icd, "VK_DRIVER_FILES": icd}
        kept["MESA_SHADER_CACHE_DISABLE"] = "true"  # statistics exist only for what is compiled now
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), kept.get("PYTHONPATH"))))
        command = *self._loader(), *WORKER, self.target.chip, self.target.word or self.target.chip
        if shim := next(self._shims(), None):
            kept["LD_PRELOAD"] = str(shim)
        elif driver is RADV:
            kept["RADV_FORCE_FAMILY"] = self.target.chip
        else:
            raise NoVulkanError(f"there is no drm shim lib{self.target.shim or driver.shim}_noop_drm_shim.so: {HOW}")
        return {"args": command, "env": kept}

    def _loader(self) -> tuple[str, ...]:
        """Another Mesa's libraries want their system's C library, so its dynamic loader starts the interpreter."""
        if self.mesa is None:
            return ()
        loader = next(self.mesa.glob("usr/lib/*/ld-linux*.so.*"), None)
        if loader is None:
            raise NoVulkanError(f"there is no C library in {self.mesa}: {HOW}")
        return str(loader), "--library-path", f"{loader.parent}:/usr/lib/{loader.parent.name}"

    def _shims(self) -> Iterator[Path]:
        name = f"lib{self.target.shim or self.target.driver.shim}_noop_drm_shim.so"
        yield from (self.mesa or Path("/")).glob(f"usr/lib/*/{name}")
        cache = Path(os.environ.get("ZINC_ATTN_CACHE", PACKAGE_ROOT / ".cache"))
        if (built := cache / "compilers" / name).exists():
            yield built

    def _icd(self) -> Path:
        """The driver's file for the loader. NoVulkanError: there is none."""
        if self.mesa is not None and not os.path.isdir(self.mesa):
            raise ArgumentError(f"mesa: got {os.fspath(self.mesa)!r}, expected a folder; {HOW}")
        folders = ICD_FOLDERS if self.mesa is None else (f"{self.mesa}/usr/share/vulkan/icd.d",)
        name = f"{self.target.driver.library}_icd*.json"
        icd = next((path for folder in folders for path in sorted(Path(folder).glob(name))), None)
        if icd is None:
            raise NoVulkanError(f"there is no {name} in {', '.join(folders)}: install mesa-vulkan-drivers, or {HOW}")
        return icd
