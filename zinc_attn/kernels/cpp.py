"""The GLSL of shaders/ as C++ for native/cpu, so that a definition stands once; needs no NumPy.

A kernel becomes a struct: its members are the buffers, the specialization constants, the variables and the functions,
whose text stays as it is but for literals (1.0 becomes 1.0f), swizzles (.xy becomes .xy()), ``out`` parameters
(references) and arrays. native/cpu's kernels in C++ use the same functions, most on lanes: a float is then a vector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_CONTRACTS: Final = ("contract.glsl", "graph/contract.glsl")
_LAYOUT: Final = r"layout\(set = 0, binding = (\w+), std430\)[^{;]*\{\s*"
_SIZE: Final = "const uvec3 gl_WorkGroupSize = uvec3"
# Replacements, in order: those for every text, and then those for a kernel's text.
_REWRITES: Final = (
    (r"//[^\n]*", ""),
    (r"^#(?:version|extension)[^\n]*", ""),
    (r"\b(?:uint|float|int)\[\]\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"{\1}"),
    (r"(\w+)\.xy = ([^;]*);", r"set_xy(\1, \2);"),
    (r"\.([xyzw]{2,4})\b(?!\()", r".\1()"),
    (r"\b(?:inout|out)\s+(\w+)\s+(\w+)\[\w+\]", r"\1 *\2"),
    (r"\b(?:inout|out)\s+(\w+)\s+(\w+)", r"\1 &\2"),
    (r"\[\[(?:dont_)?unroll\]\] ?|\bprecise |\bspirv_literal ", ""),
    (r"^spirv_instruction\([^;]*;", ""),
    (r"(?<![\w.])(\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)(?![\w.])", r"\1f"),
)
_KERNEL_REWRITES: Final = (
    (r"layout\(local_size_x = (\w+)\) in;", rf"{_SIZE}(\1, 1u, 1u);"),
    (r"layout\([^)]*local_size_x_id = (\w+)[^)]*\) in;", rf"{_SIZE}(spec[\1], 1u, 1u);"),
    (r"layout\(constant_id = (\w+)\) const (\w+) (\w+) = [^;]*;", r"const \2 \3 = spec[\1];"),
    (_LAYOUT + r"(\w+) p;\s*\};", r"const \2 &p = *static_cast<const \2 *>(bound[\1]);"),
    (_LAYOUT + r"(\w+) (\w+)\[\];\s*\};", r"\2 *const \3 = static_cast<\2 *>(bound[\1]);"),
    (r"\bshared (\w+) (\w+)\[([^;]*)\];", r"\1 *const \2 = shared<\1>(\3);"),
    (r"^\w+ \w+\([^(){}]*\);$", ""),  # declarations before definitions
    (r"\bvoid main\(\)", "void run()"),
    (r"(\(|, )(\w+) (\w+)\[[A-Z]\w*\](?=[,)])", r"\1\2 *\3"),  # arrays as parameters
)


def _replaced(text: str, rewrites: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rewrites:
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text


def _read(shaders: Path, *names: str) -> str:
    """Files without what they include."""
    text = "\n".join((shaders / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r"^#include[^\n]*", "", _replaced(text, _REWRITES), flags=re.M)


def _flat(path: Path, seen: set[Path]) -> str:
    """A file with its includes, each once, without the contracts."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        include = re.match(r'#include "(.*)"', line)
        if not include:
            lines.append(line)
        elif (inner := (path.parent / include[1]).resolve()).name != "contract.glsl" and inner not in seen:
            seen.add(inner)
            lines.append(_flat(inner, seen))
    return "\n".join(lines)


def _apart(text: str, head: str, new_head: str) -> str:
    """A declaration of several names, which begins with ``head``, as a declaration of each, with ``new_head``."""

    def declarations(match: re.Match[str]) -> str:
        depth, parts = 0, [""]
        for letter in match[1]:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        return "\n".join(f"{new_head}{part.strip()};" for part in parts)

    return re.sub(rf"^{head}([^;]*);", declarations, text, flags=re.M)


def _constants(text: str) -> str:
    """Constants that C++ knows when it compiles become constexpr, so that they can be sizes of arrays."""
    unknown = {"VECTORS", "ROWS", *re.findall(r"^const \w+ (\w+) = spec\[", text, re.M)}

    def constant(match: re.Match[str]) -> str:
        names = set(re.findall(r"\b[A-Za-z_]\w*", re.sub(r"0x\w+|\b\d\w*", "", match[3])))
        if names & unknown or not all(name.isupper() for name in names):
            unknown.add(match[2])
            return match[0]
        return f"static constexpr {match[1]} {match[2]} = {match[3]};"

    text = _apart(text, "const uint ", "const uint ")
    return re.sub(r"^const (uint|bool|int) (\w+) = ([^;,]*);", constant, text, flags=re.M)


