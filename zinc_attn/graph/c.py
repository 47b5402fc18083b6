"""The generated C of the graph's kernels: ``zinc_graph.h`` and ``zinc_graph.c`` with the SPIR-V."""

from __future__ import annotations

from pathlib import Path

from ..kernels.c import kernel_entry, word_array
from .declarations import GRAPH_KERNELS
from .params import c_header, modules
from .pieces import TYPES


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
    return {"zinc_graph.h": c_header(), "zinc_graph.c": "\n".join([*lines, "};", ""])}
