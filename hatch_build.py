"""Build hook: wheels, source distributions and editable installs have the compiled shaders (zinc_attn/spirv/).

$ZINC_ATTN_WHEEL_LIBRARIES: a folder of compiled libraries, from scripts/wheel, for a wheel of x86-64 Linux.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SpirvBuildHook(BuildHookInterface):
    """Compiles the shaders where they are missing or stale. Without a compiler a wheel may have stale ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.compile_shaders(version)
        folder = os.environ.get("ZINC_ATTN_WHEEL_LIBRARIES")
        if folder and self.target_name == "wheel" and version != "editable":
            paths, tag = libraries(Path(folder))
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


def libraries(folder: Path) -> tuple[dict[str, str], str]:
    """(path in the wheel by the library's path, the wheel's tag)."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError("ZINC_ATTN_WHEEL_LIBRARIES: expected x86-64 Linux; unset it for a wheel without libraries")
    paths = sorted(folder.glob("lib*.so"))
    if not paths:
        raise RuntimeError(f"ZINC_ATTN_WHEEL_LIBRARIES: got {folder} without libraries; run scripts/wheel")
    newest = max(int(minor) for path in paths for minor in re.findall(rb"\0GLIBC_2\.(\d+)", path.read_bytes()))
    places = {str(path): f"zinc_attn/libraries/{path.name}" for path in paths}
    return places, f"py3-none-manylinux_2_{newest}_x86_64"


def is_fresh(root: Path) -> bool:
    """Whether the compiled shaders exist and are not older than any of their sources."""
    built = root / "zinc_attn" / "spirv" / "build.json"
    if not built.exists():
        return False
    names = ("scripts/build_shaders.py", "zinc_attn/canonical/constants.py", "zinc_attn/limits.py")
    sources = [root / name for name in names]
    sources += (path for room in ("kernels", "graph") for path in (root / "zinc_attn" / room).glob("*.py"))
    folders = root / "shaders", root / "native" / "cpu"
    sources += (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return all(path.stat().st_mtime <= built.stat().st_mtime for path in sources)