def _specialized(shaders: Path) -> dict[str, str]:
    """The declarations of each graph kernel's specialization constants, a line each, by the macro that has them."""
    text = (shaders / "graph/contract.glsl").read_text(encoding="utf-8").replace(" \\\n   ", "")
    return {name: body.replace("; ", ";\n") for name, body in re.findall(r"^#define (\w+_CONSTANTS) (.*)", text, re.M)}


def _kernel(name: str, path: Path, specialized: Mapping[str, str]) -> str:
    flat = _flat(path, {path.resolve()})
    flat = re.sub(r"^\w+_CONSTANTS$", lambda macro: specialized[macro[0]], flat, flags=re.M)
    text = _replaced(_replaced(flat, _REWRITES), _KERNEL_REWRITES)
    barriers = "true" if re.search(r"\bbarrier\(\)", text) else "false"
    members = "using Invocation::Invocation;", f"static constexpr bool BARRIERS = {barriers};"
    macros = (f"#undef {macro}" for macro in sorted(set(re.findall(r"^#define (\w+)", text, re.M))))
    return "\n".join([f"struct {name} : Invocation {{", *members, _constants(text), "};", *macros])


def kernels(shaders: Path, sources: Mapping[str, str]) -> str:
    """kernels.cpp. sources: GLSL files below ``shaders``, by the names of their SPIR-V modules."""
    specialized = _specialized(shaders)
    structs = (_kernel(f"k_{name}", shaders / source, specialized) for name, source in sources.items())
    table = (f'    {{"{name}", &run_group<k_{name}>}},' for name in sources)
    head = '#include "contract.h"', '#pragma GCC diagnostic ignored "-Wunused"', "namespace zinc {"
    end = "const NamedKernel GENERATED[] = {", *table, "    {nullptr, nullptr}};", "}"
    return "\n".join([*head, *structs, *end, ""])


def _on_lanes(text: str) -> str:
    """Functions of numbers as functions of vectors: a float becomes a vector F, a bool a mask M."""
    text = re.sub(r"\b(float|uint|int)\(", r"to_\1(", text)
    for scalar, vector in (("float", "F"), ("uint", "U"), ("bool", "M"), ("int(?! i\\b)", "I")):
        text = re.sub(rf"(?<!const )\b{scalar}\b", vector, text)
    text = re.sub(r"\bF (\w+) = ([A-Z][A-Z0-9_]+|[0-9.]+f);", r"F \1 = all(\2);", text)
    text = re.sub(r" : (\d[\d.]*f)\b", r" : all(\1)", text)
    text = re.sub(r"\breturn (p\.\w+);", r"return all(\1);", text)
    return re.sub(r"^([FUM] \w+\()", r"ZINC_INLINE \1", text, flags=re.M)


def _without(text: str, *functions: str) -> str:
    return re.sub(rf"^\w+ (?:{'|'.join(functions)})\([\s\S]*?^}}\n", "", text, flags=re.M)


def contract(shaders: Path) -> str:
    """contract.h: the numbers of both contracts, and floats.glsl on lanes."""
    text = _on_lanes(re.sub(r"^vec2 flush\([\s\S]*?^}\n", "", _read(shaders, "floats.glsl"), flags=re.M))
    head = "#pragma once", '#include "glsl.h"', '#pragma GCC diagnostic ignored "-Wparentheses"', "namespace zinc {"
    places = []
    for macro, body in _specialized(shaders).items():
        names = re.findall(r"layout\((?:constant_id|local_size_x_id) = (\d+)[^)]*\) (?:const uint (\w+))?", body)
        prefix = macro.replace("_CONSTANTS", "_SPEC")
        places += [f"const uint {prefix}_{name or 'WORKGROUP_SIZE'} = {number};" for number, name in names]
    numbers = re.sub(r"(_POLY\(y, x\)) y = ([^;]*);", r"\1 y = convert<decltype(y)>(\2);", _read(shaders, *_CONTRACTS))
    return "\n".join([*head, numbers, *places, text, "}", ""])


def numbers(shaders: Path) -> str:
    """numbers.h: functions of numbers, in the namespace ``scalar`` as they are, and on lanes."""
    names = "tensor", "numbers", "float_types", "turns", "follow", "norm_scale", "sort_key", "activations"
    plain = re.sub(r"^(\w+ \w+\()", r"inline \1", _members(shaders, *(f"graph/{name}" for name in names)), flags=re.M)
    plain = _apart(re.sub(r"^inline uint linear_id[\s\S]*?^}\n", "", plain, flags=re.M), "const uint ", "const uint ")
    text = _read(shaders, *(f"graph/{name}.glsl" for name in ("numbers", "activations", "soft_max")))
    text = re.sub(r"^shared [^;]*;", "", text, flags=re.M)
    on_lanes = _on_lanes(_without(text, "quotient", "root", "workgroup_most"))
    follow = _read(shaders, "graph/follow.glsl")
    follow = re.sub(r"\bfloat\b", "F", follow[follow.index("float followed") :])
    macros = (f"#undef {macro}" for macro in ("LOAD", "INFINITY", "NAN"))
    head = "#pragma once", '#include "contract.h"', "namespace zinc {", "namespace scalar {"
    return "\n".join([*head, plain, "}", "using scalar::reads;", on_lanes, f"ZINC_INLINE {follow}", *macros, "}", ""])


