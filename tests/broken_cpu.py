"""Changed sources of the processor's kernels for devices that a test opens."""

from __future__ import annotations

import ctypes
import re
import shutil
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from zinc_attn.runtime.cpu import building
from zinc_attn.runtime.cpu import library as native
from zinc_attn.runtime.cpu import runtime as runtime_module

ROOT = Path(__file__).resolve().parents[1]
TABLES = {"attend": "ATTENTION", "products": "PRODUCTS", "kernels": "GENERATED"}  # of kernels, by source
FLAGS = "-std=c++20", "-O1", "-fPIC", "-ffp-contract=off", "-w", "-pthread"  # for every processor, quickly


def break_library(monkeypatch: pytest.MonkeyPatch, folder: Path, file: Path, old: str, new: str, source: str) -> None:
    """Devices that are opened from now on take the kernels of ``source`` from a library of a changed file.

    file: of native/cpu, or cpp.py; it has ``old`` once. One source is compiled, and the runtime; the others have no
    kernels, and what they have in the whole library serves in their place.
    """
    sources = folder / "cpu"
    shutil.copytree(native.SOURCES, sources)
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} no longer has {old!r} once: change its slip with it"
    if file.suffix == ".py":
        shutil.rmtree(sources)
        changed = ModuleType("changed")
        exec(compile(text.replace(old, new), str(file), "exec"), vars(changed))
        build = ModuleType("build_shaders")
        loader = SourceFileLoader("build_shaders", str(ROOT / "scripts/build_shaders.py"))
        build.__file__ = loader.path
        loader.exec_module(build)
        load = build.load_kernels
        build.load_kernels = lambda name, *room: changed if name == "cpp" else load(name, *room)
        build.write_native(sources)
    else:
        (sources / file.name).write_text(text.replace(old, new))
    declared = re.findall(r"^extern const NamedKernel (.*);", (sources / "runtime.h").read_text(), re.M)
    tables = set(re.findall(r"\w+", " ".join(declared))) - {TABLES[source]}
    stubs = (f"const zinc::NamedKernel zinc::{table}[] = {{{{}}}};" for table in sorted(tables))
    (sources / "stubs.cpp").write_text("\n".join(['#include "runtime.h"', *stubs, ""]))
    parts = [sources / f"{name}.cpp" for name in dict.fromkeys(("stubs", "runtime", source))]
    whole = native.library()
    building.build(["g++", *FLAGS], parts, folder / "changed.so")
    part = native._declared(ctypes.CDLL(str(folder / "changed.so")))
    mixed = SimpleNamespace(
        zinc_cpu_kernel=lambda name: part.zinc_cpu_kernel(name) or whole.zinc_cpu_kernel(name),
        zinc_cpu_run=part.zinc_cpu_run,
    )
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(runtime_module, "library", lambda: mixed)
    monkeypatch.setattr(runtime_module, "pool", lambda _, threads: part.zinc_cpu_open(threads))
