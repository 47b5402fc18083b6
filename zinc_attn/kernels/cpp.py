"""The GLSL of shaders/ as C++ for native/cpu/glsl.h, so that a kernel's definition stands once; needs no NumPy.

A kernel becomes a struct: its members are the buffers, the specialization constants, the variables and the functions,
whose text stays as it is but for literals (1.0 becomes 1.0f), swizzles (.xy becomes .xy()), ``out`` parameters
(references) and arrays. Kernels whose arrays are sized by specialization constants, and those of subgroups, are written
in C++ instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CONTRACTS: Final = ("contract.glsl", "graph/contract.glsl")
_NUMBER: Final = re.compile(r"(?<![\w.])(\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?![\w.])")
_LAYOUT: Final = r"layout\(set = 0, binding = (\w+), std430\)[^{;]*\{\s*"
# What replaces what in the text of a kernel, in this order.
_REWRITES: Final = tuple(
    (re.compile(pattern, re.M), by)
    for pattern, by in (
        (r"//[^\n]*", ""),
        (r"^#(?:version|extension)[^\n]*", ""),
        (r"\b(?:uint|float|int)\[\]\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"{\1}"),
        (r"(\w+)\.xy = ([^;]*);", r"set_xy(\1, \2);"),
        (r"\.([xyzw]{2,4})\b(?!\()", r".\1()"),
        (r"\b(?:inout|out)\s+(\w+)\s+(\w+)\[\w+\]", r"\1 *\2"),
        (r"\b(?:inout|out)\s+(\w+)\s+(\w+)", r"\1 &\2"),
        (r"\[\[(?:dont_)?unroll\]\]|\bprecise\b|\bspirv_literal\b", ""),
        (r"^spirv_instruction\([^;]*;", ""),
    )
)
_KERNEL_REWRITES: Final = tuple(
    (re.compile(pattern, re.M), by)
    for pattern, by in (
        (r"layout\(local_size_x = (\w+)\) in;", r"const uvec3 gl_WorkGroupSize = uvec3(\1, 1u, 1u);"),
        (r"layout\([^)]*local_size_x_id = (\w+)[^)]*\) in;", r"const uvec3 gl_WorkGroupSize = uvec3(spec[\1], 1u, 1u);"),
        (r"layout\(constant_id = (\w+)\) const (\w+) (\w+) = [^;]*;", r"const \2 \3 = spec[\1];"),
        (_LAYOUT + r"(\w+) p;\s*\};", r"const \2 &p = *static_cast<const \2 *>(bound[\1]);"),
        (_LAYOUT + r"(\w+) (\w+)\[\];\s*\};", r"\2 *const \3 = static_cast<\2 *>(bound[\1]);"),
        (r"\bshared (\w+) (\w+)\[([^;]*)\];", r"\1 *const \2 = shared<\1>(\3);"),
        (r"^\w+ \w+\([^(){}]*\);$", ""),  # declarations before definitions
        (r"\bvoid main\(\)", "void run()"),
        (r"(\(|, )(\w+) (\w+)\[[A-Z]\w*\](?=[,)])", r"\1\2 *\3"),  # arrays as parameters
    )
)


def _flat(path: Path, seen: set[Path]) -> str:
    """The text with its includes, each once, without the contracts."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r'#include "(.*)"', line)
        if not found:
            lines.append(line)
        elif (inner := (path.parent / found[1]).resolve()).name != "contract.glsl" and inner not in seen:
            seen.add(inner)
            lines.append(_flat(inner, seen))
    return "\n".join(lines)


def _rewritten(text: str) -> str:
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    return _NUMBER.sub(r"\1f", text)


def _apart(text: str, head: str, by: str) -> str:
    """Declarations of several names that begin with ``head`` as one of each, which begins with ``by``."""

    def declarations(found: re.Match[str]) -> str:
        depth, parts = 0, [""]
        for letter in found[1]:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        return "\n".join(f"{by}{part.strip()};" for part in parts)

    return re.sub(rf"^{head}([^;]*);", declarations, text, flags=re.M)


def _constants(text: str) -> str:
    """Constants that C++ knows when it compiles, so that they can be sizes of arrays, as such."""
    text = _apart(text, "const uint ", "const uint ")
    unknown = set(re.findall(r"^const \w+ (\w+) = spec\[", text, re.M))

    def constant(found: re.Match[str]) -> str:
        names = set(re.findall(r"\b[A-Za-z_]\w*", re.sub(r"0x\w+|\b\d\w*", "", found[3])))
        if names & unknown or not all(name.isupper() for name in names):
            unknown.add(found[2])
            return found[0]
        return f"static constexpr {found[1]} {found[2]} = {found[3]};"

    return re.sub(r"^const (uint|bool|int) (\w+) = ([^;,]*);", constant, text, flags=re.M)


