"""Changed shaders for devices that a test opens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from zinc_attn.kernels import declarations as kernels
from zinc_attn.runtime import device as device_module

SHADERS = Path(__file__).resolve().parents[1] / "shaders"


def break_kernels(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    change: tuple[str, str, str],
    only: str = "",
    modules: Sequence[kernels.KernelDecl] = kernels.MODULES,
) -> None:
    """For devices that are opened from now on, make a change in every module that it concerns, or in ``only``.

    change: a file of shaders/, a text that it has once, and its replacement. The module that a device is asked first
    changes only where ``only`` is its name: it would refuse the device. Skips the test without a compiler that knows
    the modules' extension.
    """
    if shutil.which("glslangValidator") is None:
        pytest.skip("glslangValidator is not installed")
    sources, spirv = folder / "shaders", folder / "spirv"
    shutil.copytree(SHADERS, sources)
    shutil.copytree(device_module.SPIRV, spirv)
    file, old, new = change
    text = (sources / file).read_text()
    assert text.count(old) == 1, f"{file} no longer has {old!r} once: change this test with it"
    (sources / file).write_text(text.replace(old, new))
    broken, unknown = 0, None
    first = kernels.PRIMITIVES.name
    for decl in (d for d in modules if file in _files(d.source) and only in ("", d.name)):
        if decl.name == first != only:
            continue
        command = ["glslangValidator", "-V", "--target-env", "vulkan1.1", "-I.", "-o", str(spirv / decl.file)]
        done = subprocess.run([*command, decl.source], cwd=sources, capture_output=True, text=True)
        if done.returncode and f"extension not supported: {decl.extension}" in done.stdout:
            unknown = decl.extension  # as for scripts/build_shaders.py; the package's module, if there is one, stays
            continue
        assert done.returncode == 0, done.stdout
        broken += 1
    if unknown and not broken:
        pytest.skip(f"this glslangValidator does not know {unknown}")
    assert broken, "the compiler has made none of the changed modules"
    monkeypatch.setattr(device_module, "SPIRV", spirv)


def _files(source: str) -> set[str]:
    """The file and what it includes, by their paths in shaders/."""
    result = {source}
    for name in re.findall(r'^#include "([^"]*)"', (SHADERS / source).read_text(), re.MULTILINE):
        result |= _files(os.path.normpath(Path(source).parent / name))
    return result
