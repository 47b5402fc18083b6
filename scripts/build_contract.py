"""Write the generated sources of the C library: ``python scripts/build_contract.py FOLDER``, which CMake runs.

FOLDER gets zinc_contract.h and .c with the facts of zinc_attn/kernels, zinc_graph.h and .c with those of
zinc_attn/graph, the SPIR-V in both .c files, and in cpu/ the parts of the GLSL that native/cpu needs. SPIR-V that is
older than shaders/ is compiled first. Imports nothing outside the standard library.
"""

from __future__ import annotations

import sys
from pathlib import Path

import build_shaders


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: build_contract.py FOLDER")
    build_shaders.generate()
    if not build_shaders.is_built():
        build_shaders.build()
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    generated = build_shaders.load_kernels("c").generated(build_shaders.OUTPUT)
    generated |= build_shaders.load_kernels("c", "graph").generated(build_shaders.OUTPUT)
    for name, text in generated.items():
        (folder / name).write_text(text, encoding="utf-8")
    build_shaders.write_native(folder / "cpu")


if __name__ == "__main__":
    main()