def _kernel(name: str, path: Path) -> str:
    text = _rewritten(_flat(path, {path.resolve()}))
    for pattern, by in _KERNEL_REWRITES:
        text = pattern.sub(by, text)
    barriers = "true" if "barrier()" in re.sub(r"emoryBarrier\w*\(\)", "", text) else "false"
    macros = "".join(f"#undef {one}\n" for one in sorted(set(re.findall(r"^#define (\w+)", text, re.M))))
    head = f"struct {name} : Invocation {{\nusing Invocation::Invocation;\nstatic constexpr bool BARRIERS = {barriers};\n"
    return f"{head}{_constants(text)}\n}};\n{macros}"


def kernels(shaders: Path, sources: dict[str, str]) -> str:
    """C++ of kernels. sources: their GLSL below ``shaders``, by the names of their functions."""
    made = [_kernel(f"k_{name}", shaders / source) for name, source in sources.items()]
    calls = [f"{{\"{name}\", &run_group<k_{name}>}}" for name in sources]
    table = "const NamedKernel GENERATED[] = {\n" + ",\n".join(calls) + ",\n{nullptr, nullptr}};"
    head = '// Made of shaders/ by zinc_attn/kernels/cpp.py.\n#include "contract.h"\n#pragma GCC diagnostic ignored "-Wunused"'
    return "\n".join([head, "namespace zinc {", *made, table, "}", ""])


# Functions of floats.glsl that lanes need otherwise or not at all.
_LEFT_OUT: Final = ("vec2 flush(",)


def lanes(shaders: Path, *names: str) -> str:
    """C++ of the float functions of GLSL files on vectors of native/cpu/lanes.h: a float is a vector F, a bool a mask."""
    text = "\n".join(_rewritten((shaders / name).read_text(encoding="utf-8")) for name in names)
    text = re.sub(r"^#include[^\n]*", "", text, flags=re.M)
    for head in _LEFT_OUT:
        text = re.sub(rf"^{re.escape(head)}[\s\S]*?^}}\n", "", text, flags=re.M)
    text = re.sub(r"\b(float|uint|int)\(", r"to_\1(", text)
    for scalar, vector in (("float", "F"), ("uint", "U"), ("bool", "M"), ("int(?! i\\b)", "I")):
        text = re.sub(rf"\b{scalar}\b", vector, text)
    text = re.sub(r"\bF (\w+) = ([A-Z][A-Z0-9_]+);", r"F \1 = all(\2);", text)
    return re.sub(r"^(\s*)(F|U|M) (\w+)\(", r"\1static ZINC_INLINE \2 \3(", text, flags=re.M)


def contract(shaders: Path) -> str:
    """contract.h: the numbers of both contracts, and the functions of floats.glsl on lanes."""
    numbers = "\n".join(_rewritten((shaders / name).read_text(encoding="utf-8")) for name in CONTRACTS)
    overload = "static ZINC_INLINE F weight(F s, float m) { return weight(s, all(m)); }"
    head = "// Made of shaders/ by zinc_attn/kernels/cpp.py.\n#pragma once\n#include \"glsl.h\"\n#include \"lanes.h\"\n#pragma GCC diagnostic ignored \"-Wparentheses\""
    declared = "static ZINC_INLINE F weight(F s, F m);"
    floats = lanes(shaders, "floats.glsl")
    return "\n".join([head, "namespace zinc {", numbers, declared, overload, floats, "}", ""])


def columns(shaders: Path) -> str:
    """Members of a struct with a product's parameters p: its columns, and how a result is stored."""
    seen: set[Path] = set()
    names = "tensor.glsl", "numbers.glsl", "columns.glsl", "sums.glsl"
    return _constants(_rewritten("\n".join(_flat(shaders / "graph" / name, seen) for name in names)))


def quantized(shaders: Path) -> str:
    """Members of a struct with a constant TYPE: what quantized weights are, with a row of weights in each lane.

    A ``uint`` or a ``float`` may be one of all rows or one of each, which C++ deduces; its vectors are of each.
    """
    places, blocks, sums, joins = (
        _rewritten((shaders / "graph" / f"{name}.glsl").read_text(encoding="utf-8"))
        for name in ("q_places", "q_blocks", "sums", "q_sums")
    )
    places = "\n".join(re.findall(r"^const [^;]*;", places, re.M))
    sums = sums[: sums.index("void store(")]
    text = "\n".join([places, blocks, sums, joins])
    text = re.sub(r"^(?:#include|shared)[^\n]*", "", text, flags=re.M)
    for name in ("uint table_entry", "void fill_table", "uint pair", "void exchange", "int dot4", "int dot16"):
        text = re.sub(rf"^{name}\([\s\S]*?^}}\n", "", text, flags=re.M)
    text = re.sub(r"^int packed_dot[^;]*;", "", text, flags=re.M)
    text = _constants(text)
    text = _apart(text, " +uint ", "auto ")
    text = re.sub(r"\b(float|int)\(", r"to_\1(", text)
    text = re.sub(r"(?<!constexpr )\b(?:uint|float)\b(?=[ &])", "auto", text)
    return re.sub(r"(?<![\w])(uvec4|vec4|vec2)\b(?! TABLE)", lambda found: f"lanes_{found[1]}", text)
