"""The build hook compiles the shaders of every kind of build, or fails, and the processor's kernels where that is asked
for; hatchling itself is not needed here."""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zinc_attn.runtime.cpu import building

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The hook on a small tree, whose build_shaders.py notes that it ran; PATH has no compiler."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("shaders/a.comp", "zinc_attn/kernels/a.py", "zinc_attn/canonical/constants.py", "zinc_attn/limits.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/build_shaders.py").write_text(
        "import pathlib\n"
        "pathlib.Path('zinc_attn/spirv').mkdir(exist_ok=True)\n"
        "pathlib.Path('zinc_attn/spirv/build.json').write_text('made')\n"
    )
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    build_hook = module.SpirvBuildHook()
    build_hook.root, build_hook.said, build_hook.target_name = str(tmp_path), [], "wheel"
    build_hook.app = SimpleNamespace(display_warning=build_hook.said.append)
    return build_hook


@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_missing_and_stale_shaders_are_compiled(hook, tmp_path, kind):
    (tmp_path / "bin/glslangValidator").touch(mode=0o755)
    built = tmp_path / "zinc_attn/spirv/build.json"
    hook.initialize(kind, {})
    assert built.read_text() == "made"
    built.write_text("mine")
    hook.initialize(kind, {})
    assert built.read_text() == "mine"  # fresh
    os.utime(built, (0, 0))
    hook.initialize(kind, {})
    assert built.read_text() == "made"


def test_without_a_compiler_stale_shaders_are_packed_with_a_warning_and_never_run(hook, tmp_path):
    """And missing ones are an error."""
    text = r"^zinc_attn/spirv is missing or .* no glslangValidator .* install glslang-tools"
    for kind in ("standard", "editable"):
        with pytest.raises(RuntimeError, match=text):
            hook.initialize(kind, {})
    built = tmp_path / "zinc_attn/spirv/build.json"
    built.parent.mkdir()
    built.touch()
    os.utime(built, (0, 0))
    hook.initialize("standard", {})
    assert len(hook.said) == 1
    with pytest.raises(RuntimeError, match="older than the shaders"):
        hook.initialize("editable", {})


def test_a_platform_wheel_carries_libraries_and_says_what_glibc_they_need(hook, tmp_path, monkeypatch):
    data: dict[str, Any] = {}
    (tmp_path / "zinc_attn/spirv").mkdir(parents=True)
    (tmp_path / "zinc_attn/spirv/build.json").touch()
    folder = tmp_path / "libraries"
    folder.mkdir()
    hook.initialize("standard", data)
    assert data == {}  # py3-none-any
    monkeypatch.setenv("ZINC_ATTN_WHEEL_LIBRARIES", str(folder))
    hook.initialize("editable", data)
    assert data == {}
    with pytest.raises(RuntimeError, match=r"LIBRARIES: got .*libraries without libraries; run scripts"):
        hook.initialize("standard", data)
    names = "libggml-zinc.so", "libzinc_cpu-v3.so", "libzinc_cpu.so"
    for name, needed in zip(names, (b"\0GLIBC_2.4\0GLIBC_2.34\0", b"\0GLIBC_2.17", b""), strict=True):
        (folder / name).write_bytes(b"\x7fELF" + needed)
    hook.initialize("standard", data)
    places = {str(folder / name): f"zinc_attn/libraries/{name}" for name in names}
    assert data == {"pure_python": False, "tag": "py3-none-manylinux_2_34_x86_64", "force_include": places}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are of x86-64")
def test_a_processor_runs_the_best_library_that_it_can(tmp_path):
    for name in building.LEVELS:
        (tmp_path / name).touch()
    every = frozenset.union(*building.LEVELS.values())
    levels = {"-v4": every, "-v3": every - {"avx512_vnni"}, "": every - {"fma"}}
    for level, extensions in levels.items():
        assert next(building.carried(tmp_path, set(extensions))).name == f"libzinc_cpu{level}.so"
