"""The generated C of the graph's kernels: ``zinc_graph.h`` and ``zinc_graph.c`` with the SPIR-V."""

from collections.abc import Iterator
from pathlib import Path

from ..kernels.c import kernel_entry, module_words
from ..kernels.declarations import GRID_SIDE
from ..kernels.expressions import to_c
from .declarations import GRAPH_KERNELS, MUL_MAT_UNITS
from .params import GROUPS, UNITS_TILE, c_header, modules, records
from .pieces import TYPES
from .units import UNITS_RULE

_SIZES = """
static uint64_t za_rows(struct tensor x) { return (uint64_t)x.n[1] * x.n[2] * x.n[3]; }
static uint64_t za_elements(struct tensor x) { return za_rows(x) * x.n[0]; }"""


def generated(spirv: Path) -> dict[str, str]:
    """Text of the files by name. spirv: the folder of the compiled modules."""
    lines = ['#include "zinc_graph.h"', *(module_words(spirv, decl) for decl in modules())]
    lines += ["", "const struct kernel za_graph_kernels[GRAPH_KERNELS] = {"]
    for kernel in GRAPH_KERNELS:
        lines.append(kernel_entry(f"GRAPH_{kernel.name.upper()}", kernel.decl, kernel.decl.file.removesuffix(".spv")))
    lines += ["};", "", "const struct weight_type za_weight_types[WEIGHT_TYPES] = {"]
    for name, kind in TYPES.items():
        runs = ", ".join(f"{{{run.offset}, {run.size}, {run.count}}}" for run in kind.runs)
        facts = f"{kind.values}, {kind.size}, {int(kind.halves)}, {int(kind.minimum)}, {kind.ahead}"
        lines.append(f'    [WEIGHT_TYPE_{name.upper()}] = {{"{name}", {facts}, {{{runs}}}}},')
    return {"zinc_graph.h": c_header(), "zinc_graph.c": "\n".join([*lines, "};", *_groups(), *_units_tile(), ""])}


def _groups() -> Iterator[str]:
    """The kernels' grids as a C function. A grid of one formula counts workgroups, which take x and then y."""
    names = {kernel.params: kernel.name for kernel in records()}
    yield from (_SIZES, f"\n{GROUPS} {{", "    uint64_t x = 0, y = 0, z = 1;", "    switch (kernel) {")
    for kernel in GRAPH_KERNELS:
        grid = kernel.decl.grid
        lines = [to_c(x, lambda name: name if name == "p" else f"c->{name}").replace("p.", "p->") for x in grid]
        pointers = {"c": f"{kernel.name}_constants *c = constants", "p": f"{names[kernel.params]}_params *p = params"}
        yield f"    case GRAPH_{kernel.name.upper()}: {{"
        yield from (f"        const struct {pointers[x]};" for x in pointers if f"{x}->" in "".join(lines))
        yield from (f"        {axis} = {line};" for axis, line in zip("xyz", lines, strict=False))
        if len(lines) == 1:
            yield f"        y = za_max(za_ceil_div(x, {GRID_SIDE}), 1), x = za_ceil_div(x, y);"
        yield from ("        break;", "    }")
    yield from ("    }", "    groups[0] = (uint32_t)x, groups[1] = (uint32_t)y, groups[2] = (uint32_t)z;", "}")


def _units_tile() -> Iterator[str]:
    """``UNITS_RULE`` as a C function: its caller sets the constants' type and matrices, it sets the tile."""
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