def elementwise(shaders: Path) -> str:
    """elementwise.h: kernels whose value() is of the elements of a vector along dimension 0."""
    specialized, structs = _specialized(shaders), []
    files = {"Binary": "binary.comp", "Unary": "unary.comp", "Glu": "glu.glsl", "AddId": "add_id.comp"}
    for name, source in files.items():
        text = (shaders / "graph" / source).read_text(encoding="utf-8")
        text = re.sub(r"#ifdef QUANTIZED[\s\S]*?#endif", "", text)
        text = re.sub(r"^\w+_CONSTANTS$", lambda macro: specialized[macro[0]], text, flags=re.M)
        cut = re.search(r"^float ", text, re.M)
        assert cut is not None
        head, body = text[: cut.start()], text[cut.start() : text.index("void main")]
        head = re.sub(_LAYOUT + r"(\w+) (\w+)\[\];\s*\};", r"const Elements<\2> \3{bound[\1]};", head)
        head = _replaced(_replaced(re.sub(r"^#include[^\n]*", "", head, flags=re.M), _REWRITES), _KERNEL_REWRITES)
        head = re.sub(r"^const (\w+) &p", r"const \1 p", head, flags=re.M)
        body = re.sub(r"\bU\b", "auto", _on_lanes(_replaced(body, _REWRITES)))
        body = re.sub(r"\b(silu\(\w+), ([\w.]+)\)", r"\1, all(\2))", body)
        structs.append(f"struct {name} : OnLanes {{\nusing OnLanes::OnLanes;\n{_constants(head)}\n{body}}};")
    return "\n".join(structs) + "\n"


def expert_sums(shaders: Path) -> str:
    """expert_sums.h: sums of experts' results, of the elements of a vector."""
    text = _read(shaders, "graph/expert_sums.glsl").replace("uint j", "Run j")
    text = re.sub(r"\bfloat\b", "F", text).replace("F sum = 0.0f", "F sum = {}")
    return re.sub(r"\buint at\b", "const Run at", text)


def _members(shaders: Path, *names: str) -> str:
    """The declarations of GLSL files, as members of a struct."""
    seen: set[Path] = set()
    text = "\n".join(_flat(shaders / f"{name}.glsl", seen) for name in names)
    return _constants(_replaced(text, _REWRITES))


def states(shaders: Path) -> str:
    """states.h, of a workgroup of attention: the algebra of states."""
    return _members(shaders, "floats", "attend/state")


def item(shaders: Path) -> str:
    """item.h, of a workgroup of pass 1: its item and query vectors."""
    return _members(shaders, "attend/item")


def columns(shaders: Path) -> str:
    """columns.h, of a product with the parameters p: its columns, and how a result is stored."""
    text = _members(shaders, *(f"graph/{name}" for name in ("tensor", "numbers", "columns", "sums", "operands")))
    begin = re.search(r"^uint matrix_begin\(\)[\s\S]*?^}", _read(shaders, "graph/q_places.glsl"), re.M)
    assert begin is not None
    return f"{text}\n{begin[0]}\n"


def quantized(shaders: Path) -> str:
    """quantized.h, members of a struct with a constant TYPE: quantized weights decoded, with a row in each lane.

    A ``uint`` or ``float`` is shared by all rows, or a vector of a number for each row: C++ deduces which. GLSL's
    vectors always have numbers for each row.
    """
    names = "q_places", "q_blocks", "sums", "q_sums"
    places, blocks, sums, joins = (_read(shaders, f"graph/{name}.glsl") for name in names)
    places = "\n".join(re.findall(r"^const [^;]*;", places, re.M))
    text = "\n".join([places, blocks, sums[: sums.index("void store(")], joins])
    text = re.sub(r"^(?:shared|int packed_dot)[^;]*;", "", text, flags=re.M)
    native = "uint table_entry|void fill_table|uint pair|void exchange|void decode|int dot4|int dot16"
    text = re.sub(rf"^(?:{native})\([\s\S]*?^}}\n", "", text, flags=re.M)
    begin, end = text.index("void decode_pairs("), text.index("vec2 scale_32(")
    decoded = re.sub(r"if \(HAS_TABLE\) \{[^}]*\}\s*return;\s*\}", "", text[begin:end])
    decoded = decoded.replace("piece16(", "values16(").replace("spread_16(", "fifths(")
    text = _apart(_constants(text[:begin] + decoded + text[end:]), " +uint ", "auto ")
    text = re.sub(r"\b(float|int)\(", r"to_\1(", text)
    text = re.sub(r"(?<!constexpr )\b(?:uint|float)\b(?=[ &])", "auto", text)
    text = re.sub(r"\b(uvec4|vec4|vec2)\b(?! TABLE)", r"lanes_\1", text)
    return re.sub(r"^((?:void|auto|lanes_\w+) \w+\()", r"ZINC_INLINE \1", text, flags=re.M)
