"""Compile shaders/ into zinc_attn/spirv/: ``python scripts/build_shaders.py [--check]``.

Needs glslangValidator and spirv-val.  Imports nothing outside the standard library, so that a wheel can be built
in an empty environment.  --check compares shaders/contract.glsl with the kernels' declarations and exits 1 on a
difference, without compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHADERS = ROOT / "shaders"
OUTPUT = ROOT / "zinc_attn" / "spirv"


def load_kernels() -> types.ModuleType:
    """zinc_attn.kernels.contract without zinc_attn/__init__.py, which needs NumPy."""
    package = types.ModuleType("zinc_attn")
    package.__path__ = [str(ROOT / "zinc_attn")]
    sys.modules["zinc_attn"] = package
    return importlib.import_module("zinc_attn.kernels.contract")


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        sys.exit(f"{name} was not found; install glslang-tools and spirv-tools (dnf, pacman: glslang, spirv-tools)")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare shaders/contract.glsl with the declarations")
    args = parser.parse_args()
    kernels = load_kernels()
    contract, text = SHADERS / "contract.glsl", kernels.contract_glsl()
    if args.check:
        if not contract.exists() or contract.read_text() != text:
            sys.exit(
                "shaders/contract.glsl differs from zinc_attn/kernels/contract.py; run scripts/build_shaders.py and "
                "commit it"
            )
        return
    if not contract.exists() or contract.read_text() != text:
        contract.write_text(text)
    compiler, validator = tool("glslangValidator"), tool("spirv-val")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    sources = hashlib.sha256()
    for path in sorted(SHADERS.iterdir()):
        if path.suffix in (".comp", ".glsl"):
            sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    staging = OUTPUT.with_name(f"spirv.{os.getpid()}.tmp")
    staging.mkdir(parents=True)
    modules = {}
    try:
        for decl in kernels.MODULES:
            out = staging / f"{decl.name}.spv"
            defines = [f"-D{d}" for d in decl.defines]
            command = [compiler, "-V", "--target-env", "vulkan1.1", *defines, f"-I{SHADERS}", "-o", str(out)]
            done = subprocess.run([*command, str(SHADERS / decl.source)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{decl.source} ({decl.name}) does not compile:\n{done.stdout}{done.stderr}")
            checked = subprocess.run([validator, "--target-env", "vulkan1.1", str(out)], capture_output=True, text=True)
            if checked.returncode:
                sys.exit(f"{decl.name}.spv is not valid:\n{checked.stdout}{checked.stderr}")
            modules[decl.name] = hashlib.sha256(out.read_bytes()).hexdigest()
        build = {"compiler": version, "sources_sha256": sources.hexdigest(), "modules_sha256": modules}
        (staging / "build.json").write_text(json.dumps(build, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(OUTPUT, ignore_errors=True)
        staging.rename(OUTPUT)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"{len(modules)} SPIR-V modules, {version}", file=sys.stderr)


if __name__ == "__main__":
    main()
