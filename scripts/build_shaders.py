"""Compile shaders/ into zinc_attn/spirv/: ``python scripts/build_shaders.py [--check]``.

It needs glslangValidator and spirv-val, and the standard library alone, so that a wheel can be built in an empty
environment. --check only compares the generated files of shaders/ with zinc_attn/kernels; status 1: they differ.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHADERS = ROOT / "shaders"
OUTPUT = ROOT / "zinc_attn" / "spirv"
HEADER_WORDS, OP_EXT_INST, OP_DECORATE, NO_CONTRACTION, FMA = 5, 12, 71, 42, 50  # of SPIR-V, and of GLSL.std.450


def load_kernels(name: str, room: str = "kernels") -> types.ModuleType:
    """A module of zinc_attn.kernels, or of another folder, without zinc_attn/__init__.py, which needs NumPy."""
    package = types.ModuleType("zinc_attn")
    package.__path__ = [str(ROOT / "zinc_attn")]
    sys.modules.setdefault("zinc_attn", package)
    return importlib.import_module(f"zinc_attn.{room}.{name}")


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        sys.exit(f"{name} was not found; install glslang-tools and spirv-tools (dnf, pacman: glslang, spirv-tools)")
    return path


def without_contraction(spirv: bytes) -> bytes:
    """The module with NoContraction on every fma(), which makes it one operation, as `precise` asks.

    glslang decorates additions and products alone.
    """
    words = array.array("I", spirv)
    offset, end, decorations = HEADER_WORDS, 0, array.array("I")  # end: after the last decoration
    while offset < len(words):
        length, opcode = words[offset] >> 16, words[offset] & 0xFFFF
        if opcode == OP_EXT_INST and words[offset + 4] == FMA:  # type, result, set, instruction; the only set is GLSL's
            decorations.extend([3 << 16 | OP_DECORATE, words[offset + 2], NO_CONTRACTION])
        offset += length
        if opcode == OP_DECORATE:
            end = offset
    return (words[:end] + decorations + words[end:]).tobytes()


def generate(check: bool = False) -> None:
    """Write the generated files of shaders/ where they differ, or exit there."""
    texts = load_kernels("glsl").generated() | {"graph/contract.glsl": load_kernels("params", "graph").glsl()}
    for name, text in texts.items():
        path = SHADERS / name
        if path.exists() and path.read_text() == text:
            continue
        if check:
            sys.exit(f"shaders/{name} differs from zinc_attn/kernels; run scripts/build_shaders.py and commit it")
        path.write_text(text)


def sources_sha256() -> str:
    sources = hashlib.sha256()
    for path in sorted(SHADERS.rglob("*")):
        if path.suffix in (".comp", ".glsl"):
            sources.update(path.relative_to(SHADERS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for path in sorted((ROOT / "native" / "cpu").iterdir()):
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sources.hexdigest()


def is_built() -> bool:
    """Whether zinc_attn/spirv/ was compiled from shaders/ as they are."""
    record = OUTPUT / "build.json"
    return record.exists() and json.loads(record.read_text())["sources_sha256"] == sources_sha256()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the generated GLSL with the declarations")
    args = parser.parse_args()
    generate(args.check)
    if not args.check:
        build()


def write_native(folder: Path) -> None:
    """The C++ of the kernels that are made of GLSL, and the headers that native/cpu takes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    cpp = load_kernels("cpp")
    decls = (*load_kernels("declarations").MODULES, *load_kernels("params", "graph").modules())
    text = "".join(path.read_text() for path in sorted((ROOT / "native" / "cpu").glob("*.cpp")))
    native = set(re.findall(r'\{"(\w+)", &', text))  # kernels of native/cpu; without & the GLSL's are used
    by_name = {decl.file.removesuffix(".spv"): decl.source for decl in decls}
    sources = {name: x for name, x in by_name.items() if name not in native and not re.search("attend|units", name)}
    (folder / "kernels.cpp").write_text(cpp.kernels(SHADERS, sources))
    (folder / "sources.h").write_text(f'#define ZINC_SOURCES "{sources_sha256()}"\n')
    for name in ("contract", "numbers", "elementwise", "expert_sums", "states", "item", "columns", "quantized"):
        (folder / f"{name}.h").write_text(getattr(cpp, name)(SHADERS))


def build() -> None:
    """Compile every module. If all are valid, they replace the content of zinc_attn/spirv/."""
    compiler, validator = tool("glslangValidator"), tool("spirv-val")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    staging = OUTPUT.with_name(f"spirv.{os.getpid()}.tmp")
    staging.mkdir(parents=True)
    modules, missing = {}, {}
    try:
        for decl in (*load_kernels("declarations").MODULES, *load_kernels("params", "graph").modules()):
            out = staging / decl.file
            command = [compiler, "-V", "--target-env", "vulkan1.1", f"-I{SHADERS}", "-o", str(out)]
            done = subprocess.run([*command, str(SHADERS / decl.source)], check=False, capture_output=True, text=True)
            if done.returncode and f"extension not supported: {decl.extension}" in done.stdout:
                missing[decl.name] = f"{version} does not know {decl.extension}"
                continue
            if done.returncode:
                sys.exit(f"{decl.source} ({decl.file}) does not compile:\n{done.stdout}{done.stderr}")
            out.write_bytes(without_contraction(out.read_bytes()))
            validate = [validator, "--target-env", "vulkan1.1", str(out)]
            checked = subprocess.run(validate, check=False, capture_output=True, text=True)
            if checked.returncode:
                sys.exit(f"{decl.file} is not valid:\n{checked.stdout}{checked.stderr}")
            modules[out.stem] = hashlib.sha256(out.read_bytes()).hexdigest()
        write_native(staging / "cpu")  # sources for a host's compiler; vulkan.cpp is the C library's
        skip = shutil.ignore_patterns("vulkan.cpp")
        shutil.copytree(ROOT / "native" / "cpu", staging / "cpu", ignore=skip, dirs_exist_ok=True)
        build = {"compiler": version, "sources_sha256": sources_sha256(), "modules_sha256": modules, "missing": missing}
        (staging / "build.json").write_text(json.dumps(build, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(OUTPUT, ignore_errors=True)
        staging.rename(OUTPUT)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"{len(modules)} SPIR-V modules, {version}", file=sys.stderr)
    for name, why in missing.items():
        print(f"without {name}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
