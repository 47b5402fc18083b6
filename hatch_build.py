"""Build hook: wheels, source distributions and editable installs have the compiled shaders (zinc_attn/spirv/).

With ZINC_ATTN_WHEEL_CPU=1 a wheel is of x86-64 Linux, and has the native kernels of the processor compiled, too.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NEWEST = 36  # of glibc 2, the most that a compiled library may need: scripts/kit's, Debian 12's


class SpirvBuildHook(BuildHookInterface):
    """Compiles the shaders where they are missing or stale. Without a compiler a wheel may have stale ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.compile_shaders(version)
        if self.target_name == "wheel" and version != "editable" and os.environ.get("ZINC_ATTN_WHEEL_CPU") == "1":
            paths, tag = compile_kernels(Path(self.root))
            build_data |= {"pure_python": False, "tag": tag}
            build_data.setdefault("force_include", {}).update(paths)

    def compile_shaders(self, version: str) -> None:
        root = Path(self.root)
        if is_fresh(root):
            return
        if shutil.which("glslangValidator"):
            subprocess.run([sys.executable, root / "scripts" / "build_shaders.py"], cwd=root, check=True)
        elif version != "editable" and (root / "zinc_attn" / "spirv" / "build.json").exists():
            self.app.display_warning(
                "zinc_attn/spirv is older than the shaders and is packed as it is: no glslangValidator here"
            )
        else:
            raise RuntimeError(
                "zinc_attn/spirv is missing or older than the shaders, and there is no glslangValidator to make it: "
                "install glslang-tools and spirv-tools (dnf, pacman: glslang, spirv-tools) and try again"
            )


def compile_kernels(root: Path) -> tuple[dict[str, str], str]:
    """The processor's libraries, by path with the place of each in the wheel, and the wheel's tag."""
    spec = importlib.util.spec_from_file_location("building", root / "zinc_attn/runtime/cpu/building.py")
    assert spec is not None and spec.loader is not None
    building = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(building)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError("ZINC_ATTN_WHEEL_CPU=1: expected x86-64 Linux with g++ 12 or later, or CXX that names it")
    sources, paths, newest = sorted((root / "zinc_attn/spirv/cpu").glob("*.cpp")), {}, 0
    for level, (flags, _) in building.LEVELS.items():
        library = root / ".cache" / building.CARRIED / f"{level}.so"
        building.build([compiler, *building.FLAGS, *flags], sources, library, building.ALONE)
        paths[str(library)] = f"zinc_attn/spirv/{building.CARRIED}/{level}.so"
        newest = max(newest, *map(int, re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())))
    if newest > NEWEST:
        raise RuntimeError(f"the libraries need glibc 2.{newest}, expected 2.{NEWEST} at most; use an older system")
    return paths, f"py3-none-manylinux_2_{newest}_x86_64"


def is_fresh(root: Path) -> bool:
    """Whether the compiled shaders are there and no older than everything they are made from."""
    built = root / "zinc_attn" / "spirv" / "build.json"
    if not built.exists():
        return False
    names = ("scripts/build_shaders.py", "zinc_attn/canonical/constants.py", "zinc_attn/limits.py")
    sources = [root / name for name in names]
    sources += (path for room in ("kernels", "graph") for path in (root / "zinc_attn" / room).glob("*.py"))
    folders = root / "shaders", root / "native" / "cpu"
    sources += (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return all(path.stat().st_mtime <= built.stat().st_mtime for path in sources)
