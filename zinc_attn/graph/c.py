"""The generated C of the graph's kernels: ``zinc_graph.h`` and ``zinc_graph.c`` with the SPIR-V."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..kernels.c import kernel_entry, word_array
from ..kernels.expressions import to_c
from .declarations import GRAPH_KERNELS, MUL_MAT_UNITS
from .params import UNITS_TILE, c_header, modules
from .pieces import TYPES
from .units import UNITS_RULE


def generated(spirv: Path) -> dict[str, str]:
    """Text of the files by name. spirv: the folder of the compiled modules."""
    lines = ['#include "zinc_graph.h"']
    for decl in modules():
        path = spirv / decl.file  # which a compiler without the kernel's extension has not made: no code
        code = path.read_bytes() if path.exists() or decl.extension is None else bytes(4)
        lines.append(word_array(decl.file.removesuffix(".spv"), code))
    lines += ["", "const struct kernel za_graph_kernels[GRAPH_KERNELS] = {"]
    for kernel in GRAPH_KERNELS:
        lines.append(kernel_entry(f"GRAPH_{kernel.name.upper()}", kernel.decl, kernel.decl.file.removesuffix(".spv")))
    lines += ["};", "", "const struct weight_type za_weight_types[WEIGHT_TYPES] = {"]
    for name, kind in TYPES.items():
        runs = ", ".join(f"{{{run.offset}, {run.size}, {run.count}}}" for run in kind.runs)
        facts = f"{kind.values}, {kind.size}, {int(kind.halves)}, {int(kind.minimum)}, {kind.ahead}"
        lines.append(f'    [WEIGHT_TYPE_{name.upper()}] = {{"{name}", {facts}, {{{runs}}}}},')
    return {"zinc_graph.h": c_header(), "zinc_graph.c": "\n".join([*lines, "};", *_units_tile(), ""])}


def _units_tile() -> Iterator[str]:
    """``UNITS_RULE`` as a function that fills in constants, of which the type and the matrices are given."""
    known = {name: f"type->{name.lower()}" for name in ("VALUES", "HALVES", "MINIMUM")} | {"SUPERBLOCK": "SUPERBLOCK"}
    known |= {name: f"c->{name.lower()}" for name in ("MAT_M", "MAT_N", "MAT_K")}
    yield f"\n{UNITS_TILE} {{"
    yield "    const struct weight_type *type = &za_weight_types[c->type];"
    for name, (formula, _) in UNITS_RULE.table.items():
        yield f"    const uint64_t {name.lower()} = {to_c(formula, lambda x: known.get(x, x.lower()))};"
    for name in MUL_MAT_UNITS.decl.spec:
        if name.upper() in UNITS_RULE.table:
            yield f"    c->{name} = (uint32_t){name};"
    yield from ("    return served;", "}")
