"""SPIR-V of changed shaders, which devices that are opened afterwards load where ``runtime.device.SPIRV`` names it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from zinc_attn.kernels import declarations as kernels
from zinc_attn.runtime import device as device_module

SHADERS = Path(__file__).resolve().parents[1] / "shaders"


class Change(NamedTuple):
    """In a file of shaders/, ``old``, which occurs there once, becomes ``new``."""

    file: str
    old: str
    new: str


def break_kernels(
    changes: Sequence[Change], folder: Path, only: str = "", modules: Sequence[kernels.KernelDecl] = kernels.MODULES
) -> Path:
    """A SPIR-V folder with the changes in every one of the modules that they concern, or in kernel ``only`` alone.

    The module that a device is asked first changes only where ``only`` is its name: it would refuse the device.
    Skips the test without a compiler that knows them.
    """
    if shutil.which("glslangValidator") is None:
        pytest.skip("glslangValidator is not installed")
    sources, spirv = folder / "shaders", folder / "spirv"
    shutil.copytree(SHADERS, sources)
    shutil.copytree(device_module.SPIRV, spirv)
    for file, old, new in changes:
        text = (sources / file).read_text()
        assert text.count(old) == 1, f"{file} no longer has {old!r} once: change this test with it"
        (sources / file).write_text(text.replace(old, new))
    changed = {change.file for change in changes}
    broken, unknown = 0, None
    first = kernels.PRIMITIVES.name
    for decl in (d for d in modules if changed & _files(d.source) and only in ("", d.name)):
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
    return spirv


def _files(source: str) -> set[str]:
    """The file and what it includes, by their paths in shaders/."""
    found = {source}
    for name in re.findall(r'^#include "([^"]*)"', (SHADERS / source).read_text(), re.MULTILINE):
        found |= _files(os.path.normpath(Path(source).parent / name))
    return found
