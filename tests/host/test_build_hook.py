"""The build hook compiles the shaders of every kind of build, or fails, and the processor's kernels where that is asked
for; hatchling itself is not needed here."""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zinc_attn.runtime.cpu import building

REAL_PATH = os.environ["PATH"]
ROOT = Path(__file__).resolve().parents[2]
both_kinds = pytest.mark.parametrize("kind", ["standard", "editable"])


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
    made = module.SpirvBuildHook()
    made.root, made.said, made.target_name = str(tmp_path), [], "wheel"
    made.app = SimpleNamespace(display_warning=made.said.append)
    return made


@both_kinds
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


@both_kinds
def test_without_a_compiler_missing_shaders_are_an_error(hook, kind):
    text = r"^zinc_attn/spirv is missing or .* no glslangValidator .* install glslang-tools"
    with pytest.raises(RuntimeError, match=text):
        hook.initialize(kind, {})


def test_without_a_compiler_stale_shaders_are_packed_with_a_warning_and_never_run(hook, tmp_path):
    built = tmp_path / "zinc_attn/spirv/build.json"
    built.parent.mkdir()
    built.touch()
    os.utime(built, (0, 0))
    hook.initialize("standard", {})
    assert len(hook.said) == 1
    with pytest.raises(RuntimeError, match="older than the shaders"):
        hook.initialize("editable", {})


LEVEL = """#include <stdlib.h>
extern "C" int level(char *found) {
    if (found != nullptr) atexit([] {});
#if defined(__AVX512VNNI__)
    return 4;
#elif defined(__AVX2__)
    return 3;
#else
    return 1;
#endif
}
"""


def test_a_platform_wheel_carries_the_processors_libraries(hook, tmp_path, monkeypatch):
    """With small sources in the place of the kernels; each level is compiled, and the tag names glibc's version."""
    data: dict[str, Any] = {}
    (tmp_path / "zinc_attn/spirv/cpu").mkdir(parents=True)
    (tmp_path / "zinc_attn/spirv/cpu/a.cpp").write_text(LEVEL)
    (tmp_path / "zinc_attn/spirv/build.json").touch()
    place = "zinc_attn/runtime/cpu/building.py"
    (tmp_path / place).parent.mkdir(parents=True)
    shutil.copy2(ROOT / place, tmp_path / place)
    hook.initialize("standard", data)
    assert data == {}  # py3-none-any, as ever
    monkeypatch.setenv("ZINC_ATTN_WHEEL_CPU", "1")
    with pytest.raises(RuntimeError, match=r"ZINC_ATTN_WHEEL_CPU=1: expected x86-64 Linux with g\+\+ 12"):
        hook.initialize("standard", data)
    hook.initialize("editable", data)
    assert data == {}
    monkeypatch.setenv("PATH", REAL_PATH)
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("g++ for x86-64 is not installed")
    hook.initialize("standard", data)
    included = {Path(path): place for path, place in data["force_include"].items()}
    names = ["x86-64-v4.so", "x86-64-v3.so", "x86-64.so"]
    assert list(included.values()) == [f"zinc_attn/spirv/cpu_libraries/{name}" for name in names]
    assert data["pure_python"] is False and re.fullmatch(r"py3-none-manylinux_2_\d+_x86_64", data["tag"])
    assert [ctypes.CDLL(str(path)).level(None) for path in included] == [4, 3, 1]
    folder = next(iter(included)).parent
    every = frozenset.union(*(needed for _, needed in building.LEVELS.values()))
    for extensions, level in ((every, 4), (every - {"avx512_vnni"}, 3), (every - {"fma"}, 1), ((), 1)):
        best = next(building.carried(folder, set(extensions)))
        assert best.name == names[{4: 0, 3: 1, 1: 2}[level]]
